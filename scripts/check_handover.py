"""Moves running requests between three nodes that serve a real model.

Run by check-handover.sh, which gets the binary and the model ready. What must hold:

1. Streams over all nodes, greedy and seeded, each moved at least three times at random moments: the output is that of
   an unmoved run, token for token, and afterwards no node holds any KV block. Several rounds.
2. The cost of one move by length: staged copy, blocking copy and stop-and-recompute side by side, seen from the source and
   from the client, and what the neighbours of the moved request notice.
3. With --skew: a skewed load with rescheduling on and off.

The last line is `PASS handover: figures` or `FAIL handover: figures`.
"""

import argparse
import asyncio
import random
import shutil
import signal
import statistics
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

from http_stream import Stream, move, question
from mesh_nodes import Failure, Nodes, note, share
from prompts import SENTENCE, TOPICS

MODEL_ID = "smollm2-135m"
READY_WITHIN = 120
DRAINED_WITHIN = 30
MOVES_EACH = 3
# Moves under way over all nodes; more wait for each other's turns between two steps.
MOVES_AT_ONCE = 24
# Twice the slots that all streams need: one that moves holds one at either end.
MOVING_ROOM = ["--context", "24576", "--max-sequences", "48", "--step-tokens", "80", "--moves-in", "48", "--moves-out", "48",
               "--reschedule-interval-ms", "0"]
# Output of a stream: long enough for three moves while it runs among twenty others.
OUTPUT = 64

# Output that a request of the table may draw while it is moved about.
OUTPUT_WHILE_MOVING = 480
# A prefill of more tokens takes this model longer than the minute that a wish to move may take.
LONGEST_RESTART = 2048


def body(number):
    """The request with this number: every second one is seeded, the others are greedy."""
    text = f"{SENTENCE * (number % 4)}Tell me {number + 2} things about {TOPICS[number % len(TOPICS)]}."
    sampling = {"temperature": 0.8, "top_p": 0.95, "seed": 1000 + number} if number % 2 else {"temperature": 0}
    common = {"model": MODEL_ID, "max_tokens": OUTPUT, "ignore_eos": True} | sampling
    if number % 3 == 2:
        return "/v1/completions", common | {"prompt": text}
    return "/v1/chat/completions", common | {"messages": [{"role": "user", "content": text}]}


def outcome(stream):
    return (stream.text, stream.finish, stream.tokens)


async def whereabouts(home, request):
    """The host of a request, as its home says; None when it is over."""
    listed = await question(home.http, "/mesh/requests")
    return next((row["host"] for row in listed["requests"] if row["id"] == request), None)


async def references(nodes, numbers):
    """The outputs of an unmoved run: a single node, eight at a time."""
    solo = nodes.start("solo", seeds=[])
    await nodes.wait_until_ready([solo], READY_WITHIN)
    gate = asyncio.Semaphore(8)
    expected = {}

    async def one(number):
        async with gate:
            stream = Stream(solo.http, *body(number))
            await stream.run()
            if stream.failed:
                raise Failure(f"the single node failed: {stream.failed}")
            expected[number] = outcome(stream)

    await asyncio.gather(*(one(number) for number in numbers))
    await nodes.stop(solo)
    return expected


class Round:
    """One round of part 1."""

    def __init__(self, nodes, expected, dice, moves=MOVES_EACH):
        self.nodes, self.expected, self.dice, self.moves = nodes, expected, dice, moves
        self.mesh = nodes.all()
        self.gate = asyncio.Semaphore(MOVES_AT_ONCE)
        self.same = 0
        self.reports = []
        self.refusals = {}
        self.complaints = []

    async def mover(self, home, stream):
        """Moves one stream so many times, each time once it is a little further, to a node drawn at random."""
        done = 0
        while done < self.moves and not stream.done.is_set():
            host = await whereabouts(home, stream.id)
            others = [node for node in self.mesh if node.id != host]
            async with self.gate:
                said = await move(home, stream.id, self.dice.choice(others).id)
            if isinstance(said, dict):
                done += 1
                self.reports.append(said)
            else:
                self.refusals[said[-70:]] = self.refusals.get(said[-70:], 0) + 1
            ahead = len(stream.pieces) + self.dice.randint(1, 6)
            if not isinstance(said, dict):
                # Refused: full slots, or no room. Soon again.
                await asyncio.sleep(0.05 + self.dice.random() * 0.2)
            else:
                await stream.until(lambda s: len(s.pieces) >= ahead)
        return done

    async def one(self, number):
        home = self.mesh[number % len(self.mesh)]
        stream = Stream(home.http, *body(number))
        reading = asyncio.create_task(stream.run())
        # From its first event: it may still wait, or prefill.
        moved = await self.mover(home, stream) if await stream.until(lambda s: s.id is not None) else 0
        await reading
        if stream.failed:
            self.complaints.append(f"request {number} failed: {stream.failed}")
        elif outcome(stream) != self.expected[number]:
            self.complaints.append(f"request {number} after {moved} moves: {outcome(stream)}, unmoved {self.expected[number]}")
        elif moved < self.moves:
            self.complaints.append(f"request {number} was moved {moved} times only")
        else:
            self.same += 1

    async def run(self):
        await asyncio.gather(*(self.one(number) for number in self.expected))
        return await self.nodes.wait_until_drained(self.mesh, DRAINED_WITHIN)


async def rounds(nodes, options, dice):
    """Part 1."""
    numbers = range(options.streams)
    note(f"an unmoved run of {options.streams} requests on a single node")
    expected = await references(nodes, numbers)
    nodes.start_mesh(3)
    await nodes.wait_until_ready(nodes.all(), READY_WITHIN)
    same, moves, complaints, pauses = 0, 0, [], []
    began = time.monotonic()
    for number in range(1, options.rounds + 1):
        started = time.monotonic()
        turn = Round(nodes, expected, dice)
        drained = await turn.run()
        same += turn.same
        moves += len(turn.reports)
        complaints += turn.complaints
        pauses += [report["pause_ms"] for report in turn.reports if report["stages"] > 1]
        note(
            f"round {number}: {turn.same} of {options.streams} as unmoved, {len(turn.reports)} moves, "
            f"{sum(turn.refusals.values())} refused, {time.monotonic() - started:.0f} s, no block held {drained:.1f} s later"
        )
        if options.keep_logs and turn.refusals:
            note(f"refusals: {turn.refusals}")
    for node in nodes.all():
        await nodes.stop(node)
    pauses.sort()
    middle = f"{pauses[len(pauses) // 2]:.1f}/{pauses[int(len(pauses) * 0.99)]:.1f}" if pauses else "-"
    figures = (
        f"{options.rounds} rounds of {options.streams} streams in {time.monotonic() - began:.0f} s: {same} of "
        f"{options.rounds * options.streams} as unmoved, {moves} moves, pause P50/P99 {middle} ms under full load"
    )
    return figures, complaints


async def grown(home, tokens, output):
    """A stream whose KV has at least so many tokens, and that has as much output to come."""
    prompt = [(7 * index) % 1000 + 300 for index in range(tokens)]
    request = {"model": MODEL_ID, "prompt": prompt, "max_tokens": output, "ignore_eos": True, "temperature": 0}
    stream = Stream(home.http, "/v1/completions", request)
    reading = asyncio.create_task(stream.run())
    if not await stream.until(lambda s: len(s.pieces) >= 8):
        raise Failure(f"a request of {tokens} tokens failed: {stream.failed}")
    return stream, reading


async def pool(nodes, options, dice):
    """The shared pool, where the order of KV cells decides over the last bits: outputs that differ from a solo run, among
    many at once, without moves and with three each."""
    nodes.reproducible = False
    numbers = range(options.streams)
    expected = await references(nodes, numbers)
    nodes.start_mesh(3, MOVING_ROOM)
    await nodes.wait_until_ready(nodes.all(), READY_WITHIN)
    same = {}
    for moves in (0, MOVES_EACH):
        turn = Round(nodes, expected, dice, moves)
        await turn.run()
        same[moves] = turn.same
        failed = [text for text in turn.complaints if "failed" in text]
        if failed:
            raise Failure(failed[0])
    for node in nodes.all():
        await nodes.stop(node)
    nodes.reproducible = True
    said = (
        f"in the shared pool {same[0]} of {options.streams} outputs are those of a solo run without moves, "
        f"{same[MOVES_EACH]} with {MOVES_EACH} moves each"
    )
    note(said)
    return said, []


async def cost(nodes, length, options):
    """Part 2, one length: figures by manner."""
    one, two = nodes.all()
    rows = {}
    stream, reading = await grown(one, length, OUTPUT_WHILE_MOVING)
    for copy in options.manners.split(","):
        if copy == "restart" and length > LONGEST_RESTART:
            continue
        reports, gaps, steps = [], [], []
        for _ in range(options.repeats if copy != "restart" else 1):
            host = await whereabouts(one, stream.id)
            to = two if host == one.id else one
            seen = len(stream.pieces)
            await stream.until(lambda s: len(s.pieces) >= seen + 4)
            steps += [late - early for (early, _), (late, _) in zip(stream.pieces[seen:], stream.pieces[seen + 1:])]
            before = len(stream.pieces)
            said = await move(one, stream.id, to.id, copy)
            if not isinstance(said, dict):
                raise Failure(f"a {copy} move at {length} tokens: {said}")
            reports.append(said)
            seen = len(stream.pieces)
            await stream.until(lambda s: len(s.pieces) >= seen + 4)
            around = [moment for moment, _ in stream.pieces[before - 1:]]
            gaps.append(max(late - early for early, late in zip(around, around[1:])))
        middle = lambda key: statistics.median(report[key] for report in reports)
        rows[copy] = (middle("pause_ms"), middle("total_ms"), middle("bytes"), middle("stages"),
                      1e3 * statistics.median(gaps), 1e3 * statistics.median(steps))
    reading.cancel()
    await asyncio.gather(reading, return_exceptions=True)
    await nodes.wait_until_drained([one, two], DRAINED_WITHIN)
    return rows


async def costs(nodes, options):
    """Part 2."""
    lengths = [int(length) for length in options.lengths.split(",") if length]
    room = max(lengths) + 512
    note("staged: copied while it runs; blocking: stopped, then copied; restart: stopped, then recomputed at the target")
    note("KV tokens | manner    | pause ms | total ms |  MB   | stages | longest gap ms | a step ms")
    for layout in options.layouts.split(","):
        reproducible = layout == "split"
        nodes.reproducible = reproducible
        note("each sequence in its own part of the KV (--reproducible)" if reproducible else "one pool of KV for all sequences (the default)")
        nodes.start_mesh(2, ["--context", str(2 * room), "--max-sequences", "2", "--reschedule-interval-ms", "0"])
        await nodes.wait_until_ready(nodes.all(), READY_WITHIN)
        for length in lengths:
            for copy, figures in (await cost(nodes, length, options)).items():
                row(length, copy, figures)
        for node in nodes.all():
            await nodes.stop(node)
    nodes.reproducible = True
    return f"costs by length in the table above ({len(lengths)} lengths)", []


async def place(home, stream, node):
    """Sees to it that a stream runs at this node."""
    if await whereabouts(home, stream.id) != node.id:
        said = await move(home, stream.id, node.id)
        if not isinstance(said, dict):
            raise Failure(f"a request could not be placed: {said}")


async def neighbours(nodes, options):
    """What a request that decodes beside a moving one notices: its steps during copies, and just before them."""
    nodes.start_mesh(2, ["--context", "4096", "--max-sequences", "2", "--reschedule-interval-ms", "0"])
    await nodes.wait_until_ready(nodes.all(), READY_WITHIN)
    one, two = nodes.all()
    beside, reading = await grown(one, 64, 1900)
    await place(one, beside, one)
    moving, other = await grown(one, 1024, 900)
    await place(one, moving, one)
    quiet, copying, copies = [], [], 0
    while copies < options.copies and not (beside.done.is_set() or moving.done.is_set()):
        seen = len(beside.pieces)
        await beside.until(lambda s: len(s.pieces) >= seen + 8)
        quiet += [late - early for (early, _), (late, _) in zip(beside.pieces[seen:], beside.pieces[seen + 1:])]
        began = time.monotonic()
        said = await move(one, moving.id, two.id)
        if not isinstance(said, dict):
            raise Failure(f"a move beside a neighbour: {said}")
        # Until the request stopped: afterwards the neighbour runs alone, and faster.
        ended = began + (said["total_ms"] - said["pause_ms"]) / 1e3
        await beside.until(lambda s: s.pieces[-1][0] > ended)
        moments = [moment for moment, _ in beside.pieces]
        copying += [late - early for early, late in zip(moments, moments[1:]) if late >= began and early <= ended - 0.002]
        copies += 1
        await place(one, moving, one)
    reading.cancel()
    other.cancel()
    await asyncio.gather(reading, other, return_exceptions=True)
    await nodes.wait_until_drained([one, two], DRAINED_WITHIN)
    for node in nodes.all():
        await nodes.stop(node)
    before, during = 1e3 * statistics.mean(quiet), 1e3 * statistics.mean(copying)
    said = (
        f"a neighbour's step during {copies} copies of 1,024 tokens: {during:.2f} ms (median {1e3 * statistics.median(copying):.2f}), "
        f"just before them {before:.2f} ms (median {1e3 * statistics.median(quiet):.2f}): {100 * (during / before - 1):+.1f} %"
    )
    note(said)
    return said, []


def row(length, copy, figures):
    """A line of the table of costs."""
    pause, total, size, stages, gap, step = figures
    note(f"{length:9} | {copy:9} | {pause:8.1f} | {total:8.0f} | {size / 1e6:5.1f} | {stages:6.0f} | {gap:14.0f} | {step:9.0f}")


async def skewed_run(nodes, options, rescheduling):
    """Part 3, once: every third request is long, and takes its turn at the same node."""
    dice = random.Random(options.seed)
    home, *_ = nodes.all()
    streams = []
    tasks = []
    began = time.monotonic()
    for number in range(options.skew_requests):
        long = number % 3 == 0
        prompt = [dice.randint(300, 40000) for _ in range(320 if long else 24)]
        request = {"model": MODEL_ID, "prompt": prompt, "max_tokens": 256 if long else 24, "ignore_eos": True, "temperature": 0}
        stream = Stream(home.http, "/v1/completions", request)
        streams.append((long, stream))
        tasks.append(asyncio.create_task(stream.run()))
        # Arrivals do not wait for answers.
        await asyncio.sleep(dice.expovariate(options.skew_rate))
    await asyncio.gather(*tasks)
    took = time.monotonic() - began
    failed = [stream.failed for _, stream in streams if stream.failed]
    first = [stream.pieces[0][0] - stream.asked for _, stream in streams if stream.pieces]
    gaps = [gap for _, stream in streams for gap in stream.gaps()]
    counted = {"shoal_engine_preemptions_total": 0, "shoal_moves_total": 0}
    for node in nodes.all():
        for line in (await metrics(node)).splitlines():
            name = line.partition("{")[0]
            if name in counted and ('outcome="moved"' in line or name != "shoal_moves_total"):
                counted[name] += int(float(line.rpartition(" ")[2]))
    await nodes.wait_until_drained(nodes.all(), DRAINED_WITHIN)
    note(
        f"rescheduling {'on ' if rescheduling else 'off'} | {statistics.mean(first):6.2f} | {share(first, 0.5):6.2f} | {share(first, 0.99):6.2f} | "
        f"{1e3 * statistics.mean(gaps):6.0f} | {1e3 * share(gaps, 0.99):6.0f} | {counted['shoal_engine_preemptions_total']:11} | "
        f"{counted['shoal_moves_total']:5} | {took:5.0f} | {len(failed)}"
    )
    return [f"a request under skewed load failed: {text}" for text in failed]


async def metrics(node):
    """The node's metrics as Prometheus reads them."""

    def fetch():
        with urllib.request.urlopen(f"{node.url}/metrics", timeout=5) as answer:
            return answer.read().decode()

    return await asyncio.to_thread(fetch)


async def skew(nodes, options):
    """Part 3: the shared pool, where sequences can be preempted, and a policy that is blind to load."""
    complaints = []
    nodes.reproducible = False
    note("                 | TTFT mean | P50 s | P99 s | TBT mean ms | P99 ms | preemptions | moves | s | failed")
    for rescheduling in (False, True):
        interval = "100" if rescheduling else "0"
        nodes.start_mesh(3, ["--context", "2048", "--max-sequences", "8", "--policy", "round-robin", "--redirect-below", "0",
                             "--queue-limit", "256", "--move-below", "10", "--move-above", "30",
                             "--reschedule-interval-ms", interval])
        await nodes.wait_until_ready(nodes.all(), READY_WITHIN)
        complaints += await skewed_run(nodes, options, rescheduling)
        for node in nodes.all():
            await nodes.stop(node)
    nodes.reproducible = True
    return "skewed load in the table above", complaints


async def check(options, folder):
    dice = random.Random(options.seed)
    nodes = Nodes(options.binary, options.model, MODEL_ID, folder)
    figures, complaints = [], []
    try:
        if options.rounds:
            nodes.options = MOVING_ROOM
            said, wrong = await rounds(nodes, options, dice)
            note(said)
            figures.append(said)
            complaints += wrong
        nodes.options = []
        if options.pool:
            said, wrong = await pool(nodes, options, dice)
            figures.append(said)
            complaints += wrong
        if options.lengths:
            for part in (costs, neighbours):
                said, wrong = await part(nodes, options)
                figures.append(said)
                complaints += wrong
        if options.skew:
            said, wrong = await skew(nodes, options)
            figures.append(said)
            complaints += wrong
    except Failure as failure:
        complaints.append(str(failure))
    finally:
        await nodes.stop_all()
    return figures, complaints


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--binary", required=True, help="the shoal binary")
    parser.add_argument("--model", required=True, help="the GGUF file")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--lengths", default="128,512,1024,2048,4096,7600", help="KV tokens of the table of costs")
    parser.add_argument("--layouts", default="split,pool", help="of the KV: split is --reproducible, pool the default")
    parser.add_argument("--manners", default="staged,blocking,restart", help="ways to copy")
    parser.add_argument("--repeats", type=int, default=4, help="moves a row of the table is the median of")
    parser.add_argument("--copies", type=int, default=40, help="moves beside which a neighbour's steps are measured")
    parser.add_argument("--pool", action="store_true", help="the shared pool as well: outputs that differ with and without moves")
    parser.add_argument("--skew", action="store_true", help="a skewed load as well, with rescheduling on and off")
    parser.add_argument("--skew-requests", type=int, default=60)
    parser.add_argument("--skew-rate", type=float, default=1.0, help="arrivals a second")
    parser.add_argument("--seed", type=int, default=1, help="decides when and where requests move")
    parser.add_argument("--keep-logs", action="store_true", help="keep the nodes' folders even if all is well")
    options = parser.parse_args()
    # Ends like Ctrl-C: the nodes are stopped on the way out.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    folder = Path(tempfile.mkdtemp(prefix="shoal-check."))
    try:
        figures, complaints = asyncio.run(check(options, folder))
    except KeyboardInterrupt:
        sys.exit(130)
    for complaint in complaints[:20]:
        note(complaint)
    if complaints or options.keep_logs:
        note(f"logs and data of the nodes: {folder}")
    else:
        shutil.rmtree(folder, ignore_errors=True)
    verdict = "FAIL" if complaints else "PASS"
    trouble = [f"complaints: {len(complaints)}, the first: {complaints[0]}"] if complaints else []
    print(f"{verdict} handover: {'; '.join(trouble + figures)}".replace("\n", " "), flush=True)
    sys.exit(1 if complaints else 0)


if __name__ == "__main__":
    main()
