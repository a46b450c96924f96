"""The mesh that strangers attack, its well-behaved clients (stranger_guest.py), and the table of what came of each attack."""

import asyncio
import json
import resource
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

from mesh_nodes import STOP_WITHIN, Failure, Node, SimulatedNodes, counted, environment, free_ports, note
from process_usage import usage

PROFILE = "a10/llama-7b"
MODEL = "strangers"
READY_WITHIN = 60
# Seconds that clients may wait for the next token, whatever is done to their nodes.
GAP = 2.0
# A process is as before when its memory has grown by no more than this: allocators keep what a burst needed.
RSS_MB = 64
# Threads of the pool for blocking work end after ten seconds of rest, connections of attackers after the header timeout.
CALM_WITHIN = 60
# Of files and threads: a look at another node's port may happen at the same moment.
SPARE_HANDLES, SPARE_THREADS = 3, 2


class Place(NamedTuple):
    """Where a node listens that is not on loopback."""

    address: str
    inside: tuple = ()


def own_address():
    """An address of this machine that others could reach; None without a network. Nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        try:
            # Set aside for documentation (RFC 5737).
            asked.connect(("192.0.2.1", 9))
        except OSError:
            return None
        address = asked.getsockname()[0]
        return None if address.startswith("127.") else address


class Seen(NamedTuple):
    """What an attack came to: words for the table, and what should not have been so."""

    observed: str
    faults: list


class StrangeNodes(SimulatedNodes):
    """Nodes with keys of their own choice: `rings` has what a node uses and what else it accepts."""

    def __init__(self, binary, folder):
        super().__init__(binary, PROFILE, folder)
        self.rings = {}

    def new_key(self, name):
        path = self.folder / f"{name}.key"
        subprocess.run([self.binary, "keygen", "--out", str(path)], check=True, stdout=subprocess.DEVNULL)
        return path

    def engine(self, node):
        accepted = self.rings.get(node.name, (None, []))[1]
        return [*super().engine(node), "--model-id", MODEL] + [word for path in accepted
                                                              for word in ("--cluster-key-accept-file", str(path))]

    def restart(self, node):
        kept = self.key
        self.key = self.rings.get(node.name, (kept, []))[0]
        super().restart(node)
        self.key = kept

    def alone(self, name, *flags, seeds=(), files=None, place=None):
        """A node that is none of the mesh, in a process with at most `files` open files; not in `all`."""
        http, mesh = free_ports(1)[0]
        folder = self.folder / name
        folder.mkdir(exist_ok=True)
        node = Node(name, folder, http, mesh, list(seeds), place)
        command = [self.binary, "node", "--data-dir", str(folder / "data"), "--listen", node.address, "--http-port", str(http),
                   "--mesh-port", str(mesh), "--cluster", "check", "--engine", f"sim:{PROFILE}", *flags]
        if seeds:
            command += ["--seeds", ",".join(seeds)]
        limit = files and (lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (files, files)))
        with open(node.log, "ab") as log:
            node.process = subprocess.Popen(command, stdout=log, stderr=log, env=environment(), preexec_fn=limit)
        return node

    async def started(self, node):
        """Until a node that is none of the mesh answers."""

        async def condition():
            if node.process.poll() is not None:
                raise Failure(f"{node.name} ended with {node.process.returncode}; its log ends with:\n{node.last_lines()}")
            return await self.is_ready(node), None

        await self.until(f"{node.name} ready", READY_WITHIN, time.monotonic(), condition)

    async def end(self, node):
        """Ends a node that is none of the mesh."""
        node.process.terminate()
        await asyncio.to_thread(self.reap, node)

    async def dropped(self, node):
        """Datagrams that the node has dropped, by reason."""
        counters = await self.counters(node) or {}
        name = "shoal_gossip_dropped_total"
        reasons = [series.partition('reason="')[2].partition('"')[0] for series in counters if series.startswith(name)]
        return {reason: int(counted(counters, name, f'reason="{reason}"')) for reason in reasons}


class Guests:
    """The process of the well-behaved clients."""

    def __init__(self, nodes):
        self.ports = [node.http for node in nodes]
        self.process = None

    async def start(self):
        program = Path(__file__).with_name("stranger_guest.py")
        pipe = asyncio.subprocess.PIPE
        words = [sys.executable, str(program), MODEL, *map(str, self.ports)]
        self.process = await asyncio.create_subprocess_exec(*words, stdin=pipe, stdout=pipe, env=environment(), limit=1 << 20)
        await self.use(self.ports)

    async def tell(self, command):
        self.process.stdin.write(json.dumps(command).encode() + b"\n")
        await self.process.stdin.drain()
        line = await asyncio.wait_for(self.process.stdout.readline(), READY_WITHIN)
        if not line:
            raise Failure("the process of the well-behaved clients has ended")
        return json.loads(line)

    async def use(self, ports):
        await self.tell({"do": "use", "ports": ports})

    async def mark(self):
        """What all of them have seen since the last mark, together."""
        told = (await self.tell({"do": "mark"})).values()
        views = {}
        for one in told:
            for view, looks in one["views"].items():
                views[view] = views.get(view, 0) + looks
        return {
            "streams": sum(one["streams"] for one in told), "tokens": sum(one["tokens"] for one in told),
            "gap": max((one["gap"] for one in told), default=0.0), "errors": sum(one["errors"] for one in told),
            "told": [text for one in told for text in one["told"]], "views": views,
        }

    async def end(self):
        if self.process is not None and self.process.returncode is None:
            self.process.stdin.close()
            try:
                await asyncio.wait_for(self.process.wait(), STOP_WITHIN)
            except asyncio.TimeoutError:
                self.process.kill()
                await self.process.wait()


class Mesh:
    """Two nodes under attack, and everything that is seen of them."""

    def __init__(self, nodes):
        self.nodes = nodes
        self.guests = None
        self.rows = []
        self.faults = []
        self.gap, self.streams, self.errors = 0.0, 0, 0
        self.right = None

    @property
    def victims(self):
        return self.nodes.all()

    async def learn(self):
        """The view of this moment is the one that must stay; written as guests write it."""
        view = await self.nodes.view(self.victims[0])
        if view is None or len(view["nodes"]) != len(self.victims):
            raise Failure(f"{self.victims[0].name} does not see the mesh")
        self.right = " ".join(sorted(f"{row['node']}/{row['facts']['incarnation']}" for row in view["nodes"]))

    async def watch(self):
        """Starts the clients."""
        await self.learn()
        self.guests = Guests(self.victims)
        await self.guests.start()

    def judge(self, threat, seen, told, views=True):
        """A row of the table: the attack's own faults, and what the clients saw meanwhile."""
        faults = list(seen.faults)
        if told["errors"]:
            faults.append(f"{told['errors']} errors of well-behaved clients, such as {told['told'][0]}")
        if told["gap"] > GAP:
            faults.append(f"a well-behaved client waited {told['gap']:.1f} s for a token")
        wrong = {view: looks for view, looks in told["views"].items() if view != self.right}
        if views and wrong:
            faults.append(f"{sum(wrong.values())} looks at another view, such as {next(iter(wrong))}")
        self.gap, self.streams = max(self.gap, told["gap"]), self.streams + told["streams"]
        self.errors += told["errors"]
        held = "/".join(f"{one.rss_mb:.0f}" if one else "gone" for one in self.usages())
        clients = f"clients meanwhile: {told['streams']} streams, longest gap {told['gap']:.2f} s; nodes now {held} MB"
        self.rows.append((threat, seen.observed, "FAILED" if faults else "held"))
        self.faults += [f"{threat}: {fault}" for fault in faults]
        note(f"{'FAILED' if faults else 'held':6}  {threat}: {seen.observed}; {clients}")
        for fault in faults:
            note(f"        {fault}")

    def refer(self, threat, tests):
        """A row that other tests hold."""
        self.rows.append((threat, tests, "by tests"))
        note(f"tests   {threat}: {tests}")

    async def row(self, threat, attack):
        """Runs an attack, an awaitable that gives what was seen, and judges it."""
        try:
            seen = await attack
        except (Failure, OSError, asyncio.TimeoutError, EOFError) as error:
            seen = Seen("not carried out", [f"{type(error).__name__} {error}"])
        self.judge(threat, seen, await self.guests.mark())

    def usages(self):
        return [usage(node.process.pid) for node in self.victims]

    async def calm(self, before):
        """Until the nodes hold no more than before; words for it, and complaints."""

        def grown():
            for node, first, last in zip(self.victims, before, self.usages()):
                if last is None:
                    yield f"{node.name} is gone"
                elif (last.rss_mb > first.rss_mb + RSS_MB or last.handles > first.handles + SPARE_HANDLES
                      or last.threads > first.threads + SPARE_THREADS):
                    yield f"{node.name} has grown from {first} to {last}"

        async def condition():
            left = list(grown())
            return not left, left

        complaints = []
        try:
            await self.nodes.until("the nodes as before", CALM_WITHIN, time.monotonic(), condition)
        except Failure:
            complaints = list(grown())
        rows = zip(self.victims, before, self.usages())
        return "; ".join(f"{node.name} {first} > {last}" for node, first, last in rows), complaints
