"""Runs llama.cpp's own HTTP server, out of the public package xllamacpp, until it is ended.

Run by engine_servers.py with the Python of a venv that has the package. The server ends with the process that started it.
"""

import argparse
import os
import time

import xllamacpp


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True, help="the GGUF file")
    parser.add_argument("--alias", required=True, help="what the model is called in requests")
    parser.add_argument("--port", required=True, type=int)
    parser.add_argument("--parallel", type=int, default=4, help="slots")
    parser.add_argument("--context", type=int, default=8192, help="KV tokens over all slots")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--slot-save-path", default="", help="folder that slots are saved to and restored from")
    parser.add_argument("--unified", action="store_true", help="one pool of KV for all slots; without it each has its own part")
    options = parser.parse_args()
    starter = os.getppid()

    params = xllamacpp.CommonParams()
    params.model.path = options.model
    params.model_alias = {options.alias}
    params.port = options.port
    params.n_parallel, params.n_ctx = options.parallel, options.context
    params.kv_unified = options.unified
    if options.slot_save_path:
        # Names of files are put behind it as they are.
        params.slot_save_path = os.path.join(options.slot_save_path, "")
    params.cpuparams.n_threads = options.threads
    # Each answer is computed, and none comes out of what an earlier request left.
    params.cache_ram_mib = 0
    params.endpoint_metrics = params.endpoint_slots = params.endpoint_props = True
    params.warmup = False
    server = xllamacpp.Server(params)
    print("listening", server.listening_address, flush=True)
    # The server dies with its Python object, so that stays in use.
    while server is not None and os.getppid() == starter:
        time.sleep(1)
    os._exit(0)


if __name__ == "__main__":
    main()
