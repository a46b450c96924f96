"""Does all kinds of harm to the nodes of a mesh under load, and holds every stream against its known answer.

Run by chaos.sh, which gets the binary ready. Each node runs in a network namespace of its own; without root, or with
--loopback, all run on this machine's loopback and no cable is pulled. What must hold:

- Every stream finishes with exactly the tokens that an idle node gives. A gap is fine, an error is not. Only a client whose own
  node was killed or cut off may lose its connection; one that a node turns away which is down or stopping asks the next.
- When all is over every node is ready in all views, none holds any KV block, and no process has grown.

The last line is `PASS chaos: figures` or `FAIL chaos: figures`.
"""

import argparse
import asyncio
import random
import re
import time

from chaos_events import Trouble, ready
from mesh_clients import Case, Clients, learn, middle_and_worst
from mesh_nodes import Failure, Nodes, SimulatedNodes, conclude, note, until_stopped
from netns import Network, NoNetwork
from process_usage import usage

MODEL_ID = "chaos"
# Steps of some 45 ms: streams last for seconds, and events find them in the middle.
PROFILE = "a10/llama-7b"
SEEDS = 3

# Seconds. Limits are for a machine that is shared.
READY_WITHIN = 120
DRAINED_WITHIN = 60
CONVERGED_WITHIN = 30
# Load before the first event, so that what a process holds is what it needs.
WARM_UP = 5.0

# Growth of a process that is no leak yet: allocators keep what a burst needed.
RSS_FACTOR, RSS_MB = 1.25, 16
THREADS, HANDLES = 4, 8
# The pool of blocking threads gives them back after ten seconds.
SHRUNK_WITHIN = 30

# Tokens of the streams, and how many streams run.
LENGTHS = {"sim": (24, 60, 120, 200, 280), "model": (16, 32, 48, 64)}
STREAMS = {"sim": 24, "model": 8}
CASES = 30


class Lives:
    """What each process holds some seconds after its start, and at the end."""

    def __init__(self, nodes):
        self.nodes = nodes
        self.born, self.first = {}, {}

    async def watch(self):
        while True:
            for node in self.nodes.all():
                pid = node.process.pid
                age = time.monotonic() - self.born.setdefault(pid, time.monotonic())
                if age >= WARM_UP and pid not in self.first and (now := usage(pid)):
                    self.first[pid] = now
            await asyncio.sleep(1)

    def _grown(self, node):
        first, last = self.first[node.process.pid], usage(node.process.pid)
        if last is None:
            return f"{node.name} is gone"
        good = (last.rss_mb <= RSS_FACTOR * first.rss_mb + RSS_MB and last.threads <= first.threads + THREADS
                and last.handles <= first.handles + HANDLES)
        return None if good else f"{node.name} has grown from {first} to {last}"

    async def told(self):
        """Figures of those that were watched, and complaints about those that have grown."""
        watched = [node for node in self.nodes.all() if node.process.pid in self.first]

        async def condition():
            grown = [text for text in map(self._grown, watched) if text]
            return not grown, grown

        complaints = []
        try:
            await self.nodes.until("no process has grown", SHRUNK_WITHIN, time.monotonic(), condition)
        except Failure:
            complaints = [f"leak: {text}" for text in map(self._grown, watched) if text]
        rows = [f"{node.name} {self.first[node.process.pid]} > {usage(node.process.pid)}" for node in watched]
        return f"processes after {WARM_UP:.0f} s of their life and at the end: {'; '.join(rows)}", complaints


class Chaos:
    """One run."""

    def __init__(self, nodes, network, options, cases):
        self.nodes, self.options = nodes, options
        self.trouble = Trouble(nodes, network, options.seed)
        within = 120 if options.engine == "sim" else 300
        self.clients = Clients(cases, self.entries, self.excuse, options.seed, within)
        self.lives = Lives(nodes)

    def entries(self, number, dice):
        """All nodes, each client beginning with another."""
        homes = self.trouble.homes()
        first = dice.randrange(len(homes))
        return homes[first:] + homes[:first]

    def excuse(self, attempt):
        """What a client may meet, and only at a node to which it was done."""

        def hit(*kinds):
            return self.trouble.faults.hit(attempt.node.id, attempt.asked, attempt.over, kinds)

        stopping = hit("drain", "join")
        if attempt.ended == "turned away" and attempt.status != 429 and (stopping or hit("kill", "link")):
            return "next"
        if attempt.ended == "cut" and hit("kill", "link"):
            return "lost"
        # The connection came in just before the socket was closed.
        if attempt.ended == "cut" and attempt.status is None and stopping:
            return "next"
        return None

    async def progress(self):
        told = 0
        while True:
            await asyncio.sleep(10)
            tally = self.clients.tally
            for error in tally.errors[told:]:
                note(f"        {error}")
            told = len(tally.errors)
            note(f"        {tally.finished} of {tally.begun} streams finished, {tally.lost} lost their home, {len(tally.errors)} errors")

    async def run(self):
        """The load and the events; returns when both have ended."""
        streams = self.options.streams or STREAMS[self.options.engine]
        load = asyncio.create_task(self.clients.run(streams))
        beside = [asyncio.create_task(self.lives.watch()), asyncio.create_task(self.progress())]
        try:
            await asyncio.sleep(WARM_UP)
            await self.trouble.run(self.options.seconds)
            self.clients.over.set()
            converged = await self.converged()
            await load
        finally:
            for task in [load, *beside]:
                task.cancel()
            await asyncio.gather(load, *beside, return_exceptions=True)
        return converged

    async def converged(self):
        """Seconds after the end of the last event until every view has exactly the nodes there are, all ready."""
        mesh = self.nodes.all()
        ids = {node.id for node in mesh}

        async def condition():
            views = await asyncio.gather(*(self.nodes.view(node) for node in mesh))
            seen = [(len(view["nodes"]), len(ready(view))) if view else None for view in views]
            return all(view and ready(view) == ids and len(view["nodes"]) == len(ids) for view in views), f"(nodes, ready) {seen}"

        return await self.nodes.until("all ready in all views", CONVERGED_WITHIN, self.trouble.mended, condition)

    def gaps(self):
        """Longest gaps of the streams that finished: of all, and of those whose home or first host something was done to."""
        kinds = ("kill", "stop", "link", "drain", "join")
        rows = self.clients.tally.ended
        hit = [row.gap for row in rows
               if any(self.trouble.faults.hit(id, row.since, row.until, kinds) for id in (row.home, row.host))]
        return (f"longest gap P50/P99 {middle_and_worst([row.gap for row in rows])} of all, "
                f"{middle_and_worst(hit)} of {len(hit)} at nodes that were hit")

    async def verdict(self, converged):
        tally = self.clients.tally
        complaints = list(tally.errors) + self.trouble.complaints + wrong_in_logs(self.nodes)
        try:
            drained = f"{await self.nodes.wait_until_drained(self.nodes.all(), DRAINED_WITHIN):.1f} s later no block held"
        except Failure as failure:
            drained = "blocks still held"
            complaints.append(str(failure))
        said, grown = await self.lives.told()
        if not tally.finished:
            complaints.append("no stream finished")
        figures = [
            f"{tally.begun} streams begun, {tally.finished} finished, {tally.tokens} tokens checked, {tally.lost} home lost, "
            f"{tally.turned} times sent on to the next node, {len(tally.errors)} errors", self.gaps(), self.trouble.figures(),
            f"all ready in all views {converged:.1f} s after the last, {drained}", said,
        ]
        return figures, complaints + grown


def wrong_in_logs(nodes):
    """Panics, and what nodes call an error: somebody must look at those."""
    bad = re.compile(r"panicked at|\bERROR\b")
    return [f"log of {log.parent.name}: {line}" for log in sorted(nodes.folder.glob("*/log"))
            for line in log.read_text(errors="replace").splitlines() if bad.search(line)]


def place(options):
    """The network of namespaces, if there can be one, and words for it."""
    if options.loopback:
        return None, "on loopback"
    try:
        return Network(), "in network namespaces"
    except NoNetwork as reason:
        note(f"{reason}: all nodes run on loopback, and no cable is pulled")
        return None, f"on loopback ({reason})"


async def measure(nodes, network, options):
    lengths = LENGTHS[options.engine]
    cases = [Case(number, MODEL_ID, lengths[number % len(lengths)]) for number in range(CASES)]
    # The simulated engine says the same at any speed.
    await learn(nodes, cases, ["--sim-speed", "1000"] if options.engine == "sim" else [])
    places = [network.add() for _ in range(options.nodes)] if network else None
    nodes.start_mesh(options.nodes, seeds=SEEDS, places=places)
    await nodes.wait_until_ready(nodes.all(), READY_WITHIN)
    chaos = Chaos(nodes, network, options, cases)
    return await chaos.verdict(await chaos.run())


async def check(options, folder):
    network, where = place(options)
    try:
        if options.engine == "sim":
            nodes = SimulatedNodes(options.binary, PROFILE, folder)
            nodes.options = ["--model-id", MODEL_ID]
        else:
            nodes = Nodes(options.binary, options.model, MODEL_ID, folder)
        figures, complaints = await until_stopped(nodes, measure(nodes, network, options))
    finally:
        if network:
            network.remove()
    run = f"seed {options.seed}, {options.seconds:g} s, {options.nodes} nodes {where}, engine {options.engine}"
    return [run, *figures], complaints


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--binary", required=True, help="the shoal binary")
    parser.add_argument("--model", help="the GGUF file, for --engine model")
    parser.add_argument("--seconds", type=float, default=60, help="for which events begin")
    parser.add_argument("--nodes", type=int, default=4)
    parser.add_argument("--seed", type=int, default=None, help="decides which events happen; drawn if it is not said")
    parser.add_argument("--streams", type=int, help="clients at once, by default 24, with a model 8")
    parser.add_argument("--engine", choices=("sim", "model"), default="sim", help="simulated, or the demo model")
    parser.add_argument("--loopback", action="store_true", help="no network namespaces, and no cable pulled")
    parser.add_argument("--keep-logs", action="store_true", help="keep the nodes' folders even if all is well")
    options = parser.parse_args()
    if options.nodes < 2:
        parser.error("--nodes: with fewer than two nobody is left to serve")
    if options.engine == "model" and not options.model:
        parser.error("--engine model needs --model")
    if options.seed is None:
        options.seed = random.randrange(1_000_000)
        note(f"seed {options.seed}")
    conclude("chaos", options, check)


if __name__ == "__main__":
    main()
