"""What it costs that vLLM's KV can move, and what it is good for when an engine is short of it. Nothing here is judged but that
every stream ends as it must.

Each part starts engines of its own and gives a line of figures and a list of complaints.
"""

import asyncio
import random
import statistics
import time
from operator import attrgetter
from typing import NamedTuple

from engine_checks import DRAINED_WITHIN, counting
from engine_requests import Answer, Client, faults
from engine_servers import MESH_WITHIN, EngineNodes, VllmServer, start_engines, stop_engines
from kv_checks import LEAVING
from mesh_nodes import counted, note, share
from process_usage import processor_seconds

# Requests of a round of `overhead`, all at once, and output of each.
ROUND, ROUND_TOKENS = 12, 96
# Seconds for which engines at rest are watched.
REST = 30
# KV blocks of an engine under pressure: two thirds of what its long streams want at most.
FEW_BLOCKS = 64
# Output of the streams that grow long, and of the others.
LONG, SHORT = 320, 24
# The long ones all go to the same node, which no policy that knows their lengths would do.
BLIND = ["--policy", "round-robin", "--redirect-below", "0", "--queue-limit", "256", "--move-below", "4", "--move-above", "8"]


def add_options(parser):
    parser.add_argument("--overhead-rounds", type=int, default=10, help="of overhead, each in every way")
    parser.add_argument("--pressure-requests", type=int, default=48, help="of pressure, each time")
    parser.add_argument("--pressure-rate", type=float, default=1.0, help="arrivals a second")


def engine(options, folder, model_id, name, **more):
    return VllmServer(name, folder, model_id, options.engine_python, options.model, binary=options.binary, **more)


async def throughput(server, turn, named):
    """The streams of this round, which all begin at once, and complaints. `named` streams tell the connector a name, as those of
    a node do."""
    await server.forget()
    cases = []
    for number in range(ROUND):
        name = {"kv_transfer_params": {"shoal": {"id": f"check-{turn}-{number}"}}} if named else {}
        cases.append(counting(11 + 17 * turn + 5 * number, ROUND_TOKENS, 16 + 3 * number, **name))
    async with Client(server.url, server.model_id) as client:
        began, spent = time.monotonic(), processor_seconds(server.process.pid)
        answers = await asyncio.gather(*(client.ask(case) for case in cases))
    took, spent = time.monotonic() - began, processor_seconds(server.process.pid) - spent
    tokens = sum(answer.tokens or 0 for answer in answers)
    wrong = [fault for case, answer in zip(cases, answers) for fault in faults(case, answer)]
    return Round(tokens / took, 1e3 * spent / tokens), wrong


async def at_rest(servers):
    """Milliseconds of a processor that each takes a second while it has nothing to do."""
    before = [processor_seconds(server.process.pid) for server in servers]
    await asyncio.sleep(REST)
    return [1e3 * (processor_seconds(server.process.pid) - spent) / REST for server, spent in zip(servers, before)]


class Round(NamedTuple):
    """What a round of an engine came to: output tokens a second, and milliseconds of a processor for each."""

    rate: float
    cost: float


rate_of, cost_of = attrgetter("rate"), attrgetter("cost")


def compared(name, rounds, base):
    """How rounds compare with those of the engine without the connector that ran next to them, in words."""

    def ratios(value):
        each = sorted(100 * (value(one) / value(other) - 1) for one, other in zip(rounds, base))
        return f"{statistics.median(each):+.1f} % in the median, quartiles {share(each, 0.25):+.1f} and {share(each, 0.75):+.1f} %"

    rate, cost = (statistics.median(map(value, rounds)) for value in (rate_of, cost_of))
    return f"{rate:.1f} tokens/s ({ratios(rate_of)}) and {cost:.2f} ms of a processor a token ({ratios(cost_of)}) {name}"


async def overhead(options, folder, model_id):
    """Tokens a second, and what each costs a processor, of two vLLMs that differ in the connector alone, asked in turn, without a
    node; and what they take while nobody asks."""
    plain, connected = engine(options, folder, model_id, "plain"), engine(options, folder, model_id, "connected", kv=True)
    ways = [("without the connector", plain, False), ("with it", connected, False), ("with it and names", connected, True)]
    rounds, complaints = {name: [] for name, _, _ in ways}, []
    try:
        note("starting a vLLM with the connector and one without")
        note(f"both are up after {await start_engines([plain, connected]):.0f} s")
        idle = await at_rest([plain, connected])
        for number in range(options.overhead_rounds + 1):
            # Each way is first, second and last as often, forwards and backwards: what depends on the place comes to nothing.
            turned = ways[number % 3:] + ways[:number % 3]
            for name, server, named in turned if number % 2 else reversed(turned):
                said, wrong = await throughput(server, number, named)
                complaints += wrong
                # The first round warms up.
                if number:
                    rounds[name].append(said)
    finally:
        await stop_engines([plain, connected])
    base = rounds[ways[0][0]]
    rate, cost = (statistics.median(map(value, base)) for value in (rate_of, cost_of))
    said = [f"{rate:.1f} tokens/s and {cost:.2f} ms of a processor a token {ways[0][0]}"]
    said += [compared(name, rounds[name], base) for name, _, _ in ways[1:]]
    return (f"{', '.join(said)}, {len(base)} rounds of {ROUND} streams; at rest {idle[0]:.1f} ms of a processor a second without and "
            f"{idle[1]:.1f} ms with it; the goal is 1 % at most"), complaints


class Pressure:
    """Streams of which every second one grows long, at engines that are too small for all of these."""

    def __init__(self, nodes, options):
        self.nodes, self.options = nodes, options
        self.answers, self.cases, self.asked = [], [], []

    async def run(self, interval):
        """One run, with so many milliseconds between two looks of a node whether to move something."""
        nodes, dice = self.nodes, random.Random(1)
        nodes.start_mesh(len(nodes.engines), [*BLIND, *LEAVING, "--reschedule-interval-ms", interval])
        await nodes.wait_until_ready(nodes.all(), MESH_WITHIN)
        before = await self.preemptions()
        began = time.monotonic()
        async with Client(nodes.all()[0].url, nodes.model_id) as client:
            tasks = []
            for number in range(self.options.pressure_requests):
                case = counting(11 + number, SHORT) if number % 2 else counting(101 + number, LONG)
                self.cases.append(case)
                self.answers.append(Answer())
                self.asked.append(time.monotonic())
                tasks.append(asyncio.create_task(client.ask(case, self.answers[-1])))
                # Arrivals do not wait for answers.
                await asyncio.sleep(dice.expovariate(self.options.pressure_rate))
            await asyncio.gather(*tasks)
        took = time.monotonic() - began
        preempted = await self.preemptions() - before
        moved = await self.moved()
        await nodes.wait_until_drained(nodes.all(), DRAINED_WITHIN)
        for node in nodes.all():
            await nodes.stop(node)
        await asyncio.gather(*(server.forget() for server in nodes.engines))
        return self.figures(took, preempted, moved)

    async def preemptions(self):
        told = await asyncio.gather(*(server.metrics() for server in self.nodes.engines))
        return round(sum(metrics["vllm:num_preemptions_total"] for metrics in told))

    async def moved(self):
        pages = await asyncio.gather(*(self.nodes.counters(node) for node in self.nodes.all()))
        outcome = [counted(page, "shoal_moves_total", 'outcome="moved"') for page in pages]
        mib = sum(counted(page, "shoal_move_bytes_total") for page in pages) / 2**20
        return f"{round(sum(outcome))} moves with {mib:.1f} MiB"

    def figures(self, took, preempted, moved):
        first = [answer.moments[0] - asked for answer, asked in zip(self.answers, self.asked) if answer.moments]
        gaps = [answer.longest_gap() for answer in self.answers]
        return (f"{preempted} preemptions, {moved}, first token P50/P99 {share(first, 0.5):.2f}/{share(first, 0.99):.2f} s, longest gap "
                f"of a stream P50/P99 {share(gaps, 0.5):.2f}/{share(gaps, 0.99):.2f} s, {len(self.answers)} streams in {took:.0f} s")

    def complaints(self):
        return [fault for case, answer in zip(self.cases, self.answers) for fault in faults(case, answer)]


async def pressure(options, folder, model_id):
    """A load that overfills one of two engines, with rescheduling off and on."""
    kv = not options.without_kv
    # Its nodes are others than those of the parts before it.
    folder = folder / "pressure"
    folder.mkdir()
    engines = [engine(options, folder, model_id, f"small{number}", blocks=FEW_BLOCKS, kv=kv) for number in (1, 2)]
    nodes = EngineNodes(options.binary, engines, folder)
    said, complaints = [], []
    try:
        note(f"starting two vLLMs with {FEW_BLOCKS} blocks of KV")
        note(f"both are up after {await start_engines(engines):.0f} s")
        for name, interval in (("off", "0"), ("on", "100")):
            run = Pressure(nodes, options)
            said.append(f"rescheduling {name}: {await run.run(interval)}")
            note(said[-1])
            complaints += run.complaints()
    finally:
        await nodes.stop_all()
        await stop_engines(engines)
    return "; ".join(said), complaints
