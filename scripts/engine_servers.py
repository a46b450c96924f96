"""Real engines that speak HTTP, and nodes beside them; for the check scripts.

An engine here is a process with a port, a log in the check's folder, and numbers of its own about how full it is.
"""

import asyncio
import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from pathlib import Path

from mesh_nodes import LOOK_EVERY, STOP_WITHIN, Failure, Nodes, environment, free_ports, note

# Seconds a question to an engine may take; a busy engine answers between two steps.
ANSWER_WITHIN = 10
# Seconds until an engine that runs nothing has forgotten what it computed: longer than it holds KV for a node.
FORGOTTEN_WITHIN = 45
# Seconds until nodes that have started see each other ready.
MESH_WITHIN = 120
# What vLLM loads to give its KV away.
CONNECTOR = Path(__file__).resolve().parent.parent / "migrate" / "vllm"


class Usage:
    """How full an engine says it is."""

    def __init__(self, running, waiting, tokens, capacity):
        self.running, self.waiting, self.tokens, self.capacity = running, waiting, tokens, capacity

    def __repr__(self):
        return f"{self.running} running, {self.waiting} waiting, {self.tokens} of {self.capacity} KV tokens"


class EngineServer:
    """One engine process. A subclass says how it is started and how it is asked.

    With `kv` it shares a folder with its node, through which KV of its requests goes in and out."""

    # Seconds from the start to the first healthy answer.
    READY_WITHIN = 60
    # Streams that ask for log-probabilities move too.
    LOGPROBS = False

    def __init__(self, name, folder, model_id, kv=False):
        self.name, self.model_id = name, model_id
        self.kv = folder / f"{name}-kv" if kv else None
        if self.kv:
            self.kv.mkdir(mode=0o700)
        self.port = free_ports(1)[0][0]
        self.url = f"http://127.0.0.1:{self.port}"
        self.log = folder / f"{name}.log"
        self.process = None

    def command(self):
        raise NotImplementedError

    def environment(self):
        return environment()

    async def usage(self):
        """How full it is; None while it gives no answer."""
        raise NotImplementedError

    async def forget(self):
        """Has it drop what it keeps of requests that are over, so that none finds KV of another."""

    async def holds(self):
        """The requests whose KV it keeps though they do not run, where it says so."""
        return []

    async def held(self):
        """What it has of requests, in words; nothing when it has nothing."""
        usage = await self.usage()
        return [] if usage and usage.running + usage.waiting + usage.tokens == 0 else [f"{self.name}: {usage}"]

    def start(self):
        with open(self.log, "ab") as log:
            # A group of its own: some engines are several processes, and all of them must end.
            self.process = subprocess.Popen(
                self.command(), stdout=log, stderr=log, env=self.environment(), start_new_session=True)

    def _signal(self, number):
        try:
            os.killpg(self.process.pid, number)
        except ProcessLookupError:
            pass

    def kill(self):
        """SIGKILL to all its processes; returns the moment at which the one that listens is gone.

        The kernel takes a while to give back gigabytes, and closes what was open only after that: until then nobody can
        know."""
        self._signal(signal.SIGKILL)
        self.process.wait()
        return time.monotonic()

    def stop(self):
        if self.process is None:
            return
        if self.process.poll() is None:
            self._signal(signal.SIGTERM)
            try:
                self.process.wait(STOP_WITHIN)
            except subprocess.TimeoutExpired:
                pass
        self.kill()

    async def fetch(self, path):
        """The text that a GET is answered with; None while there is no good answer."""

        def ask():
            try:
                with urllib.request.urlopen(f"{self.url}{path}", timeout=ANSWER_WITHIN) as answer:
                    return answer.read().decode()
            except (OSError, urllib.error.HTTPError):
                return None

        return await asyncio.to_thread(ask)

    async def post(self, path):
        """The JSON that a POST without a body is answered with."""

        def ask():
            with urllib.request.urlopen(f"{self.url}{path}", data=b"", timeout=ANSWER_WITHIN) as answer:
                return json.load(answer)

        return await asyncio.to_thread(ask)

    async def wait_until_healthy(self):
        """Seconds that took."""
        began = time.monotonic()
        while await self.fetch("/health") is None:
            if self.process.poll() is not None:
                raise Failure(f"{self.name} ended with {self.process.returncode}; its log ends with:\n{self.last_lines()}")
            if time.monotonic() - began > self.READY_WITHIN:
                raise Failure(f"{self.name} is not healthy after {self.READY_WITHIN} s; its log ends with:\n{self.last_lines()}")
            await asyncio.sleep(LOOK_EVERY)
        return time.monotonic() - began

    async def models(self):
        """The names that it lists."""
        return {row["id"] for row in json.loads(await self.fetch("/v1/models") or '{"data": []}')["data"]}

    def last_lines(self, count=15):
        lines = self.log.read_text(errors="replace").splitlines() if self.log.exists() else []
        return "\n".join(lines[-count:])


class LlamaServer(EngineServer):
    """llama.cpp's own HTTP server, with a part of the KV for each of its slots."""

    SLOTS, CONTEXT = 4, 8192
    TOOL_CHOICE = "auto"
    # What a request asks for so that two runs of it can be compared: no prefill that starts from what an earlier left.
    COMPARABLE = {"cache_prompt": False}

    def __init__(self, name, folder, model_id, python, model, kv=False):
        super().__init__(name, folder, model_id, kv)
        self.python, self.model = python, model

    def command(self):
        runner = Path(__file__).with_name("llama_server.py")
        saved = ["--slot-save-path", str(self.kv)] if self.kv else []
        return [self.python, str(runner), "--model", self.model, "--alias", self.model_id, "--port", str(self.port),
                "--parallel", str(self.SLOTS), "--context", str(self.CONTEXT), *saved]

    @staticmethod
    def tokenize_body(text):
        return {"content": text}

    async def usage(self):
        slots, metrics = await asyncio.gather(self.fetch("/slots"), self.fetch("/metrics"))
        if slots is None or metrics is None:
            return None
        slots = json.loads(slots)
        # An idle slot keeps what its last request left, and gives it up for the next.
        busy = [slot for slot in slots if slot["is_processing"]]
        waiting = int(parse_metrics(metrics)["llamacpp:requests_deferred"])
        tokens = sum(slot.get("n_prompt_tokens", 0) for slot in busy)
        return Usage(len(busy), waiting, tokens, sum(slot["n_ctx"] for slot in slots))

    async def forget(self):
        # Without a folder it lets nobody act on its slots.
        for slot in range(self.SLOTS if self.kv else 0):
            await self.post(f"/slots/{slot}?action=erase")

    async def held(self):
        left = sorted(file.name for file in self.kv.iterdir()) if self.kv else []
        return await super().held() + ([f"{self.name}: files {left} in its folder"] if left else [])


class VllmServer(EngineServer):
    """vLLM on CPU, started by its module: the command of the CPU package looks for a package of another name.

    In 32 bits: with 16 an output depends on what else runs in the same step. With `kv` its arguments are those that the shoal
    `binary` names. `nixl` is the folder of that package, for engines that read each other's KV.
    """

    READY_WITHIN = 400
    LOGPROBS = True
    TOOL_CHOICE = "none"
    COMPARABLE = {"return_token_ids": True}
    # Slots for all streams that move and for the short requests that bring in their KV.
    BLOCK_SIZE, CONTEXT, SLOTS = 32, 1024, 24

    def __init__(self, name, folder, model_id, python, model, blocks=288, kv=False, binary=None, nixl=None):
        super().__init__(name, folder, model_id, kv)
        self.python, self.model, self.blocks, self.binary, self.nixl = python, model, blocks, binary, nixl

    def command(self):
        return [self.python, "-m", "vllm.entrypoints.openai.api_server", "--model", self.model,
                "--served-model-name", self.model_id, "--host", "127.0.0.1", "--port", str(self.port), "--dtype", "float32", "--enforce-eager",
                "--max-model-len", str(self.CONTEXT), "--max-num-seqs", str(self.SLOTS), "--block-size", str(self.BLOCK_SIZE),
                "--num-gpu-blocks-override", str(self.blocks), "--enable-prompt-tokens-details", *self._connector()]

    def _connector(self):
        if not self.kv:
            return []
        ask = [self.binary, "vllm-args", "--engine-kv-dir", str(self.kv), *(["--nixl"] if self.nixl else [])]
        return subprocess.run(ask, check=True, stdout=subprocess.PIPE, text=True, env=environment()).stdout.split()

    @staticmethod
    def tokenize_body(text):
        return {"prompt": text}

    def environment(self):
        # In its developers' mode it can be told to drop its prefix cache.
        packages = [str(CONNECTOR), *([self.nixl] if self.nixl else [])]
        more = {"PYTHONPATH": ":".join(packages)} if self.kv else {}
        # By memory and TCP alone: what else UCX finds on a machine does not belong to this check.
        return vllm_environment() | {"VLLM_SERVER_DEV_MODE": "1"} | more | ({"UCX_TLS": "tcp,self"} if self.nixl else {})

    async def usage(self):
        metrics, capacity = await self.metrics(), self.blocks * self.BLOCK_SIZE
        if metrics is None:
            return None
        return Usage(int(metrics["vllm:num_requests_running"]), int(metrics["vllm:num_requests_waiting"]),
                     round(metrics["vllm:kv_cache_usage_perc"] * capacity), capacity)

    async def metrics(self):
        """Its metrics by name; None while it gives no answer."""
        text = await self.fetch("/metrics")
        return parse_metrics(text) if text is not None else None

    async def forget(self):
        began = time.monotonic()
        while not (await self.post("/reset_prefix_cache"))["success"]:
            if time.monotonic() - began > FORGOTTEN_WITHIN:
                raise Failure(f"{self.name} keeps blocks in use though nothing runs: {await self.held()}")
            await asyncio.sleep(LOOK_EVERY)

    async def _listed(self):
        return await asyncio.to_thread(ask_connector, self.kv / "scheduler.sock", {"op": "list"})

    async def holds(self):
        return (await self._listed())["held"] if self.kv else []

    async def held(self):
        found = await super().held()
        if self.kv:
            told = await self._listed()
            if any(told[what] for what in ("live", "held", "pinned")):
                found.append(f"{self.name}: its connector says {told}")
        return found


def ask_connector(path, body):
    """The answer of vLLM's side to one question: each is a length and a JSON object."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(ANSWER_WITHIN)
        connection.connect(str(path))
        data = json.dumps(body).encode()
        connection.sendall(len(data).to_bytes(4, "big") + data)
        with connection.makefile("rb") as answer:
            return json.loads(answer.read(int.from_bytes(answer.read(4), "big")))


def vllm_environment():
    """What a process of vLLM needs here: one thread, no look at the network, and compiled modules kept."""
    kept = {key: value for key, value in environment().items() if key != "PYTHONDONTWRITEBYTECODE"}
    return kept | {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1",
                   "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}


def parse_metrics(text):
    """Values by name out of Prometheus' text, labels left out: the engines here have one of each that is asked for."""
    found = {}
    for line in text.splitlines():
        match = re.match(r"([A-Za-z_:][\w:]*)(?:\{.*\})? (\S+)$", line)
        if match:
            found[match[1]] = float(match[2])
    return found


async def start_engines(engines):
    """Starts all at once; the seconds until the last is healthy. After a failure the caller stops them."""
    for engine in engines:
        engine.start()
    return max(await asyncio.gather(*(engine.wait_until_healthy() for engine in engines)))


async def stop_engines(engines):
    await asyncio.gather(*(asyncio.to_thread(engine.stop) for engine in engines))


@contextlib.asynccontextmanager
async def in_a_mesh(engines, binary, folder, flags):
    """Engines that run, with a node beside each in one mesh that is ready; all of it ends with the block."""
    nodes = EngineNodes(binary, engines, folder)
    try:
        note(f"{len(engines)} engines are up after {await start_engines(engines):.1f} s")
        nodes.start_mesh(len(engines), flags)
        await nodes.wait_until_ready(nodes.all(), MESH_WITHIN)
        yield nodes
    finally:
        await nodes.stop_all()
        await stop_engines(engines)


class EngineNodes(Nodes):
    """Nodes of which each has an engine beside it that is no part of it."""

    def __init__(self, binary, engines, folder):
        super().__init__(binary, None, engines[0].model_id, folder)
        self.engines = engines
        # Answers of requests that nothing happened to, by prompt and length.
        self.unmoved = {}
        self._beside = {f"node{number}": engine for number, engine in enumerate(engines, 1)}

    def engine(self, node):
        beside = self._beside[node.name]
        kv = ["--engine-kv", "auto", "--engine-kv-dir", str(beside.kv)] if beside.kv else []
        return ["--engine", beside.url, *kv]

    def engine_of(self, node):
        """The engine beside a node."""
        return self._beside[node.name]

    async def row(self, viewer, node):
        """What `viewer` knows of `node`; None while it knows nothing."""
        view = await self.view(viewer) or {"nodes": []}
        return next((row for row in view["nodes"] if row["node"] == node.id), None)
