"""Cuts a mesh of four nodes under load in two halves, and heals it; then loses the packets of one node to another.

Run by check-partition.sh, which gets the binary ready. Each node runs in a network namespace of its own; clients reach all of
them all the time. What must hold:

halves      Both halves serve from what they have. Requests whose home and host are on different sides are placed again on the
            home's side and finish; the other side's copies end. After the cut is healed all views hold four nodes again.
asymmetric  Packets of A to B are lost, those of B to A are not. Everything finishes, and afterwards A and B run requests for
            each other again.

In both, every stream gives exactly the tokens of an idle node, and afterwards no node holds any KV block.

The last line is `PASS partition: figures` or `FAIL partition: figures`.
"""

import argparse
import asyncio
import itertools
import time

from chaos_events import ready
from mesh_clients import Case, Clients, learn, middle_and_worst, requests_of
from mesh_nodes import Failure, SimulatedNodes, conclude, note, until_stopped
from netns import Network

MODEL_ID = "partition"
PROFILE = "a10/llama-7b"
SEEDS = 3
NODES = 4
# Long streams, at some 45 ms a token, outlive a cut, so that no copy on the other side ends because it is done. Short ones show
# where requests are placed meanwhile.
LONG, SHORT = 600, 24
LONG_CLIENTS, SHORT_CLIENTS = 24, 8
CASES = 16

# Seconds.
GOSSIP_INTERVAL = 0.25
READY_WITHIN = 120
SPREAD_WITHIN = 60
DRAINED_WITHIN = 60
HEALED_WITHIN = 30
# Requests in either direction that a cut must hit.
ACROSS = 2


class Load:
    """Streams through all nodes, each client always asking the same one."""

    def __init__(self, nodes, cases, seed):
        self.nodes, self.mesh = nodes, nodes.all()
        long, short = cases
        self.long, self.short = (Clients(kind, self.entries, lambda attempt: None, seed) for kind in (long, short))
        self.task = None

    def entries(self, number, _):
        return [self.mesh[number % len(self.mesh)]]

    async def __aenter__(self):
        self.task = asyncio.gather(self.long.run(LONG_CLIENTS), self.short.run(SHORT_CLIENTS))
        return self

    async def __aexit__(self, *_):
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)

    async def until_across(self, crossings):
        """Until streams run over each of these (homes, hosts) that have begun; gives the ids of all that do."""
        found = set()

        async def condition():
            nonlocal found
            placed, _ = await requests_of(self.mesh)
            over = [{id for id, home, host in placed if home in homes and host in hosts} for homes, hosts in crossings]
            found = set().union(*over)
            counts = [len(ids) for ids in over]
            return min(counts) >= ACROSS, f"{counts} requests across"

        await self.nodes.until("requests run across", SPREAD_WITHIN, time.monotonic(), condition)
        return found

    async def until_again(self, crossings, since):
        """Seconds until a stream over each of these (homes, hosts) has begun after this moment, and finished."""

        async def condition():
            rows = [row for row in self.short.tally.ended if row.since >= since]
            first = [min((row.since - since for row in rows if row.home in homes and row.host in hosts), default=None)
                     for homes, hosts in crossings]
            again.extend(first if None not in first else [])
            return bool(again), f"{len(rows)} short streams since, first across after {first} s"

        again = []
        await self.nodes.until("requests placed across again", SPREAD_WITHIN, since, condition)
        return max(again)

    async def end(self):
        """No new streams; all that run finish."""
        self.long.over.set()
        self.short.over.set()
        await self.task
        return await self.nodes.wait_until_drained(self.mesh, DRAINED_WITHIN)

    def told(self, across):
        """Figures of the load, and of the streams that ran across at the cut; complaints about them."""
        tallies = [self.long.tally, self.short.tally]
        rows = [row for tally in tallies for row in tally.ended]
        hit = [row.gap for row in rows if row.id in across]
        complaints = [error for tally in tallies for error in tally.errors]
        if len(hit) < len(across):
            complaints.append(f"{len(across) - len(hit)} of {len(across)} streams across the cut did not finish")
        figures = (
            f"{sum(tally.finished for tally in tallies)} of {sum(tally.begun for tally in tallies)} streams finished, "
            f"{sum(tally.tokens for tally in tallies)} tokens checked; {len(hit)} of {len(across)} ran across the cut, longest gap "
            f"P50/P99 {middle_and_worst(hit)}, of all {middle_and_worst([row.gap for row in rows])}"
        )
        return figures, complaints

    def begun(self, since, until, homes):
        """Streams that began in that time at these nodes, and finished."""
        rows = [*self.long.tally.ended, *self.short.tally.ended]
        return sum(row.home in homes and since <= row.since < until for row in rows)


async def all_ready(nodes, mesh, since):
    """Seconds until every view has all nodes, and has them ready; and the same in rounds of gossip."""
    ids = {node.id for node in mesh}

    async def condition():
        views = await asyncio.gather(*(nodes.view(node) for node in mesh))
        blind = [node.name for node, view in zip(mesh, views) if not view or ready(view) != ids]
        return not blind, f"{', '.join(blind)} did not see all others ready"

    took = await nodes.until("all nodes in all views", HEALED_WITHIN, since, condition)
    return f"{took:.2f} s, {took / GOSSIP_INTERVAL:.1f} rounds of gossip"


async def halves(nodes, network, options, cases):
    """Two nodes on either side."""
    mesh = nodes.all()
    sides = [mesh[:2], mesh[2:]]
    ids = [{node.id for node in side} for side in sides]
    pairs = [pair for one, other in itertools.product(*sides) for pair in ((one, other), (other, one))]

    async def apart():
        views = await asyncio.gather(*(nodes.view(node) for node in mesh))
        counts = [len(view["nodes"]) if view else None for view in views]
        return counts == [len(sides[0])] * 2 + [len(sides[1])] * 2, f"views of {counts} nodes"

    async def no_copies():
        _, hosted = await requests_of(mesh)
        strange = [id for id, home, host in hosted if (home in ids[0]) != (host in ids[0])]
        return not strange, f"{len(strange)} requests of the other side"

    async with Load(nodes, cases, options.seed) as load:
        across = await load.until_across([ids, ids[::-1]])
        cut = time.monotonic()
        for sender, receiver in pairs:
            network.drop(sender.place, receiver.place)
        seen = await nodes.until("each half alone", options.seconds, cut, apart)
        late = []
        try:
            ended = f"after {await nodes.until('no copy of the other side', options.seconds, cut, no_copies):.1f} s"
        except Failure as failure:
            ended = "never"
            late = [str(failure)]
        note(f"each half saw itself alone {seen:.1f} s after the cut, the last copy of the other side ended {ended}")
        await asyncio.sleep(cut + options.seconds - time.monotonic())
        healed = time.monotonic()
        for sender, receiver in pairs:
            network.let_pass(sender.place, receiver.place)
        converged = await all_ready(nodes, mesh, healed)
        again = await load.until_again([ids, ids[::-1]], healed)
        drained = await load.end()
    said, complaints = load.told(across)
    complaints += late
    placed = [load.begun(cut + seen, healed, side) for side in ids]
    if not min(placed):
        complaints.append(f"streams that began in the halves and finished: {placed}")
    figures = (
        f"cut 2|2 for {options.seconds:g} s: {said}; views apart after {seen:.1f} s, copies of the other side ended {ended}, "
        f"{placed[0]} and {placed[1]} streams begun in the halves; all views whole {converged} after healing, requests of one side at "
        f"the other {again:.1f} s after it, no block held {drained:.1f} s after the load"
    )
    return figures, [f"halves: {text}" for text in complaints]


async def asymmetric(nodes, network, options, cases):
    """A does not reach B, B reaches A."""
    mesh = nodes.all()
    one, other = mesh[:2]
    crossings = [({one.id}, {other.id}), ({other.id}, {one.id})]
    least = {node.name: len(mesh) for node in mesh}

    async def look():
        while True:
            views = await asyncio.gather(*(nodes.view(node) for node in mesh))
            for node, view in zip(mesh, views):
                if view:
                    least[node.name] = min(least[node.name], len(ready(view)))
            await asyncio.sleep(GOSSIP_INTERVAL)

    async with Load(nodes, cases, options.seed + 1) as load:
        across = await load.until_across(crossings)
        looking = asyncio.create_task(look())
        try:
            network.drop(one.place, other.place)
            await asyncio.sleep(options.seconds)
            healed = time.monotonic()
            network.let_pass(one.place, other.place)
        finally:
            looking.cancel()
            await asyncio.gather(looking, return_exceptions=True)
        converged = await all_ready(nodes, mesh, healed)
        again = await load.until_again(crossings, healed)
        drained = await load.end()
    said, complaints = load.told(across)
    figures = (
        f"packets of {one.name} to {other.name} lost for {options.seconds:g} s: {said}; fewest ready nodes in a view "
        f"{', '.join(f'{name} {count}' for name, count in least.items())}; all views whole {converged} after healing, requests of "
        f"one at the other again {again:.1f} s after it, no block held {drained:.1f} s after the load"
    )
    return figures, [f"asymmetric: {text}" for text in complaints]


async def measure(nodes, network, options):
    cases = [[Case(number, MODEL_ID, tokens) for number in range(CASES)] for tokens in (LONG, SHORT)]
    await learn(nodes, [case for kind in cases for case in kind], ["--sim-speed", "1000"])
    nodes.start_mesh(NODES, seeds=SEEDS, places=[network.add() for _ in range(NODES)])
    await nodes.wait_until_ready(nodes.all(), READY_WITHIN)
    figures, complaints = [], []
    for part in (halves, asymmetric):
        try:
            said, wrong = await part(nodes, network, options, cases)
        except Failure as failure:
            complaints.append(f"{part.__name__}: {failure}")
            break
        note(said)
        figures.append(said)
        complaints += wrong
    return figures, complaints


async def check(options, folder):
    try:
        network = Network()
    except Failure as failure:
        return [], [str(failure)]
    try:
        nodes = SimulatedNodes(options.binary, PROFILE, folder)
        nodes.options = ["--model-id", MODEL_ID]
        return await until_stopped(nodes, measure(nodes, network, options))
    finally:
        network.remove()


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--binary", required=True, help="the shoal binary")
    parser.add_argument("--seconds", type=float, default=15, help="that each cut lasts; copies need ten to notice it")
    parser.add_argument("--seed", type=int, default=1, help="decides which requests clients send")
    parser.add_argument("--keep-logs", action="store_true", help="keep the nodes' folders even if all is well")
    conclude("partition", parser.parse_args(), check)


if __name__ == "__main__":
    main()
