"""KV that goes from engine to engine by NIXL, where both have it, and through the nodes where that fails."""

import asyncio

from engine_servers import VllmServer, in_a_mesh
from kv_checks import MOST, QUIET, Wave, at_rest, cases_of, nothing_held, unmoved_answers
from mesh_nodes import Failure, note

# Streams that move at once, and output of each.
STREAMS, TOKENS = 8, 96
MOVES = 2
READ = "shoal_engine_kv_direct_bytes_total"


async def direct(options, folder, model_id):
    """Streams that move there and back with their KV by both ways, side by side in one mesh."""
    if not options.nixl:
        raise Failure("there is no NIXL: name its folder with --nixl")
    folder = folder / "direct"
    folder.mkdir()
    more = {"kv": True, "binary": options.binary, "nixl": options.nixl}
    engines = [VllmServer(f"near{number}", folder, model_id, options.engine_python, options.model, **more) for number in (1, 2)]
    note("starting two vLLMs with NIXL")
    async with in_a_mesh(engines, options.binary, folder, QUIET) as nodes:
        cases = cases_of(nodes, TOKENS, STREAMS)
        unmoved = await unmoved_answers(nodes, cases)
        said, complaints = [], []
        for manner in ("staged", "blocking"):
            before = await read(nodes)
            wave = await Wave(nodes, cases, MOVES, manner).run()
            wave.tell(unmoved)
            mib = (await read(nodes) - before) / 2**20
            complaints += wave.complaints(unmoved)
            near = sum(report["direct_tokens"] > 0 for report in wave.reports)
            if near < MOST * len(wave.reports) or mib < 1:
                complaints.append(f"{manner}: {near} of {len(wave.reports)} moves went from engine to engine, with {mib:.1f} MiB")
            said.append(f"{wave.figures(unmoved)}; {near} of them with {mib:.1f} MiB from engine to engine")
            await at_rest(nodes)
        nothing, wrong = await nothing_held(nodes, options)
        return "; ".join([*said, nothing]), complaints + wrong


async def read(nodes):
    """Bytes that the engines have read out of each other."""
    # A node shows what its engine did a moment later.
    await asyncio.sleep(1)
    return await nodes.added(nodes.all(), READ)
