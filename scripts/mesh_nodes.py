"""Starting, watching, killing and stopping nodes on this machine, and loading them; for the check scripts."""

import asyncio
import http.client
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path

# Seconds a node has to stop by itself after SIGTERM.
STOP_WITHIN = 15
# Seconds between two looks. The node's answer is a lookup, so looking often costs it nothing.
LOOK_EVERY = 0.1
# For clients and between nodes, where a node has its address for itself: the defaults.
PORTS = (8080, 7400)


class Failure(Exception):
    """Something that must happen did not."""


class Node:
    """One node process and where it is found: at this machine's loopback, or at a place with an address and words that put a
    command there (netns.py)."""

    def __init__(self, name, folder, http, mesh, seeds, place=None):
        self.name = name
        self.folder = folder
        self.http = http
        self.mesh = mesh
        self.seeds = seeds
        self.place = place
        self.address = place.address if place else "127.0.0.1"
        self.inside = place.inside if place else []
        self.url = f"http://{self.address}:{http}"
        self.log = folder / "log"
        self.id = None
        self.process = None

    def last_lines(self, count=15):
        lines = self.log.read_text(errors="replace").splitlines() if self.log.exists() else []
        return "\n".join(lines[-count:])


def free_ports(count):
    """Pairs of a TCP port and a UDP port (its successor free as well) that nobody uses now."""
    held, found = [], []

    def bound(kind, port):
        taken = socket.socket(socket.AF_INET, kind)
        taken.bind(("127.0.0.1", port))
        held.append(taken)
        return taken.getsockname()[1]

    while len(found) < count:
        mesh = bound(socket.SOCK_DGRAM, 0)
        try:
            bound(socket.SOCK_DGRAM, mesh + 1)
        except (OSError, OverflowError):
            continue
        found.append((bound(socket.SOCK_STREAM, 0), mesh))
    for taken in held:
        taken.close()
    return found


def environment():
    """What a process of ours inherits: no settings that somebody has for nodes of their own."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith("SHOAL_")}
    return kept | {"NO_COLOR": "1"}


class Nodes:
    """All nodes of one check."""

    def __init__(self, binary, model, model_id, folder):
        self.binary, self.model, self.model_id, self.folder = binary, model, model_id, folder
        self.nodes = []
        # Outputs that do not depend on load: each sequence has its own part of the KV.
        self.reproducible = True
        # Flags that every node is started with, beyond what all checks need.
        self.options = []
        self.key = folder / "cluster.key"
        subprocess.run([binary, "keygen", "--out", str(self.key)], check=True, stdout=subprocess.DEVNULL)

    def all(self):
        return list(self.nodes)

    def name_of(self, id):
        return next((node.name for node in self.nodes if node.id == id), str(id))

    def start(self, name, seeds, ports=None, place=None):
        http, mesh = ports or (free_ports(1)[0] if place is None else PORTS)
        folder = self.folder / name
        folder.mkdir(exist_ok=True)
        node = Node(name, folder, http, mesh, seeds, place)
        self.nodes.append(node)
        self.restart(node)
        return node

    def start_mesh(self, count, options=None, seeds=None, places=None):
        """Starts so many nodes that join through the first `seeds` of them, through any if it is not said."""
        if options is not None:
            self.options = options
        ports = [PORTS] * count if places else free_ports(count)
        places = places or [None] * count
        addresses = [place.address if place else "127.0.0.1" for place in places]
        seeds = [f"{address}:{mesh}" for address, (_, mesh) in zip(addresses, ports)][:seeds]
        for number, (pair, place) in enumerate(zip(ports, places), 1):
            self.start(f"node{number}", seeds, pair, place)

    def engine(self, node):
        """Flags that say what runs the model at this node."""
        pinned = ["--reproducible"] if self.reproducible else []
        return ["--model", self.model, "--model-id", self.model_id, "--threads", "1", *pinned]

    def restart(self, node):
        command = [
            *node.inside, self.binary, "node", "--data-dir", str(node.folder / "data"), "--listen", node.address,
            "--http-port", str(node.http), "--mesh-port", str(node.mesh), "--cluster", "check", "--cluster-key-file", str(self.key),
            *self.engine(node), *self.options,
        ]
        if node.seeds:
            command += ["--seeds", ",".join(node.seeds)]
        with open(node.log, "ab") as log:
            node.process = subprocess.Popen(command, stdout=log, stderr=log, env=environment())

    def kill(self, node):
        """SIGKILL; returns the moment."""
        node.process.kill()
        node.process.wait()
        return time.monotonic()

    async def stop(self, node):
        self.nodes.remove(node)
        node.process.terminate()
        await asyncio.to_thread(self.reap, node)

    def reap(self, node):
        try:
            node.process.wait(STOP_WITHIN)
        except subprocess.TimeoutExpired:
            node.process.kill()
            node.process.wait()

    async def stop_all(self):
        for node in self.nodes:
            node.process.terminate()
        await asyncio.gather(*(asyncio.to_thread(self.reap, node) for node in self.nodes))

    async def view(self, node):
        """The node's view, or None while it does not answer."""

        def fetch():
            try:
                with urllib.request.urlopen(f"{node.url}/mesh/nodes", timeout=2) as answer:
                    return json.load(answer)
            except (OSError, ValueError):
                return None

        return await asyncio.to_thread(fetch)

    async def counters(self, node):
        """The node's metrics, series by series as written; None while it does not answer."""

        def fetch():
            try:
                with urllib.request.urlopen(f"{node.url}/metrics", timeout=2) as answer:
                    lines = answer.read().decode().splitlines()
            except (OSError, http.client.HTTPException):
                return None
            samples = (line.rpartition(" ") for line in lines if not line.startswith("#"))
            return {series: float(value) for series, _, value in samples if series}

        return await asyncio.to_thread(fetch)

    async def added(self, nodes, name, *labels):
        """Sum of a counter over these nodes."""
        pages = await asyncio.gather(*(self.counters(node) for node in nodes))
        return round(sum(counted(page, name, *labels) for page in pages if page))

    async def last_words(self, node, within):
        """How a node that was told to stop ended, the last metrics it showed, and when its engine was empty."""
        ending = asyncio.create_task(asyncio.to_thread(node.process.wait, within))
        last, empty = {}, None
        while not ending.done():
            page = await self.counters(node)
            if page is not None:
                last = page
                busy = counted(page, "shoal_engine_running") + counted(page, "shoal_engine_queued")
                empty = (empty or time.monotonic()) if not busy else None
            await asyncio.wait({ending}, timeout=LOOK_EVERY)
        try:
            return ending.result(), last, empty or time.monotonic()
        except subprocess.TimeoutExpired:
            self.kill(node)
            return "no exit", last, empty or time.monotonic()

    async def is_ready(self, node):
        def fetch():
            try:
                with urllib.request.urlopen(f"{node.url}/readiness", timeout=2) as answer:
                    return answer.status == 200
            except (OSError, urllib.error.HTTPError):
                return False

        return await asyncio.to_thread(fetch)

    async def until(self, what, within, since, condition):
        """Looks again and again until `condition` gives something true; returns the seconds since `since`."""
        seen = None
        while True:
            done, seen = await condition()
            now = time.monotonic()
            if done:
                return now - since
            if now - since > within:
                raise Failure(f"not within {within} s: {what}; last seen: {seen}")
            await asyncio.sleep(LOOK_EVERY)

    async def wait_until_ready(self, nodes, within):
        async def condition():
            for node in nodes:
                if node.process.poll() is not None:
                    raise Failure(f"{node.name} ended with {node.process.returncode}; its log ends with:\n{node.last_lines()}")
                view = await self.view(node) or {"nodes": []}
                ready = sum((row["load"] or {}).get("readiness") == "Ready" for row in view["nodes"])
                if ready < len(nodes) or not await self.is_ready(node):
                    return False, f"{node.name} sees {ready} of {len(nodes)} ready"
                node.id = view["this"]
            return True, None

        return await self.until("all ready", within, time.monotonic(), condition)

    async def wait_until_seen(self, nodes, count, within, since):
        """Until each of `nodes` sees exactly `count` nodes."""

        async def condition():
            views = await asyncio.gather(*(self.view(node) for node in nodes))
            counts = [len(view["nodes"]) if view else None for view in views]
            return all(seen == count for seen in counts), f"views of {counts} nodes"

        return await self.until(f"{count} nodes in every view", within, since, condition)

    async def own_load(self, node):
        view = await self.view(node)
        if view is None:
            return None
        return next((row["load"] for row in view["nodes"] if row["this"]), None)

    async def wait_until_drained(self, nodes, within):
        """Until each of `nodes` says of itself that it holds and promises no KV block."""

        async def condition():
            loads = await asyncio.gather(*(self.own_load(node) for node in nodes))
            kept = ("used_blocks", "reserved_blocks", "running", "queued")
            idle = all(load is not None and all(load.get(key) == 0 for key in kept) for load in loads)
            return idle, [load and {key: load.get(key) for key in kept} for load in loads]

        return await self.until("no KV block used or reserved anywhere", within, time.monotonic(), condition)

    async def wait_until_running(self, node, count, within):
        """Until the node says that it runs at least `count` requests; returns how many it runs."""
        running = 0

        async def condition():
            nonlocal running
            load = await self.own_load(node)
            running = (load or {}).get("running", 0)
            return running >= count, load

        await self.until(f"{node.name} runs {count} requests", within, time.monotonic(), condition)
        return running


def counted(counters, name, *labels):
    """Sum of the series of this name that have all these labels, each as `reason="placed"`."""
    named = ((series, value) for series, value in counters.items() if series.partition("{")[0] == name)
    return sum(value for series, value in named if all(label in series for label in labels))


def share(values, part):
    """The value that this part of them lies below; 0.5 gives the median."""
    values = sorted(values)
    return values[min(len(values) - 1, int(len(values) * part))] if values else float("nan")


async def until_stopped(nodes, measuring):
    """Figures and complaints that `measuring` comes to. A failure is a complaint, and whatever happens the nodes are stopped."""
    try:
        return await measuring
    except (Failure, OSError) as failure:
        return [], [f"{type(failure).__name__}: {failure}"]
    finally:
        await nodes.stop_all()


class SimulatedNodes(Nodes):
    """All nodes of a check that needs no model: their engines only take the time of one."""

    def __init__(self, binary, profile, folder):
        super().__init__(binary, None, None, folder)
        self.profile = profile

    def engine(self, node):
        return ["--engine", f"sim:{self.profile}"]


async def load(binary, nodes, arguments):
    """Runs the load generator against these nodes, used in turn; what it says in JSON."""
    urls = [word for node in nodes for word in ("--url", node.url)]
    # Prompts as ids have exactly the length asked for.
    command = [binary, "bench", "load", "--json", "--prompt-ids", *urls, *arguments]
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(*command, stdout=pipe, stderr=pipe, env=environment())
    try:
        said, complaint = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if process.returncode != 0:
        raise Failure(f"the load generator ended with {process.returncode}: {complaint.decode(errors='replace')[-500:]}")
    return json.loads(said)


def note(text):
    print(f"    {text}", flush=True)


def conclude(name, options, check):
    """Runs `check(options, folder)`, which gives figures and complaints, and ends the program with the verdict."""
    # Ends like Ctrl-C: the nodes are stopped on the way out.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    folder = Path(tempfile.mkdtemp(prefix="shoal-check."))
    try:
        figures, complaints = asyncio.run(check(options, folder))
    except KeyboardInterrupt:
        shutil.rmtree(folder, ignore_errors=True)
        sys.exit(130)
    for complaint in complaints[:20]:
        note(complaint)
    if complaints or options.keep_logs:
        note(f"logs and data of the nodes: {folder}")
    else:
        shutil.rmtree(folder, ignore_errors=True)
    verdict = "FAIL" if complaints else "PASS"
    trouble = [f"complaints: {len(complaints)}, the first: {complaints[0]}"] if complaints else []
    print(f"{verdict} {name}: {'; '.join(trouble + figures)}".replace("\n", " "), flush=True)
    sys.exit(1 if complaints else 0)
