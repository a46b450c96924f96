"""Kills, stops and restarts nodes of a mesh of four that serves a real model, under load.

Run by check-deaths.sh, which gets the binary and the model ready. What must hold:

deaths   A busy host is killed (SIGKILL) while it runs streams of the three others. Every stream ends with all its tokens and no
         error, nothing that was delivered changes, and afterwards no node holds any KV block. A node that goes on from the ledger
         may, rarely, draw another token than an unbroken run: that is counted and is no failure.
rolling  Each node is told to stop (SIGTERM) and started again, under constant load, with clients that go to the next node when one
         turns them away. Every node ends by itself with 0, and no client sees an error.
slow     A busy host stands still for two seconds (SIGSTOP). It is not taken for dead: no stream is placed again for that.

The last line is `PASS deaths: figures` or `FAIL deaths: figures`.
"""

import argparse
import asyncio
import itertools
import os
import random
import signal
import time

from death_streams import MODEL_ID, OUTPUT, READY_WITHIN, Told, all_ended, unbroken_run
from http_stream import HttpError, question
from mesh_nodes import Failure, Nodes, conclude, counted, note, share

NODES = 4
# Room for all streams on three nodes: each sequence has its own 512 tokens. On two cores the streams of a node's own clients may
# take longer than a node that stops gives them by default.
ROOM = ["--max-sequences", "24", "--context", str(24 * 512), "--shutdown-deadline-ms", "90000"]

# Seconds. The limits are for a machine that is shared; what is reported is what it took.
BEGUN_WITHIN = 120
DRAINED_WITHIN = 30
# What the state plane promises for a node that dies, and what the scheduler of a machine without a free core may add.
GONE_WITHIN = 10
# --shutdown-deadline-ms, and some time to close.
EXIT_WITHIN = 100
STALL = 2.0
# Between two streams of a wave: in one moment they would all be told of the same free node.
ARRIVALS = 0.03
LOOK_EVERY = 0.1


class Wave:
    """Streams through all nodes but one, and hosted by all of them, so that something can happen to that one."""

    def __init__(self, nodes, unbroken, victim, dice):
        self.nodes, self.unbroken, self.victim = nodes, unbroken, victim
        self.homes = [node for node in nodes.all() if node is not victim]
        numbers = list(range(len(unbroken)))
        dice.shuffle(numbers)
        self.streams = [Told(self.homes[turn % len(self.homes)].http, number) for turn, number in enumerate(numbers)]
        # Pieces that each stream of the victim has given before something happens.
        self.least = dice.randint(2, OUTPUT // 3)
        self.tasks = []
        # Of the homes, before and meanwhile.
        self.replays_before = self.replays = 0
        # Streams that the victim hosts, and how many each node hosts.
        self.hit, self.hosts = [], {}
        # Tokens and characters of each stream at the moment of interest.
        self.delivered = {}

    async def begin(self):
        """Opens the streams, and waits until all that the victim hosts have begun."""
        self.replays_before = await self.nodes.added(self.homes, "shoal_replays_total")
        for stream in self.streams:
            self.tasks.append(asyncio.create_task(stream.run()))
            await asyncio.sleep(ARRIVALS)
        await self.nodes.until(f"all streams of {self.victim.name} begun", BEGUN_WITHIN, time.monotonic(), self.begun)

    async def begun(self):
        listed = await asyncio.gather(*(question(home.http, "/mesh/requests") for home in self.homes))
        where = {row["id"]: row["host"] for one in listed for row in one["requests"] if row["home"] == one["this"]}
        over = sum(stream.done.is_set() for stream in self.streams)
        self.hit = [stream for stream in self.streams if where.get(stream.id) == self.victim.id and not stream.done.is_set()]
        self.hosts = {node.name: list(where.values()).count(node.id) for node in self.nodes.all()}
        hosted = self.hosts[self.victim.name]
        # One that has not begun has not told its id yet.
        begun = len(self.hit) == hosted > 0 and all(len(stream.moments) >= self.least for stream in self.hit)
        return begun and len(where) + over >= len(self.streams), f"{self.hosts}, {over} over"

    def mark(self):
        """Notes what has been delivered by now."""
        self.delivered = {stream: (len(stream.drawn), len(stream.text)) for stream in self.streams}

    async def end(self):
        await all_ended(self.tasks)
        self.replays = await self.nodes.added(self.homes, "shoal_replays_total") - self.replays_before

    def cancel(self):
        for task in self.tasks:
            task.cancel()

    def complaints(self, replayed):
        """What is wrong; `replayed` streams may differ from the unbroken run after what they had delivered."""
        found = []
        for stream in self.streams:
            unbroken = self.unbroken[stream.number]
            faults = stream.faults(unbroken)
            if not faults and not stream.begins_as(unbroken, *self.delivered[stream]):
                faults.append(f"began otherwise than the unbroken run: {stream.text!r}, {unbroken.text!r}")
            elif not faults and stream not in replayed and not stream.same_as(unbroken):
                faults.append(f"differs though its host lived: {stream.text!r}, {unbroken.text!r}")
            found += [f"request {stream.number}: {fault}" for fault in faults]
        return found

    def finished(self):
        return sum(not stream.failed and stream.finish is not None for stream in self.streams)

    def same(self):
        return sum(stream.same_as(self.unbroken[stream.number]) for stream in self.streams)


class Deaths:
    """kill -9 of a busy host."""

    def __init__(self, nodes, options, unbroken, dice):
        self.nodes, self.options, self.unbroken, self.dice = nodes, options, unbroken, dice
        self.complaints = []
        self.rounds = self.streams = self.finished = self.same = self.hit = self.replays = 0
        self.gaps, self.others, self.gone = [], [], []

    async def run(self):
        for turn in range(self.options.rounds):
            victim = self.nodes.all()[turn % NODES]
            wave = Wave(self.nodes, self.unbroken, victim, self.dice)
            try:
                await self.round(wave)
            finally:
                wave.cancel()

    async def round(self, wave):
        began = time.monotonic()
        await wave.begin()
        killed = self.nodes.kill(wave.victim)
        wave.mark()
        gone = await self.nodes.wait_until_seen(wave.homes, NODES - 1, 3 * GONE_WITHIN, killed)
        await wave.end()
        ended = time.monotonic()
        others = [stream for stream in wave.streams if stream not in wave.hit]
        gaps, calm = ([stream.longest_gap(killed) for stream in streams] for streams in (wave.hit, others))
        self.take(wave, gone, gaps, calm)
        self.nodes.restart(wave.victim)
        await self.nodes.wait_until_ready(self.nodes.all(), READY_WITHIN)
        drained = await self.nodes.wait_until_drained(self.nodes.all(), DRAINED_WITHIN)
        note(
            f"round {self.rounds}: {wave.victim.name} killed with {len(wave.hit)} of {len(wave.streams)} streams ({wave.hosts}) after "
            f"{wave.least} pieces, {wave.replays} placed again; {wave.finished()} finished, {wave.same()} as unbroken; gap median/longest "
            f"{share(gaps, 0.5):.1f}/{max(gaps):.1f} s, others {share(calm, 0.5):.1f}/{max(calm, default=0):.1f} s; out of all views after "
            f"{gone:.1f} s; {ended - began:.0f} s, no block held {drained:.1f} s after the restart"
        )

    def take(self, wave, gone, gaps, calm):
        self.rounds += 1
        self.streams += len(wave.streams)
        self.finished += wave.finished()
        self.same += wave.same()
        self.hit += len(wave.hit)
        self.replays += wave.replays
        self.gaps += gaps
        self.others += calm
        self.gone.append(gone)
        self.complaints += [f"round {self.rounds}, {text}" for text in wave.complaints(replayed=wave.hit)]
        if gone > GONE_WITHIN:
            self.complaints.append(f"round {self.rounds}: {wave.victim.name} stayed in a view for {gone:.1f} s")

    def figures(self):
        return (
            f"{self.rounds} rounds, {self.streams} streams, {self.hit} hit by a kill -9 and {self.replays} placed again: "
            f"{self.finished} finished, {self.streams - self.finished} errors, {self.same} equal to the unbroken run, longest gap "
            f"p50/p99 {share(self.gaps, 0.5):.2f}/{share(self.gaps, 0.99):.2f} s (not hit "
            f"{share(self.others, 0.5):.2f}/{share(self.others, 0.99):.2f} s), out of all views after "
            f"{max(self.gone, default=0):.1f} s at most"
        )


class Slow:
    """A busy host that stands still for a while."""

    def __init__(self, nodes, options, unbroken, dice):
        self.nodes, self.options, self.unbroken, self.dice = nodes, options, unbroken, dice
        self.complaints = []
        self.stalls = self.streams = self.finished = self.same = self.hit = self.replays = self.missed = 0
        self.gaps = []

    async def run(self):
        for turn in range(self.options.stalls):
            victim = self.nodes.all()[turn % NODES]
            wave = Wave(self.nodes, self.unbroken, victim, self.dice)
            try:
                await self.stall(wave)
            finally:
                wave.cancel()

    async def stall(self, wave):
        await wave.begin()
        stopped = time.monotonic()
        missed = await self.stand_still(wave)
        wave.mark()
        await wave.end()
        drained = await self.nodes.wait_until_drained(self.nodes.all(), DRAINED_WITHIN)
        gaps = [stream.longest_gap(stopped) for stream in wave.hit]
        self.stalls += 1
        self.streams += len(wave.streams)
        self.finished += wave.finished()
        self.same += wave.same()
        self.hit += len(wave.hit)
        self.replays += wave.replays
        self.missed += missed
        self.gaps += gaps
        note(
            f"stall {self.stalls}: {wave.victim.name} stood still for {STALL:.0f} s with {len(wave.hit)} streams, {wave.replays} placed "
            f"again, out of a view: {'yes' if missed else 'no'}; {wave.finished()} of {len(wave.streams)} finished, {wave.same()} as "
            f"unbroken, gap median/longest {share(gaps, 0.5):.1f}/{max(gaps):.1f} s; no block held {drained:.1f} s later"
        )
        # A host that is slow has lost nothing: every output is that of the unbroken run.
        self.complaints += [f"stall {self.stalls}, {text}" for text in wave.complaints(replayed=wave.hit if wave.replays else [])]
        if wave.replays:
            self.complaints.append(f"stall {self.stalls}: {wave.replays} streams were placed again though {wave.victim.name} lived")

    async def stand_still(self, wave):
        """Stops the victim for a while; whether another node's view lost it meanwhile."""
        missed = False
        os.kill(wave.victim.process.pid, signal.SIGSTOP)
        # The stall itself is the one thing here that is a time and no condition.
        over = asyncio.create_task(asyncio.sleep(STALL))
        over.add_done_callback(lambda _: os.kill(wave.victim.process.pid, signal.SIGCONT))
        try:
            while not over.done():
                views = await asyncio.gather(*(self.nodes.view(home) for home in wave.homes))
                missed = missed or any(view is not None and len(view["nodes"]) < NODES for view in views)
                await asyncio.wait({over}, timeout=LOOK_EVERY)
        finally:
            over.cancel()
        return missed

    def figures(self):
        return (
            f"{self.stalls} stalls of {STALL:.0f} s under {self.hit} of {self.streams} streams: {self.finished} finished, "
            f"{self.same} equal to the unbroken run, {self.replays} placed again, out of a view in {self.missed}, longest gap p50/p99 "
            f"{share(self.gaps, 0.5):.2f}/{share(self.gaps, 0.99):.2f} s"
        )


class Load:
    """Clients that always have a stream open, at the nodes in turn, as behind a balancer."""

    def __init__(self, mesh, unbroken, at_once):
        self.mesh, self.unbroken = mesh, unbroken
        self.turns, self.numbers = itertools.count(), itertools.count()
        self.over = False
        self.streams = []
        self.away = 0
        self.tasks = [asyncio.create_task(self.client()) for _ in range(at_once)]

    async def client(self):
        while not self.over:
            number = next(self.numbers) % len(self.unbroken)
            # Twice round; who is turned away by all of them sees an error.
            for more in reversed(range(2 * len(self.mesh))):
                node = self.mesh[next(self.turns) % len(self.mesh)]
                stream = Told(node.http, number)
                self.streams.append(stream)
                await stream.run()
                if not stream.turned_away or not more:
                    break
                self.streams.remove(stream)
                self.away += 1

    async def end(self):
        self.over = True
        await all_ended(self.tasks)

    def cancel(self):
        for task in self.tasks:
            task.cancel()

    def complaints(self):
        return [
            f"request {stream.number} at port {stream.port}: {fault}"
            for stream in self.streams
            for fault in stream.faults(self.unbroken[stream.number])
        ]


class Rolling:
    """Every node is restarted in order, one after the other, under load."""

    def __init__(self, nodes, options, unbroken):
        self.nodes, self.options, self.unbroken = nodes, options, unbroken
        self.complaints = []
        self.load = None
        self.empties, self.exits, self.backs = [], [], []
        self.moved = self.mib = self.recomputed = 0

    async def run(self):
        self.load = Load(self.nodes.all(), self.unbroken, self.options.at_once)
        try:
            for node in self.nodes.all():
                running = await self.nodes.wait_until_running(node, 1, BEGUN_WITHIN)
                await self.restart(node, running)
            await self.load.end()
        finally:
            self.load.cancel()
        self.complaints += self.load.complaints()
        await self.nodes.wait_until_drained(self.nodes.all(), DRAINED_WITHIN)

    async def restart(self, node, running):
        others = [other for other in self.nodes.all() if other is not node]
        arrivals = ("shoal_move_arrivals_total", 'outcome="arrived"')
        moved, replays = await self.nodes.added(others, *arrivals), await self.nodes.added(others, "shoal_replays_total")
        before = await self.nodes.counters(node) or {}
        began = time.monotonic()
        node.process.terminate()
        code, last, empty = await self.nodes.last_words(node, EXIT_WITHIN)
        took, empty = time.monotonic() - began, empty - began
        if code != 0:
            self.complaints.append(f"{node.name} ended with {code} after SIGTERM; its log ends with:\n{node.last_lines()}")
        moved = await self.nodes.added(others, *arrivals) - moved
        replays = await self.nodes.added(others, "shoal_replays_total") - replays
        # Of the node itself nobody knows more than its last page.
        grown = {name: counted(last, name) - counted(before, name) for name in ("shoal_replays_total", "shoal_move_bytes_total")}
        recomputed, mib = replays + round(grown["shoal_replays_total"]), grown["shoal_move_bytes_total"] / 2**20
        again = time.monotonic()
        self.nodes.restart(node)
        await self.nodes.wait_until_ready(self.nodes.all(), READY_WITHIN)
        back = time.monotonic() - again
        self.empties.append(empty)
        self.exits.append(took)
        self.backs.append(back)
        self.moved, self.mib, self.recomputed = self.moved + moved, self.mib + mib, self.recomputed + recomputed
        note(
            f"{node.name}: {running} running at SIGTERM, nothing in its engine after {empty:.1f} s, ended with {code} after {took:.1f} s; "
            f"{moved} moved to others with {mib:.1f} MiB of KV, {recomputed} gone on from the ledger; ready again {back:.1f} s after its "
            f"start"
        )

    def figures(self):
        streams = self.load.streams if self.load else []
        errors = sum(bool(stream.faults(self.unbroken[stream.number])) for stream in streams)
        same = sum(stream.same_as(self.unbroken[stream.number]) for stream in streams)
        return (
            f"rolling restart of {len(self.exits)} nodes under {self.options.at_once} clients: {len(streams)} streams, {errors} errors, "
            f"{same} equal to the unbroken run, {self.load.away if self.load else 0} times a client went to the next node; from SIGTERM "
            f"to an empty engine {each(self.empties)} s, to exit {each(self.exits)} s, ready again after {each(self.backs)} s; "
            f"{self.moved} requests moved with {self.mib:.1f} MiB of KV, {self.recomputed} by recompute"
        )


def each(seconds):
    return "/".join(f"{one:.1f}" for one in seconds)


def troubles(folder):
    """Lines of the nodes' logs that a human must look at."""
    marks = (" ERROR ", "panicked at")
    for log in sorted(folder.glob("*/log")):
        for line in log.read_text(errors="replace").splitlines():
            if any(mark in line for mark in marks):
                yield f"log of {log.parent.name}: {line}"


async def check(options, folder):
    dice = random.Random(options.seed)
    nodes = Nodes(options.binary, options.model, MODEL_ID, folder)
    nodes.options = ROOM
    parts, complaints = [], []
    try:
        unbroken = await unbroken_run(nodes, options.streams)
        nodes.start_mesh(NODES)
        await nodes.wait_until_ready(nodes.all(), READY_WITHIN)
        make = {
            "deaths": lambda: Deaths(nodes, options, unbroken, dice),
            "rolling": lambda: Rolling(nodes, options, unbroken),
            "slow": lambda: Slow(nodes, options, unbroken, dice),
        }
        for name in options.parts:
            parts.append(make[name]())
            await parts[-1].run()
            note(parts[-1].figures())
    except (Failure, OSError, HttpError, asyncio.TimeoutError) as failure:
        complaints.append(f"{type(failure).__name__}: {failure}")
    finally:
        await nodes.stop_all()
    complaints = [text for part in parts for text in part.complaints] + complaints + list(troubles(folder))
    return [part.figures() for part in parts], complaints


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--binary", required=True, help="the shoal binary")
    parser.add_argument("--model", required=True, help="the GGUF file")
    parser.add_argument("--rounds", type=int, default=20, help="hosts that are killed, one after the other")
    parser.add_argument("--streams", type=int, default=64, help="streams of a round, each of another request")
    parser.add_argument("--parts", default="deaths,rolling,slow")
    parser.add_argument("--at-once", type=int, default=12, help="clients of the rolling restart")
    parser.add_argument("--stalls", type=int, default=3, help="hosts that stand still, one after the other")
    parser.add_argument("--seed", type=int, default=1, help="decides who asks where, and when something happens")
    parser.add_argument("--keep-logs", action="store_true", help="keep the nodes' folders even if all is well")
    options = parser.parse_args()
    options.parts = options.parts.split(",")
    if unknown := set(options.parts) - {"deaths", "rolling", "slow"}:
        parser.error(f"--parts: no such part: {', '.join(sorted(unknown))}")
    conclude("deaths", options, check)


if __name__ == "__main__":
    main()
