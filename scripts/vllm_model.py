"""Makes of the demo model's GGUF file a folder that vLLM can serve: plain Llama weights in bf16, tokenizer, chat template.

Run by check-vllm.sh with vLLM's own Python, which has transformers; it takes about half a minute of one core.
"""

import argparse
import shutil
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

# What the configuration of a model read from GGUF says about its file, and must not say about the copy.
ABOUT_THE_FILE = ("quantization_config", "_name_or_path", "model_type", "transformers_version", "architectures")


def convert(gguf, out):
    source = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    tokenizer = AutoTokenizer.from_pretrained(**source)
    read = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
    # A model that came from GGUF refuses to be saved, so its weights go into a fresh one.
    settings = {key: value for key, value in read.config.to_dict().items() if key not in ABOUT_THE_FILE}
    model = LlamaForCausalLM(LlamaConfig(architectures=["LlamaForCausalLM"], **settings))
    model.load_state_dict(read.state_dict())
    model.tie_weights()
    model.to(torch.bfloat16).save_pretrained(out)
    tokenizer.save_pretrained(out)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gguf", required=True, type=Path)
    parser.add_argument("--out", required=True, type=Path, help="the folder to make; it is there whole or not at all")
    options = parser.parse_args()
    work = options.out.with_name(options.out.name + ".part")
    shutil.rmtree(work, ignore_errors=True)
    convert(options.gguf, work)
    shutil.rmtree(options.out, ignore_errors=True)
    work.rename(options.out)
    print(options.out)


if __name__ == "__main__":
    main()
