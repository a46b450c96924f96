"""Nodes beside real vLLMs, as a client sees them.

Run by check-vllm.sh, which gets the binary, vLLM, the model and the client ready. Two vLLMs on CPU with a small KV cache, a
node beside each, one mesh. What must hold is what check_engines.py says, with token ids compared where a stream moves, and
that vLLM's own benchmark runs through a node without a failed request.

It takes some fifteen minutes on two idle cores, two of them for the engines to start, and about 9 GB of memory.

Three parts run when they are asked for alone, with engines of their own: direct moves KV from engine to engine by NIXL, overhead
says what the connector costs that gives KV away, pressure what moves are good for when an engine is short of KV.

The last line is `PASS vllm: figures` or `FAIL vllm: figures`.
"""

import argparse
import asyncio
import json

import engine_checks
import kv_checks
import kv_costs
import kv_direct
from engine_servers import VllmServer, in_a_mesh, vllm_environment
from http_stream import HttpError
from mesh_nodes import Failure, conclude, note

MODEL_ID = "smollm2-135m"
BENCH_WITHIN = 900

# vLLM's benchmark by its module, as the command looks for a package of another name.
BENCH = """
import argparse
from vllm.benchmarks.serve import add_cli_args, main
parser = argparse.ArgumentParser()
add_cli_args(parser)
main(parser.parse_args())
"""


async def bench(nodes, options):
    """vLLM's own load generator against one node."""
    front, folder = nodes.all()[0], nodes.folder
    result, log = folder / "bench.json", folder / "bench.log"
    command = [
        options.engine_python, "-c", BENCH, "--backend", "openai-chat", "--base-url", front.url,
        "--endpoint", "/v1/chat/completions", "--model", MODEL_ID, "--tokenizer", options.model, "--dataset-name", "random", "--random-input-len", "64",
        "--random-output-len", "24", "--num-prompts", str(options.bench_requests), "--max-concurrency", str(options.at_once),
        "--temperature", "0", "--disable-tqdm", "--save-result", "--result-dir", str(folder), "--result-filename", result.name,
    ]
    with open(log, "wb") as out:
        process = await asyncio.create_subprocess_exec(*command, stdout=out, stderr=out, env=vllm_environment())
        try:
            await asyncio.wait_for(process.wait(), BENCH_WITHIN)
        except asyncio.TimeoutError:
            raise Failure(f"vLLM's benchmark still runs after {BENCH_WITHIN} s") from None
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
    if process.returncode != 0 or not result.exists():
        raise Failure(f"vLLM's benchmark ended with {process.returncode}: {log.read_text(errors='replace')[-500:]}")
    said = json.loads(result.read_text())
    failed = options.bench_requests - said["completed"]
    return (
        f"vLLM's benchmark: {said['completed']} of {options.bench_requests} requests good, {said['output_throughput']:.1f} tokens/s"
    ), [f"{failed} requests of vLLM's benchmark failed"] if failed else []


PARTS = [
    ("mixed", engine_checks.many),
    ("bench", bench),
    ("freeness", engine_checks.freeness),
    ("models", engine_checks.names),
    ("hanging up", engine_checks.closing),
    ("hand-over", engine_checks.handover),
    ("moving", kv_checks.moving),
    ("target killed", kv_checks.target_killed),
    ("rolling drain", kv_checks.rolling_drain),
    ("nothing held", kv_checks.nothing_held),
    ("killed engine", engine_checks.kill),
]
# With engines of their own, and only if they are asked for.
ALONE = {"direct": kv_direct.direct, "overhead": kv_costs.overhead, "pressure": kv_costs.pressure}


async def check(options, folder):
    asked = options.parts.split(",") if options.parts else [name for name, _ in PARTS]
    chosen = [(name, part) for name, part in PARTS if name in asked]
    figures, complaints = await in_one_mesh(options, folder, chosen) if chosen else ([], [])
    for name in asked:
        if name in ALONE:
            try:
                said, wrong = await ALONE[name](options, folder, MODEL_ID)
            except (Failure, HttpError, OSError, asyncio.TimeoutError, LookupError) as failure:
                said, wrong = f"{name} failed", [f"{name}: {type(failure).__name__} {failure}"]
            note(f"{name}: {said}")
            figures, complaints = [*figures, said], complaints + wrong
    return figures, complaints


async def in_one_mesh(options, folder, chosen):
    """The parts that share two vLLMs and a mesh."""
    kv = {"kv": not options.without_kv, "binary": options.binary}
    engines = [VllmServer(f"engine{number}", folder, MODEL_ID, options.engine_python, options.model, **kv) for number in (1, 2)]
    note("starting two vLLMs, which takes some minutes")
    try:
        async with in_a_mesh(engines, options.binary, folder, kv_checks.QUIET) as nodes:
            return await engine_checks.run_parts(nodes, options, chosen)
    except Failure as failure:
        return [], [str(failure)]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--binary", required=True, help="the shoal binary")
    parser.add_argument("--model", required=True, help="the folder with the model as vLLM reads it")
    parser.add_argument("--engine-python", required=True, help="the Python that has vLLM")
    parser.add_argument("--requests", type=int, default=100)
    parser.add_argument("--bench-requests", type=int, default=32, help="of vLLM's benchmark")
    parser.add_argument("--at-once", type=int, default=8)
    parser.add_argument("--streams", type=int, default=6, help="that run while rows are compared and when an engine is killed")
    parser.add_argument("--tokens", type=int, default=192, help="of each of these streams")
    parser.add_argument("--copy", default="", help="the manner of a move, if not the node's own choice")
    kv_checks.add_options(parser, kv_streams=16, kv_tokens=128, kv_clients=8, engine_kills="100", node_kills="0,50,150,400", held_kills=3)
    kv_costs.add_options(parser)
    parser.add_argument("--nixl", help="the folder with NIXL, for direct")
    parser.add_argument("--parts", default="", help=f"only these, of {','.join([*(name for name, _ in PARTS), *ALONE])}")
    parser.add_argument("--keep-logs", action="store_true", help="keep the logs even if all is well")
    conclude("vllm", parser.parse_args(), check)


if __name__ == "__main__":
    main()
