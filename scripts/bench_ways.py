"""Ways from a client to an engine, each a process or several; for bench_front.py."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from mesh_nodes import LOOK_EVERY, STOP_WITHIN, Failure, Nodes, environment, free_ports

READY_WITHIN = 60
TICKS = os.sysconf("SC_CLK_TCK")
PAGE = os.sysconf("SC_PAGE_SIZE")

NGINX = """
daemon off;
worker_processes auto;
pid {folder}/nginx.pid;
error_log {folder}/nginx.log warn;
events {{ worker_connections 8192; }}
http {{
    access_log off;
    client_body_temp_path {folder}/body;
    proxy_temp_path {folder}/proxy;
    fastcgi_temp_path {folder}/fastcgi;
    uwsgi_temp_path {folder}/uwsgi;
    scgi_temp_path {folder}/scgi;
    tcp_nodelay on;
    keepalive_requests 1000000;
    upstream engine {{
        server 127.0.0.1:{engine};
        keepalive 512;
        keepalive_requests 1000000;
    }}
    server {{
        listen 127.0.0.1:{port} backlog=1024;
        location / {{
            proxy_pass http://engine;
            proxy_http_version 1.1;
            proxy_set_header Connection "";
            proxy_buffering off;
            proxy_read_timeout 600s;
        }}
    }}
}}
"""


def family(pid):
    """The process and all its descendants."""
    parents = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                # The name in parentheses may hold anything.
                parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            except OSError:
                continue
    found = [pid]
    for member in found:
        found += [child for child, parent in parents.items() if parent == member]
    return found


def cpu_seconds_of(pid):
    """CPU of all threads of a process, in nanoseconds' precision where the kernel keeps it."""
    try:
        spent = [int((task / "schedstat").read_text().split()[0]) for task in Path(f"/proc/{pid}/task").iterdir()]
        return sum(spent) / 1e9
    except OSError:
        pass
    try:
        user, system = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]
        return (int(user) + int(system)) / TICKS
    except OSError:
        return 0.0


class Way:
    """One way to the engine. A subclass says how it is started."""

    name = ""

    def __init__(self, binary, stub, folder):
        self.binary, self.stub, self.folder = binary, stub, folder
        self.port = free_ports(1)[0][0]
        self.process = None

    def there(self):
        return bool(self.binary)

    def command(self):
        raise NotImplementedError

    async def start(self):
        self.log = self.folder / f"{self.name}.log"
        with open(self.log, "ab") as log:
            self.process = subprocess.Popen(self.command(), stdout=log, stderr=log, env=environment(), start_new_session=True)
        await self.wait_until_ready()

    async def wait_until_ready(self):
        """Until the engine's models can be seen this way: some routers listen before they know their engine."""
        began = time.monotonic()
        while not await self.sees_engine():
            if self.process is not None and self.process.poll() is not None:
                raise Failure(f"{self.name} ended with {self.process.returncode}: {self.log.read_text(errors='replace')[-600:]}")
            if time.monotonic() - began > READY_WITHIN:
                raise Failure(f"{self.name} is not ready after {READY_WITHIN} s: {self.log.read_text(errors='replace')[-600:]}")
            await asyncio.sleep(LOOK_EVERY)

    async def sees_engine(self):
        body = b'{"model":"stub","messages":[{"role":"user","content":"Hello"}],"max_tokens":1,"seed":0,"stream":true}'
        try:
            reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
            writer.write(b"POST /v1/chat/completions HTTP/1.1\r\nhost: 127.0.0.1\r\nconnection: close\r\n"
                         b"content-type: application/json\r\ncontent-length: %d\r\n\r\n%s" % (len(body), body))
            answer = await asyncio.wait_for(reader.readline(), 5)
            writer.close()
            return b" 200 " in answer
        except (OSError, asyncio.TimeoutError):
            return False

    def cpu_seconds(self):
        return sum(cpu_seconds_of(pid) for pid in family(self.process.pid)) if self.process else 0.0

    def memory_mb(self):
        total = 0
        for pid in family(self.process.pid) if self.process else []:
            try:
                total += int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * PAGE
            except OSError:
                continue
        return total / 1e6

    def stop(self):
        if self.process is None:
            return
        for number in (signal.SIGTERM, signal.SIGKILL):
            try:
                os.killpg(self.process.pid, number)
                self.process.wait(STOP_WITHIN)
            except (ProcessLookupError, subprocess.TimeoutExpired):
                continue


class Stub(Way):
    """The engine itself."""

    name = "stub"

    def __init__(self, folder):
        super().__init__(sys.executable, self, folder)

    def command(self):
        return [self.binary, str(Path(__file__).with_name("bench_stub.py")), "--port", str(self.port)]


async def start_stub(folder):
    stub = Stub(folder)
    await stub.start()
    return stub


class Direct(Way):
    """No way at all: what the others are held against."""

    name = "direct"

    def __init__(self, stub):
        super().__init__("direct", stub, None)
        self.port = stub.port

    async def start(self):
        pass


class NodeWay(Way):
    """A node that knows no other."""

    name = "node"

    def command(self):
        # What is measured is the way, so nothing is refused for a full engine.
        nodes = Nodes(self.binary, None, None, self.folder)
        mesh = free_ports(1)[0][1]
        return [self.binary, "node", "--data-dir", str(self.folder / "node"), "--http-port", str(self.port),
                "--mesh-port", str(mesh), "--cluster", "bench", "--cluster-key-file", str(nodes.key), "--engine", f"http://127.0.0.1:{self.stub.port}",
                "--queue-limit", "4096"]


class NginxWay(Way):
    """nginx as a reverse proxy, set up for streams."""

    name = "nginx"

    def command(self):
        conf = self.folder / "nginx.conf"
        conf.write_text(NGINX.format(folder=self.folder, port=self.port, engine=self.stub.port))
        return [self.binary, "-p", str(self.folder), "-e", str(self.folder / "nginx.log"), "-c", str(conf)]


class RouterWay(Way):
    """vllm-router, with what it does by itself left on."""

    name = "vllm-router"

    def command(self):
        return [self.binary, "--host", "127.0.0.1", "--port", str(self.port), "--worker-urls", f"http://127.0.0.1:{self.stub.port}",
                "--policy", "round_robin", "--log-level", "warning", "--prometheus-port", str(free_ports(1)[0][0])]


class SmgWay(Way):
    """Shepherd Model Gateway."""

    name = "smg"

    def command(self):
        return [self.binary, "launch", "--host", "127.0.0.1", "--port", str(self.port),
                "--worker-urls", f"http://127.0.0.1:{self.stub.port}", "--policy", "round_robin", "--log-level", "warn",
                "--prometheus-port", str(free_ports(1)[0][0]), "--prometheus-host", "127.0.0.1", "--disable-tokenizer-autoload"]
