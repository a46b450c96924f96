"""Loads a mesh with all manners of clients for a long time, and looks at what its processes hold.

Run by soak.sh, which gets the binary ready. Engines are simulated and run several times faster than what they simulate, so that
an hour of a mesh fits into minutes. All the time: short and long streams, clients that hang up, big prompts, bad requests; every
minute a node is killed and started again, and in between there comes a burst of ten times what the mesh can take. What must hold:

- Streams give exactly the tokens of an idle node. Bad requests get the answer that they deserve. In a burst 429 with Retry-After
  is a right answer as well. Only a client whose own node was killed may lose its connection.
- With --overload N: ten times what fits for N minutes more, all the time. What a node holds must not grow after the first third.
- The first node is never restarted. Between a pause after the first third and one at the end it must not have grown: memory by no
  more than 10 % and 8 MB, threads and open files not at all.

The last line is `PASS soak: figures` or `FAIL soak: figures`.
"""

import argparse
import asyncio
import time

from mesh_clients import Faults, learn
from mesh_nodes import Failure, SimulatedNodes, conclude, note, until_stopped
from process_usage import Usage, raise_file_limit, usage
from soak_load import BODY_BYTES, MODEL_ID, Mixture, cases

PROFILE = "a10/llama-7b"
# Little room, so that a burst of ten times of it is one that this program can send, and long streams preempt each other.
SEQUENCES, QUEUE, KV = 8, 8, 4096
BURST_TIMES = 10

# Seconds.
READY_WITHIN = 60
DRAINED_WITHIN = 60
LOOK_EVERY = 2.0
TELL_EVERY = 30
# Between a kill and the burst after it, as a share of the time between two kills.
BURST_AFTER = 0.5
DEAD_FOR = 1.0

# What a process that lives on may grow by.
RSS_FACTOR, RSS_MB = 1.10, 8
# A pause begins when what comes and goes has gone: connections, and threads that wait ten seconds for work.
STILL_WITHIN = 40


class Watch:
    """What each process holds, every few seconds."""

    def __init__(self, nodes):
        self.nodes = nodes
        # Of each node: the most it ever held.
        self.most = {}

    def look(self):
        for node in self.nodes.all():
            if now := usage(node.process.pid):
                most = self.most.get(node.name, now)
                self.most[node.name] = Usage(*map(max, most, now))

    async def run(self):
        while True:
            self.look()
            await asyncio.sleep(LOOK_EVERY)


class Soak:
    """One run."""

    def __init__(self, nodes, options, known):
        self.nodes, self.options, self.known = nodes, options, known
        self.mesh = nodes.all()
        self.faults = Faults()
        self.watch = Watch(nodes)
        self.bursts, self.kills = [], 0
        self.began = time.monotonic()

    async def phase(self, mixture, seconds):
        """Load with kills and bursts for so long, then a pause; what the processes hold in it."""
        load = asyncio.create_task(mixture.run())
        beside = [asyncio.create_task(one) for one in (self.watch.run(), self.tell(mixture))]
        until = time.monotonic() + seconds
        try:
            await self.trouble(mixture, until)
            mixture.over.set()
            await load
        finally:
            for task in [load, *beside]:
                task.cancel()
            await asyncio.gather(load, *beside, return_exceptions=True)
        await self.nodes.wait_until_drained(self.mesh, DRAINED_WITHIN)

    async def trouble(self, mixture, until):
        """Kills and bursts in turn."""
        every = self.options.kill_every
        while True:
            for wait, act in ((every * BURST_AFTER, self.burst), (every * (1 - BURST_AFTER), self.kill)):
                if time.monotonic() + wait > until:
                    await asyncio.sleep(max(0.0, until - time.monotonic()))
                    return
                await asyncio.sleep(wait)
                await act(mixture)

    async def burst(self, mixture):
        count = self.too_many()
        began = time.monotonic()
        ended = await mixture.burst(count)
        self.bursts.append(ended)
        note(f"{self.clock()} burst of {count}: {dict(ended)} in {time.monotonic() - began:.1f} s")

    def too_many(self):
        return BURST_TIMES * len(self.mesh) * (SEQUENCES + QUEUE)

    async def overload(self, mixture):
        """Too many clients all the time; what became of them, and complaints about what the nodes held."""
        seconds = 60 * self.options.overload
        began = time.monotonic()
        load = asyncio.create_task(mixture.overload(self.too_many(), began + seconds))
        early, late = Watch(self.nodes), Watch(self.nodes)
        try:
            while not load.done():
                (early if time.monotonic() < began + seconds / 3 else late).look()
                await asyncio.sleep(LOOK_EVERY)
        finally:
            load.cancel()
            await asyncio.gather(load, return_exceptions=True)
        ended = load.result()
        await self.nodes.wait_until_drained(self.mesh, DRAINED_WITHIN)
        told, found = [], []
        for node in self.mesh:
            before, after = early.most[node.name], late.most[node.name]
            told.append(f"{node.name} {before.rss_mb:.1f}, then {after.rss_mb:.1f} MB")
            found += self.grown_in_memory(node.name, before, after)
        if not ended["refused"]:
            found.append("the overload was none")
        return (f"{self.too_many()} clients for {self.options.overload:g} minutes: {ended['served']} served, {ended['refused']} "
                f"refused with Retry-After; at most {'; '.join(told)}"), found

    async def kill(self, _):
        node = self.mesh[1 + self.kills % (len(self.mesh) - 1)]
        self.kills += 1
        number = self.faults.begin(node, "kill")
        self.nodes.kill(node)
        await asyncio.sleep(DEAD_FOR)
        self.nodes.restart(node)
        again = time.monotonic()
        await self.nodes.wait_until_ready(self.mesh, READY_WITHIN)
        self.faults.end(number)
        note(f"{self.clock()} {node.name} killed; ready {time.monotonic() - again:.1f} s after its restart")

    def clock(self):
        return f"{time.monotonic() - self.began:6.0f} s:"

    async def tell(self, mixture):
        while True:
            await asyncio.sleep(TELL_EVERY)
            note(f"{self.clock()} {self.mesh[0].name} holds {usage(self.mesh[0].process.pid)}; {mixture.figures()}")

    async def held(self, least=None):
        """What the first node holds once nothing comes and goes any more: no more threads and files than `least`, or, without
        it, the same for some looks."""
        pid = self.mesh[0].process.pid
        looks = []

        async def condition():
            looks.append(usage(pid))
            if looks[-1] is None:
                raise Failure(f"{self.mesh[0].name} ended by itself; its log ends with:\n{self.mesh[0].last_lines()}")
            await asyncio.sleep(1)
            if least is not None:
                return looks[-1].threads <= least.threads and looks[-1].handles <= least.handles, looks[-1]
            # Longer than an idle thread or connection is kept.
            last = looks[-15:]
            return len(last) == 15 and len({(one.threads, one.handles) for one in last}) == 1, looks[-1]

        try:
            await self.nodes.until("the first node still", STILL_WITHIN, time.monotonic(), condition)
        except Failure:
            if looks[-1] is None:
                raise
        return looks[-1]

    def grown(self, first, last):
        """Complaints about growth between the two pauses."""
        name = self.mesh[0].name
        found = self.grown_in_memory(name, first, last)
        if last.threads > first.threads or last.handles > first.handles:
            found.append(f"{name} held {first}, in the end {last}")
        return found

    @staticmethod
    def grown_in_memory(name, first, last):
        if last.rss_mb <= RSS_FACTOR * first.rss_mb + RSS_MB:
            return []
        return [f"{name} has grown from {first.rss_mb:.1f} to {last.rss_mb:.1f} MB"]

    async def run(self):
        seconds = 60 * self.options.minutes
        short, long = self.known
        mixtures = [Mixture(self.mesh, short, long, self.faults, self.options.seed + turn) for turn in (0, 10, 20)]
        await self.phase(mixtures[0], seconds / 3)
        first = await self.held()
        note(f"{self.clock()} warm: {self.mesh[0].name} holds {first}")
        await self.phase(mixtures[1], 2 * seconds / 3)
        last = await self.held(first)
        overload, grown = await self.overload(mixtures[2]) if self.options.overload else ("no overload", [])
        errors = [error for mixture in mixtures for error in mixture.all_errors()]
        served, refused = (sum(ended[how] for ended in self.bursts) for how in ("served", "refused"))
        if self.bursts and not refused:
            errors.append("no burst was more than the mesh can take")
        most = "; ".join(f"{name} {held}" for name, held in self.watch.most.items())
        figures = [
            f"warm-up: {mixtures[0].figures()}", f"then: {mixtures[1].figures()}",
            f"{len(self.bursts)} bursts of {BURST_TIMES} times what fits: {served} served, {refused} refused with Retry-After",
            f"{self.kills} kills", overload,
            f"{self.mesh[0].name} held {first}, in the end {last}", f"the most: {most}",
        ]
        return figures, errors + grown + self.grown(first, last)


async def measure(nodes, options):
    known = cases()
    nodes.options = ["--model-id", MODEL_ID]
    await learn(nodes, [case for kind in known for case in kind], ["--sim-speed", "1000"])
    nodes.start_mesh(options.nodes, [
        "--model-id", MODEL_ID, "--sim-speed", f"{options.sim_speed:g}", "--context", str(KV), "--max-sequences", str(SEQUENCES),
        "--queue-limit", str(QUEUE), "--max-body-bytes", str(BODY_BYTES),
    ])
    await nodes.wait_until_ready(nodes.all(), READY_WITHIN)
    return await Soak(nodes, options, known).run()


async def check(options, folder):
    nodes = SimulatedNodes(options.binary, PROFILE, folder)
    figures, complaints = await until_stopped(nodes, measure(nodes, options))
    run = f"{options.minutes:g} minutes at {options.sim_speed:g} times the speed, {options.nodes} nodes, seed {options.seed}"
    return [run, *figures], complaints


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--binary", required=True, help="the shoal binary")
    parser.add_argument("--minutes", type=float, default=5)
    parser.add_argument("--overload", type=float, default=0, metavar="MINUTES", help="of ten times what fits, after all else")
    parser.add_argument("--nodes", type=int, default=3)
    parser.add_argument("--seed", type=int, default=1, help="decides what clients send")
    parser.add_argument("--sim-speed", type=float, default=8, help="how many times faster than its profile an engine runs")
    parser.add_argument("--kill-every", type=float, default=60, help="seconds between two kills, with a burst in the middle")
    parser.add_argument("--keep-logs", action="store_true", help="keep the nodes' folders even if all is well")
    options = parser.parse_args()
    if options.nodes < 2:
        parser.error("--nodes: with fewer than two nobody is left to serve while one is dead")
    # A burst has a connection for each of its streams.
    raise_file_limit()
    note("a whole day: scripts/soak.sh --minutes 1440")
    conclude("soak", options, check)


if __name__ == "__main__":
    main()
