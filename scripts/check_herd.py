"""Measures how evenly requests lie on the nodes of a mesh, whichever of them clients ask.

Run by check-herd.sh, which gets the binary ready. Real processes with a simulated engine whose step takes the same time
under any load, so that only the choice of the node counts. For each number of entry nodes the same requests are sent,
and the requests in each node's engine are counted ten times a second. The herd ratio is the mean over time of the fullest
node's count over the mean count: 1 is perfectly even. It must be at or below the goal, and no request may fail.

The same was measured of SMG 1.13, one to four gateways over eight such engines that are no gateways themselves. What the
shortest queue and the better of two would give with exact counts is worked out here, for the same requests.

The last line is `PASS herd: figures` or `FAIL herd: figures`.
"""

import argparse
import asyncio
import heapq
import json
import math
import random
import statistics
import time

from mesh_nodes import Failure, SimulatedNodes, conclude, load, note

READY_WITHIN = 60
DRAINED_WITHIN = 30

# Time to serve a request, of the measurement that is repeated: log-normal, cut. The mean is that before the cut.
MEAN_S, SIGMA, CUT_S = 4.0, 1.0, 30.0
# The engine gives a token each step. Shorter steps bring the times nearer to the drawn ones and cost more of the machine.
STEP_MS = 20
PROMPT = 16
# KV that 1,000 of the longest requests fill, so memory never decides. A node with any request still has less than
# 100,000 blocks for each, so that `--redirect-below 100000` has hosts probe at every offer.
KV_TOKENS = 1_600_000
# Requests go on arriving for so long after the last look, so that no node empties before it.
BEYOND_S = 1.0

LOOK_EVERY = 0.1
LOOK_WITHIN = 5
# The figures are those of the machine and not of the mesh if less of the looks happened, if the counts of one look lie
# further apart, if requests started later, or if engines took so much more than their time. All far above what a mesh on
# two idle cores shows; gossip is 250 ms old anyway.
LOOKS_NEEDED = 0.9
LOOK_SPREAD = 0.1
START_DELAY = 0.25
SLOWER = 1.1

# Herd ratios of that measurement: of the shortest queue with exact counts, and of the best that SMG's gateways did, by
# their number. Eight were not measured.
ORACLE = 1.07
RIVAL = {1: 1.26, 4: 1.41}


def percentile(values, percent):
    """Interpolated between ranks, like all percentiles of the product."""
    values = sorted(values)
    low, part = divmod((len(values) - 1) * percent / 100, 1)
    high = min(int(low) + 1, len(values) - 1)
    return values[int(low)] + (values[high] - values[int(low)]) * part


class Evenness:
    """The figures of node/src/report/herd.rs, from the counts of each look."""

    def __init__(self):
        self.ratios, self.variations, self.means = [], [], []

    def take(self, counts):
        mean = statistics.fmean(counts)
        self.means.append(mean)
        if mean > 0:
            self.ratios.append(max(counts) / mean)
            self.variations.append(statistics.pstdev(counts) / mean)

    @property
    def ratio(self):
        return statistics.fmean(self.ratios)

    @property
    def in_flight(self):
        return statistics.fmean(self.means)

    def __str__(self):
        return (
            f"max/mean {self.ratio:.3f}, P95 {percentile(self.ratios, 95):.2f}, "
            f"variation {statistics.fmean(self.variations):.2f}, {self.in_flight:.1f} in flight a node"
        )


def requests(options):
    """(arrival in seconds, output tokens) of each request. The first arrives at zero, as a replayed trace has it."""
    dice = random.Random(options.seed)
    drawn, at = [], 0.0
    while at < options.warm_up + options.seconds + BEYOND_S:
        seconds = min(dice.lognormvariate(math.log(MEAN_S) - SIGMA**2 / 2, SIGMA), CUT_S)
        drawn.append((at, max(1, round(seconds * 1000 / STEP_MS))))
        at += dice.expovariate(options.rate)
    return drawn


def shortest(counts, dice):
    """Joins the shortest queue."""
    least = min(counts)
    return dice.choice([node for node, count in enumerate(counts) if count == least])


def better_of_two(counts, dice):
    return min(dice.sample(range(len(counts)), min(2, len(counts))), key=counts.__getitem__)


def exact(options, drawn, choose):
    """How even the same requests lie when each is placed by the true counts of its moment."""
    dice = random.Random(options.seed)
    counts, ends, evenness = [0] * options.nodes, [], Evenness()
    looks = [options.warm_up + number * LOOK_EVERY for number in range(round(options.seconds / LOOK_EVERY))]
    moments = heapq.merge(((at, tokens) for at, tokens in drawn), ((at, None) for at in looks), key=lambda one: one[0])
    for now, tokens in moments:
        while ends and ends[0][0] <= now:
            counts[heapq.heappop(ends)[1]] -= 1
        if tokens is None:
            evenness.take(counts)
            continue
        node = choose(counts, dice)
        counts[node] += 1
        heapq.heappush(ends, (now + tokens * STEP_MS / 1000, node))
    return evenness


class Meter:
    """One node's metrics, over a connection that is kept: a new one for each look would cost more than the look."""

    def __init__(self, node):
        self.node = node
        self.asked = f"GET /metrics HTTP/1.1\r\nhost: 127.0.0.1:{node.http}\r\n\r\n".encode()
        self.reader = self.writer = None

    async def open(self):
        """To be done again after a pause: nodes close connections that stay idle."""
        if self.writer is not None:
            self.writer.close()
        self.reader, self.writer = await asyncio.open_connection("127.0.0.1", self.node.http, limit=1 << 20)

    async def text(self):
        self.writer.write(self.asked)
        head = (await self.reader.readuntil(b"\r\n\r\n")).lower()
        if b" 200 " not in head.split(b"\r\n", 1)[0]:
            raise Failure(f"{self.node.name} answers {head[:80]!r} to a question for its metrics")
        return await self.reader.readexactly(int(head.partition(b"content-length:")[2].split(b"\r\n", 1)[0]))

    async def in_flight(self):
        text = await self.text()
        return gauge(text, b"shoal_engine_running") + gauge(text, b"shoal_engine_queued")

    async def total(self, name):
        """A counter over all its labels."""
        lines = (await self.text()).splitlines()
        return sum(int(line.split()[-1]) for line in lines if line.startswith(name + b"{"))


def gauge(text, name):
    """A gauge that is missing raises: it must never read as an idle node."""
    start = text.index(b"\n" + name + b"{")
    return int(text[start + 1:text.index(b"\n", start + 1)].split()[-1])


class Watch:
    """Looks at all nodes at once, at moments fixed beforehand; those that the look before took up are left out."""

    def __init__(self, meters):
        self.meters = meters
        self.evenness = Evenness()
        self.spreads = []

    async def run(self, begin, seconds):
        await asyncio.sleep(begin - time.monotonic())
        await asyncio.gather(*(meter.open() for meter in self.meters))
        for number in range(round(seconds / LOOK_EVERY)):
            due = begin + number * LOOK_EVERY
            if (wait := due - time.monotonic()) > 0:
                await asyncio.sleep(wait)
            if (started := time.monotonic()) >= due + LOOK_EVERY:
                continue
            looks = asyncio.gather(*(meter.in_flight() for meter in self.meters))
            self.evenness.take(await asyncio.wait_for(looks, LOOK_WITHIN))
            self.spreads.append(time.monotonic() - started)

    def told(self, seconds):
        wanted = round(seconds / LOOK_EVERY)
        return f"{len(self.spreads)} of {wanted} looks, P99 {1e3 * percentile(self.spreads, 99):.0f} ms to answer"

    def trouble(self, seconds):
        far = percentile(self.spreads, 99) > LOOK_SPREAD
        return len(self.spreads) < LOOKS_NEEDED * seconds / LOOK_EVERY or far


class Run:
    """One run: the same requests over so many entry nodes."""

    def __init__(self, nodes, meters, options, entries):
        self.nodes, self.meters, self.options, self.entries = nodes, meters, options, entries
        self.watch = Watch(meters)
        self.said = self.counted = None

    async def counters(self):
        await asyncio.gather(*(meter.open() for meter in self.meters))
        names = (b"shoal_redirects_total", b"shoal_retries_total", b"shoal_moves_total")
        return [sum([await meter.total(name) for meter in self.meters]) for name in names]

    async def go(self, trace):
        before = await self.counters()
        arguments = ["--trace", str(trace), "--seed", str(self.options.seed)]
        begin = time.monotonic() + self.options.warm_up
        loading = load(self.nodes.binary, self.nodes.all()[:self.entries], arguments)
        self.said, _ = await asyncio.gather(loading, self.watch.run(begin, self.options.seconds))
        await self.nodes.wait_until_drained(self.nodes.all(), DRAINED_WITHIN)
        self.counted = [after - early for early, after in zip(before, await self.counters())]

    def tell(self):
        redirects, retries, moves = self.counted
        gateways = max(number for number in RIVAL if number <= self.entries)
        note(
            f"{self.entries} entries: {self.watch.evenness}; {redirects} redirects, {retries} retries, {moves} moves, "
            f"{self.said['summary']['failed']} failed (measured before: oracle {ORACLE}, SMG with {gateways} {RIVAL[gateways]})"
        )
        note(
            f"    generator: started {1e3 * self.said['worst_start_delay_s']:.0f} ms late at most; "
            f"sampling: {self.watch.told(self.options.seconds)}"
        )

    def complaints(self, expected):
        """`expected` is the number in flight at a node when engines take exactly their time."""
        name, evenness = f"{self.entries} entries", self.watch.evenness
        wrong = []
        if evenness.ratio > self.options.goal:
            wrong.append(f"{name}: herd ratio {evenness.ratio:.3f}, the goal is {self.options.goal}")
        if failed := self.said["summary"]["failed"]:
            wrong.append(f"{name}: {failed} requests failed: {self.said['reasons']}")
        if self.said["worst_start_delay_s"] > START_DELAY or self.said["late_starts"]:
            late = self.said["worst_start_delay_s"]
            wrong.append(f"{name}: this machine is too slow: requests started up to {late:.2f} s late")
        if self.watch.trouble(self.options.seconds):
            wrong.append(f"{name}: this machine is too slow: {self.watch.told(self.options.seconds)}")
        if evenness.in_flight > SLOWER * expected:
            wrong.append(f"{name}: this machine is too slow: {evenness.in_flight:.1f} in flight a node, not {expected:.1f}")
        return wrong


async def measure(nodes, options, drawn, expected):
    """All runs, one after the other on the same idle mesh."""
    trace = nodes.folder / "trace.csv"
    rows = "".join(f"{at:.6f},{PROMPT},{tokens}\n" for at, tokens in drawn)
    trace.write_text(f"arrival_s,prompt_tokens,output_tokens\n{rows}")
    nodes.start_mesh(options.nodes, options.flags, seeds=1)
    await nodes.wait_until_ready(nodes.all(), READY_WITHIN)
    meters = [Meter(node) for node in nodes.all()]
    figures, complaints = [], []
    for entries in options.entries:
        run = Run(nodes, meters, options, entries)
        await run.go(trace)
        run.tell()
        figures.append(f"{run.watch.evenness.ratio:.3f} with {entries} of {options.nodes} as entries")
        complaints += run.complaints(expected)
    return figures, complaints


def profile(folder):
    """Writes the profile of an engine whose step takes the same time under any load."""
    path = folder / "even.json"
    terms = ("w_ms", "b_ms_per_token", "c_ms_per_seq", "d_ms_per_kv_token", "e_ms_per_prefill_token_sq")
    step = {"a_ms": STEP_MS} | dict.fromkeys(terms, 0)
    even = {"model": "even", "kv_capacity": {"tokens": KV_TOKENS}, "fits": {"max_form": step}}
    path.write_text(json.dumps({"pairs": {"even": even}}))
    return path


async def check(options, folder):
    drawn = requests(options)
    joined, two = exact(options, drawn, shortest), exact(options, drawn, better_of_two)
    note(f"{len(drawn)} requests at {options.rate:g}/s over {options.nodes} nodes; placed by exact counts they would give:")
    note(f"shortest queue: {joined}")
    note(f"better of two: {two}")
    nodes = SimulatedNodes(options.binary, profile(folder), folder)
    figures, complaints = [], []
    try:
        figures, complaints = await measure(nodes, options, drawn, joined.in_flight)
    except (Failure, OSError, asyncio.TimeoutError, asyncio.IncompleteReadError, ValueError) as error:
        complaints = [f"{type(error).__name__}: {error}"]
    finally:
        await nodes.stop_all()
    exactly = f"exact counts: shortest queue {joined.ratio:.3f}, better of two {two.ratio:.3f}"
    return [f"herd ratio {', '.join(figures) or 'not measured'}", f"goal {options.goal}", exactly], complaints


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--binary", required=True, help="the shoal binary")
    parser.add_argument("--nodes", type=int, default=8)
    parser.add_argument("--entries", default="1,4,8", help="nodes that clients ask, one run each")
    parser.add_argument("--rate", type=float, default=24.0, help="arrivals a second")
    parser.add_argument("--warm-up", type=float, default=15.0, help="seconds before the first look")
    parser.add_argument("--seconds", type=float, default=45.0, help="from the first look to the last")
    parser.add_argument("--seed", type=int, default=1, help="decides arrivals and lengths")
    parser.add_argument("--goal", type=float, default=1.10, help="the greatest herd ratio that passes")
    parser.add_argument("--keep-logs", action="store_true", help="keep the nodes' folders even if all is well")
    parser.add_argument("flags", nargs="*", metavar="NODE FLAG", help="flags of `shoal node`, after --")
    options = parser.parse_args()
    options.entries = [int(entries) for entries in options.entries.split(",")]
    if not all(1 <= entries <= options.nodes for entries in options.entries):
        parser.error("--entries: from 1 to the number of nodes")
    conclude("herd", options, check)


if __name__ == "__main__":
    main()
