"""Nodes beside real llama-servers, as a client sees them.

Run by check-engines.sh, which gets the binary, the server, the model and the client ready. Two llama-servers, a node beside
each, one mesh. What must hold:

1. Mixed requests through one node all succeed, on both engines; what is not generation is answered as the engine does.
2. A node's row in the view says what its engine says of itself, while streams run and after.
3. An unknown model is a 404, the listed models are those of the engines, and a client that hangs up frees its slot.
4. An engine killed while streams run: no stream is cut, new requests succeed, the row says Failed within a second, and
   Ready once the engine is back.
5. A greedy stream that moves to the other engine gives the text of an unmoved run.
6. So do streams that move with their KV, there and back and several at once, streams whose target dies while they move, and
   those of nodes that leave in order; and afterwards no engine holds anything.

The last line is `PASS engines: figures` or `FAIL engines: figures`.
"""

import argparse

import engine_checks
import kv_checks
from engine_servers import LlamaServer, in_a_mesh
from mesh_nodes import Failure, conclude

MODEL_ID = "smollm2-135m"

PARTS = [
    ("mixed", engine_checks.many),
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


async def check(options, folder):
    kv = not options.without_kv
    engines = [LlamaServer(f"engine{number}", folder, MODEL_ID, options.engine_python, options.model, kv) for number in (1, 2)]
    chosen = [(name, part) for name, part in PARTS if not options.parts or name in options.parts.split(",")]
    # Moves are asked for here, and none comes by itself in between.
    flags = ["--reschedule-interval-ms", "0", *kv_checks.LEAVING]
    try:
        async with in_a_mesh(engines, options.binary, folder, flags) as nodes:
            return await engine_checks.run_parts(nodes, options, chosen)
    except Failure as failure:
        return [], [str(failure)]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--binary", required=True, help="the shoal binary")
    parser.add_argument("--model", required=True, help="the GGUF file")
    parser.add_argument("--engine-python", required=True, help="the Python that has llama-server")
    parser.add_argument("--requests", type=int, default=100)
    parser.add_argument("--at-once", type=int, default=8)
    parser.add_argument("--streams", type=int, default=6, help="that run while rows are compared and when an engine is killed")
    parser.add_argument("--tokens", type=int, default=160, help="of each of these streams")
    parser.add_argument("--copy", default="", help="the manner of a move, if not the node's own choice")
    kv_checks.add_options(parser, kv_streams=4, kv_tokens=64, kv_clients=4, engine_kills="30", node_kills="60", held_kills=0)
    parser.add_argument("--parts", default="", help=f"only these, of {','.join(name for name, _ in PARTS)}")
    parser.add_argument("--keep-logs", action="store_true", help="keep the logs even if all is well")
    conclude("engines", parser.parse_args(), check)


if __name__ == "__main__":
    main()
