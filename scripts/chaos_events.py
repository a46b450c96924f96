"""What chaos.py does to the nodes: a schedule that a seed decides, and whoever carries it out."""

import asyncio
import os
import random
import signal
import subprocess
import time
from collections import Counter
from typing import NamedTuple, Optional

from mesh_clients import Faults
from mesh_nodes import Failure, note, share

# As often as they come in each turn of the schedule.
KINDS = ("kill", "kill", "stop", "stop", "link", "link", "drain", "join")

# Seconds.
BACK_WITHIN = 30
READY_WITHIN = 60
# The default of --shutdown-deadline-ms, and some time to close.
EXIT_WITHIN = 35
# Shortest and longest time between the beginnings of two events.
PAUSE = (1.0, 4.0)
# Shortest and longest time that something lasts: a dead node is missing, a process stands still, a cable is out, a guest stays.
LASTS = {"kill": (0.2, 4.0), "stop": (0.5, 2.5), "link": (0.5, 6.0), "drain": (0.2, 2.0), "join": (3.0, 8.0)}
LOOK_EVERY = 0.25


class Event(NamedTuple):
    """One line of the schedule."""

    pause: float
    kind: str
    # None for a guest.
    target: Optional[int]
    lasts: float


def schedule(seed, nodes, kinds):
    """Events without end. The first node is never ended, so that one process lives through everything."""
    dice = random.Random(seed)
    last, turn = None, []
    while True:
        turn = turn or dice.sample(kinds, len(kinds))
        kind = turn.pop()
        pause, lasts = dice.uniform(*PAUSE), dice.uniform(*LASTS[kind])
        if kind == "join":
            yield Event(pause, kind, None, lasts)
            continue
        # Not the same again, which would have to wait, unless there is no other.
        fit = range(1 if kind in ("kill", "drain") else 0, nodes)
        last = dice.choice([node for node in fit if node != last] or fit)
        yield Event(pause, kind, last, lasts)


def ready(view):
    """Nodes that a view has as ready."""
    return {row["node"] for row in view["nodes"] if (row["load"] or {}).get("readiness") == "Ready"}


class Trouble:
    """Carries out the schedule. Events overlap, but never hit more than `at_once` nodes, and no node twice at a time."""

    def __init__(self, nodes, network, seed):
        self.nodes, self.network, self.seed = nodes, network, seed
        self.mesh = nodes.all()
        # Where a guest is put: one at a time.
        self.spare = network.add() if network else None
        self.at_once = max(1, len(self.mesh) - 2)
        self.faults = Faults()
        self.guest = None
        self.counts, self.back_after, self.complaints = Counter(), {}, []
        self.began = self.mended = time.monotonic()
        self._busy = set()
        self._room = asyncio.Condition()

    def kinds(self):
        return [kind for kind in KINDS if self.network or kind != "link"]

    def homes(self):
        """Nodes that clients know of."""
        return self.mesh + ([self.guest] if self.guest else [])

    async def run(self, seconds):
        """Begins events for so long, and returns when the last one is over."""
        self.began = time.monotonic()
        tasks = []
        try:
            for event in schedule(self.seed, len(self.mesh), self.kinds()):
                await asyncio.sleep(event.pause)
                key = "guest" if event.kind == "join" else event.target
                await self._until_room(key)
                if time.monotonic() - self.began >= seconds:
                    break
                self._busy.add(key)
                tasks.append(asyncio.create_task(self._carry_out(event, key)))
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _until_room(self, key):
        def room():
            return key not in self._busy and (key == "guest" or len(self._busy - {"guest"}) < self.at_once)

        async with self._room:
            await self._room.wait_for(room)

    async def _carry_out(self, event, key):
        doing = {"kill": self._kill, "stop": self._stop, "link": self._link, "drain": self._drain, "join": self._join}
        self.counts[event.kind] += 1
        try:
            if event.kind == "join":
                await self._join(event)
            else:
                node = self.mesh[event.target]
                self._say(f"{event.kind} {node.name} for {event.lasts:.1f} s")
                number = self.faults.begin(node, event.kind)
                since = await doing[event.kind](node, event.lasts)
                await self._back(node, event.kind, since)
                self.faults.end(number)
        except Failure as failure:
            self.complaints.append(f"{event.kind}: {failure}")
        finally:
            async with self._room:
                self._busy.discard(key)
                self._room.notify_all()

    def _say(self, text):
        note(f"{time.monotonic() - self.began:6.1f} s: {text}")

    async def _kill(self, node, lasts):
        self.nodes.kill(node)
        await asyncio.sleep(lasts)
        self.nodes.restart(node)
        return time.monotonic()

    async def _stop(self, node, lasts):
        os.kill(node.process.pid, signal.SIGSTOP)
        try:
            await asyncio.sleep(lasts)
        finally:
            os.kill(node.process.pid, signal.SIGCONT)
        return time.monotonic()

    async def _link(self, node, lasts):
        self.network.cut(node.place)
        try:
            await asyncio.sleep(lasts)
        finally:
            self.network.mend(node.place)
        return time.monotonic()

    async def _drain(self, node, lasts):
        await self._end(node)
        await asyncio.sleep(lasts)
        self.nodes.restart(node)
        return time.monotonic()

    async def _end(self, node):
        """SIGTERM, and the node ends by itself, and well."""
        told = time.monotonic()
        node.process.terminate()
        try:
            code = await asyncio.to_thread(node.process.wait, EXIT_WITHIN)
        except subprocess.TimeoutExpired:
            self.nodes.kill(node)
            raise Failure(f"{node.name} did not end within {EXIT_WITHIN} s of SIGTERM") from None
        if code != 0:
            raise Failure(f"{node.name} ended with {code} after SIGTERM")
        self._say(f"{node.name} ended {time.monotonic() - told:.1f} s after SIGTERM")

    async def _join(self, event):
        """A further node comes, stays, and leaves."""
        name = f"guest{self.counts['join']}"
        since = time.monotonic()
        guest = self.nodes.start(name, self.mesh[0].seeds, place=self.spare)
        try:
            await self.nodes.wait_until_ready([guest], READY_WITHIN)
            await self._back(guest, "join", since)
            self._say(f"{name} has joined, for {event.lasts:.1f} s")
            self.guest = guest
            await asyncio.sleep(event.lasts)
            self.guest = None
            number = self.faults.begin(guest, "join")
            await self._end(guest)
            self.faults.end(number)
            self.mended = time.monotonic()
        finally:
            self.guest = None
            self.nodes.nodes.remove(guest)
            if guest.process.poll() is None:
                self.nodes.kill(guest)

    async def _back(self, node, kind, since):
        """Until the node and all that nothing is done to see each other ready."""
        self.mended = max(self.mended, since)

        async def condition():
            out = {self.mesh[key] for key in self._busy if key != "guest"} - {node}
            well = [one for one in self.mesh if one not in out] + [node] * (node not in self.mesh)
            views = await asyncio.gather(*(self.nodes.view(one) for one in well))
            ids = {one.id for one in well}
            blind = [one.name for one, view in zip(well, views) if not view or not ids <= ready(view)]
            await asyncio.sleep(LOOK_EVERY)
            return not blind, f"{', '.join(blind)} of {', '.join(one.name for one in well)} did not see all others ready"

        took = await self.nodes.until(f"{node.name} back in all views after {kind}", BACK_WITHIN, since, condition)
        self.back_after.setdefault(kind, []).append(took - LOOK_EVERY)

    def figures(self):
        """Events by kind, and how long after their end all views had the node (again)."""
        said = []
        for kind, count in sorted(self.counts.items()):
            took = self.back_after.get(kind, [])
            times = f" ({share(took, 0.5):.1f}/{max(took):.1f} s)" if took else ""
            said.append(f"{count} {kind}{times}")
        return f"events, and P50/max until all views had the node again: {', '.join(said) or 'none'}"
