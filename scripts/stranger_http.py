"""Strangers at the client plane: slow heads, crowds of connections, floods of headers, bombs, half bodies, smuggled requests."""

import asyncio
import contextlib
import json
import re
import selectors
import socket
import time
import zlib
from typing import NamedTuple

from mesh_nodes import Failure, counted
from process_usage import usage
from stranger_mesh import MODEL, Seen

# The nodes' --header-timeout-ms, in seconds, and how much later a connection may be closed on a machine that is busy.
HEADER_TIMEOUT = 4.0
SLACK = 3.0
# The time a body has (node/src/api.rs).
BODY_TIMEOUT = 60.0
LORISES = 200
LORIS_BYTE_EVERY = 0.5
# Seconds that a connection stays open after its answer before it counts as kept.
KEPT_AFTER = 1.0
# Connections that are opened at a time, and those that one source address may leave waiting for their end (a port each).
AT_A_TIME = 64
PER_SOURCE = 20_000
SOURCES = 40
COPIES = 25
# Half bodies that are held open, and the bytes of each.
HELD, HELD_BYTES = 64, 3_000_000
# Memory that may come from elsewhere meanwhile.
SPARE_MB = 32


class Talk(NamedTuple):
    """What came back on one connection."""

    statuses: list
    closed: bool
    took: float
    text: bytes

    def __str__(self):
        return f"{'/'.join(map(str, self.statuses)) or 'no answer'}{'' if self.closed else ', kept open'}"


async def talk(port, data, within=15.0, linger=KEPT_AFTER, host="127.0.0.1"):
    """Sends bytes and reads until the end, or until nothing more comes for `linger` after the first answer."""
    began = time.monotonic()
    reader, writer = await asyncio.open_connection(host, port, limit=1 << 20)
    text, closed = b"", False
    sending = asyncio.create_task(send(writer, data))
    try:
        while (left := began + within - time.monotonic()) > 0:
            piece = await asyncio.wait_for(reader.read(1 << 16), min(left, linger) if text else left)
            if not piece:
                closed = True
                break
            text += piece
    except asyncio.TimeoutError:
        pass
    except OSError:
        closed = True
    finally:
        sending.cancel()
        await asyncio.gather(sending, return_exceptions=True)
        writer.close()
    statuses = [int(status) for status in re.findall(rb"HTTP/1\.[01] (\d{3})", text)]
    return Talk(statuses, closed, time.monotonic() - began, text)


async def send(writer, data):
    # Whoever is refused early may be hung up on before all is written.
    with contextlib.suppress(OSError):
        writer.write(data)
        await writer.drain()


def post(body, *headers, path="/v1/completions", length=None):
    lines = [f"POST {path} HTTP/1.1", "host: x", f"content-length: {len(body) if length is None else length}", *headers]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


def get(path, *headers):
    return "\r\n".join([f"GET {path} HTTP/1.1", "host: x", *headers]).encode() + b"\r\n\r\n"


async def lorises(mesh):
    """Connections that send a byte of a header now and then."""
    port = mesh.victims[0].http

    async def one():
        began = time.monotonic()
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        ended = asyncio.create_task(reader.read())
        writer.write(b"GET /health HTTP/1.1\r\nx: ")
        while not ended.done() and time.monotonic() - began < HEADER_TIMEOUT + 2 * SLACK:
            with contextlib.suppress(OSError):
                writer.write(b"a")
            await asyncio.wait({ended}, timeout=LORIS_BYTE_EVERY)
        closed = ended.done()
        ended.cancel()
        await asyncio.gather(ended, return_exceptions=True)
        writer.close()
        return time.monotonic() - began if closed else None

    times = await asyncio.gather(*(one() for _ in range(LORISES)))
    ended = [took for took in times if took is not None]
    faults = [] if len(ended) == LORISES else [f"{LORISES - len(ended)} slow heads were not closed"]
    if ended and max(ended) > HEADER_TIMEOUT + SLACK:
        faults.append(f"one was closed after {max(ended):.1f} s only")
    span = f"{min(ended):.1f} to {max(ended):.1f} s" if ended else "never"
    return Seen(f"{len(ended)} of {LORISES} closed after {span} (header timeout {HEADER_TIMEOUT:.0f} s)", faults)


class Crowd:
    """Connections that say nothing, as many at once as `most`, until `total` have been opened."""

    def __init__(self, port, total, most):
        self.port, self.total, self.most = port, total, most
        self.begun = self.opened = self.told = self.unsaid = self.failed = self.at_once = 0
        self.open = {}
        self.watched = selectors.DefaultSelector()
        self.took = 0.0

    def run(self):
        began = time.monotonic()
        deadline = began + 300
        while (self.begun < self.total or self.open) and time.monotonic() < deadline:
            for _ in range(min(AT_A_TIME, self.total - self.begun, self.most - len(self.open))):
                self.begin()
            for key, _ in self.watched.select(0.05):
                self.end(key.fileobj)
            # The last ones are not waited for: what holds them is known by then.
            if self.begun == self.total and len(self.open) <= self.most // 2:
                break
        for client in list(self.open):
            self.drop(client)
        self.watched.close()
        self.took = time.monotonic() - began

    def begin(self):
        client = socket.socket()
        client.setblocking(False)
        # Each source address has ports of its own.
        client.bind((f"127.0.1.{1 + self.begun // (PER_SOURCE // 4) % SOURCES}", 0))
        self.begun += 1
        try:
            client.connect_ex(("127.0.0.1", self.port))
            self.watched.register(client, selectors.EVENT_READ)
        except OSError:
            self.failed += 1
            client.close()
            return
        self.open[client] = b""
        self.at_once = max(self.at_once, len(self.open))

    def end(self, client):
        try:
            piece = client.recv(4_096)
        except BlockingIOError:
            return
        except OSError:
            piece = b""
        if piece:
            self.open[client] += piece
            return
        said = self.open[client]
        self.told += b" 503 " in said[:20]
        self.unsaid += not said
        self.drop(client)

    def drop(self, client):
        self.watched.unregister(client)
        del self.open[client]
        client.close()


async def crowd(mesh, total, most):
    """More connections than a node has places for."""
    node = mesh.victims[0]
    before = await rejected(mesh.nodes, node)
    first = usage(node.process.pid)
    peak = first
    crowd = Crowd(node.http, total, most)
    running = asyncio.create_task(asyncio.to_thread(crowd.run))
    while not running.done():
        await asyncio.wait({running}, timeout=0.2)
        now = usage(node.process.pid)
        peak = max(peak, now or peak, key=lambda one: one.handles)
    await running
    freed = await served_again(node.http)
    grown = await rejected(mesh.nodes, node) - before
    faults = []
    if not crowd.told or not grown:
        faults.append("nobody was refused with 503 and counted")
    if freed > HEADER_TIMEOUT + SLACK:
        faults.append(f"a new client was served {freed:.1f} s after the end only")
    return Seen(
        f"{crowd.begun:,} opened in {crowd.took:.0f} s, {crowd.at_once:,} at once; the node had {peak.handles:,} handles and "
        f"{peak.rss_mb - first.rss_mb:.0f} MB more at most, refused {grown:,} with 503, let {crowd.unsaid:,} go after their time; a new "
        f"client was served {freed:.1f} s after the end", faults)


async def rejected(nodes, node):
    """Connections that the node has refused for want of places."""
    found = 0

    async def condition():
        nonlocal found
        counters = await nodes.counters(node)
        found = int(counted(counters or {}, "shoal_requests_rejected_total", 'reason="connections"'))
        return counters is not None, None

    await nodes.until(f"{node.name} shows its metrics", HEADER_TIMEOUT + 2 * SLACK, time.monotonic(), condition)
    return found


async def served_again(port):
    """Seconds until a client on a new connection is served."""
    began = time.monotonic()
    while time.monotonic() - began < 60:
        with contextlib.suppress(OSError):
            if (await talk(port, get("/health", "connection: close"), within=5.0)).statuses == [200]:
                return time.monotonic() - began
        await asyncio.sleep(0.1)
    raise Failure("no new client was served within 60 s")


async def all_refused(port, cases, copies=1):
    """Sends each case so often at once. Every connection must get exactly one of the case's statuses, or be hung up on where 0 is
    one of them."""
    told, faults = [], []
    for name, data, allowed in cases:
        talks = await asyncio.gather(*(talk(port, data) for _ in range(copies)))
        answers = sorted({str(one) for one in talks})
        told.append(f"{name} {' or '.join(answers)}")
        good = [one for one in talks if (one.statuses and one.statuses[0] in allowed and len(one.statuses) == 1)
                or (not one.statuses and one.closed and 0 in allowed)]
        if len(good) != copies:
            faults.append(f"{name}: {' or '.join(answers)} instead of {' or '.join(map(str, allowed))}")
    return told, faults


async def headers(mesh):
    """Heads that are too long or have too many headers."""
    big = "b" * 8_192
    cases = [
        ("100 headers of 8 KB", get("/health", *(f"x-{number}: {big}" for number in range(100))), (431, 400)),
        ("2,000 short headers", get("/health", *(f"x-{number}: 1" for number in range(2_000))), (431, 400)),
        ("one of 1 MB", get("/health", "x: " + "c" * 1_000_000), (431, 400)),
        ("a path of 100 KB", get("/" + "p" * 100_000), (414, 431, 400)),
    ]
    told, faults = await all_refused(mesh.victims[0].http, cases, COPIES)
    return Seen(f"{COPIES} times each: {'; '.join(told)}", faults)


def chunked(body, size):
    head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"
    pieces = (body[at:at + size] for at in range(0, len(body), size))
    return head + b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in pieces) + b"0\r\n\r\n"


async def long_bodies(mesh):
    """Bodies over the bound, and compressed ones."""
    long = with_prompt("x" * 5_000_000)
    bomb = zlib.compressobj(9, zlib.DEFLATED, 31)
    bomb = bomb.compress(b" " * (256 << 20)) + bomb.flush()
    cases = [
        ("5 MB", post(long), (413,)),
        ("5 MB in chunks", chunked(long, 50_000), (413,)),
        ("10^15 bytes announced", post(b"{", length=10**15), (413,)),
        (f"a gzip bomb of {len(bomb) >> 10} KB for 256 MB", post(bomb, "content-encoding: gzip"), (400, 415)),
        ("the same unnamed", post(bomb), (400,)),
        ("br", post(b"{}", "content-encoding: br"), (400, 415)),
        ("text/plain", post(with_prompt("x"), "content-type: text/plain"), (400, 415)),
        ("a form", post(b"model=m", "content-type: application/x-www-form-urlencoded"), (400, 415)),
    ]
    told, faults = await all_refused(mesh.victims[0].http, cases)
    return Seen("; ".join(told), faults)


def with_prompt(prompt):
    return json.dumps({"model": MODEL, "prompt": prompt, "max_tokens": 1}).encode()


def with_field(text):
    """A body that would be served, and this text in it."""
    return b'{"model":"%b","prompt":"x","max_tokens":1,%b}' % (MODEL.encode(), text)


async def json_bombs(mesh):
    """Bodies that are much work for a careless reader of JSON."""
    deep = 100_000
    nested = b"[" * deep + b"]" * deep
    million = b"[" + b"1," * 999_999 + b"1]"
    cases = [
        ("100,000 times [", post(b"[" * deep), (400,)),
        ("a known field 100,000 deep", post(with_field(b'"stop":' + nested)), (400,)),
        # What the node does not know it skips, however deep it is.
        ("an unknown one", post(with_field(b'"x":' + nested)), (200, 400)),
        ("100,000 objects deep", post(with_field(b'"x":' + b'{"a":' * deep + b"1" + b"}" * deep)), (200, 400)),
        ("a prompt of a million ids", post(b'{"model":"%b","prompt":%b}' % (MODEL.encode(), million)), (400,)),
        ("a million stop strings", post(with_field(b'"stop":[' + b'"",' * 999_999 + b'""]')), (400,)),
        ("max_tokens of 5,000 digits", post(b'{"model":"%b","prompt":"x","max_tokens":%b}' % (MODEL.encode(), b"9" * 5_000)), (400,)),
        ("temperature 1e999", post(with_field(b'"temperature":1e999')), (400,)),
        ("max_tokens twice", post(with_field(b'"max_tokens":9')), (400,)),
        ("model twice", post(with_field(b'"model":"other"')), (400,)),
        ("no UTF-8", post(with_field(b'"user":"\xff\xfe"')), (400,)),
        ("half a surrogate", post(b'{"model":"%b","prompt":"\\ud800","max_tokens":1}' % MODEL.encode()), (400,)),
        ("nothing", post(b""), (400,)),
    ]
    told, faults = await all_refused(mesh.victims[0].http, cases)
    return Seen("; ".join(told), faults)


async def half_bodies(mesh):
    """Half a body, and then silence, on every path that reads one. Takes as long as a body may take."""
    port = mesh.victims[0].http
    paths = ["/v1/completions", "/v1/chat/completions", "/generate",
             "/mesh/requests/11111111-0000000000000000/migrate", "/mesh/drain"]
    data = b'{"node": "nobody"'
    talks = await asyncio.gather(*(talk(port, post(data, path=path, length=100), BODY_TIMEOUT + 15) for path in paths))
    told = [f"{path} {one} after {one.took:.0f} s" for path, one in zip(paths, talks)]
    faults = [f"{path}: {one} after {one.took:.0f} s, not 408" for path, one in zip(paths, talks) if one.statuses != [408]]
    return Seen("; ".join(told), faults)


async def held_bodies(mesh):
    """Many large bodies at once that are not brought to their end."""
    node = mesh.victims[0]
    first = usage(node.process.pid)
    body = with_prompt("x" * HELD_BYTES)[:-10]
    request = post(body, length=len(body) + 10)
    writers, seen = [], 0.0
    try:
        for _ in range(HELD):
            _, writer = await asyncio.open_connection("127.0.0.1", node.http)
            writers.append(writer)
        await asyncio.gather(*(send(writer, request) for writer in writers))

        async def condition():
            nonlocal seen
            counters = await mesh.nodes.counters(node) or {}
            busy, before, seen = counted(counters, "shoal_requests_in_flight"), seen, usage(node.process.pid).rss_mb
            return busy >= HELD and seen <= before + 1, f"{busy:.0f} requests, {seen:.0f} MB"

        await mesh.nodes.until("the bodies read", 30, time.monotonic(), condition)
        other = await talk(node.http, post(with_prompt("x"), "connection: close"))
    finally:
        for writer in writers:
            writer.close()
    most = HELD * HELD_BYTES / 2**20
    faults = [] if other.statuses == [200] else [f"another client got {other}"]
    # A buffer that grows has room for twice what is in it.
    if seen - first.rss_mb > 2 * most + SPARE_MB:
        faults.append(f"{most:.0f} MB of bodies took {seen - first.rss_mb:.0f} MB")
    return Seen(f"{HELD} of {HELD_BYTES / 1e6:.0f} MB each, {most:.0f} MB together: {seen - first.rss_mb:+.0f} MB; another client "
                f"meanwhile {other}", faults)


def smuggled(*headers, chunks=None, version="1.1"):
    """A good request whose end is in doubt, by its length or in chunks, with a second one behind it. `N` stands for its length."""
    body = with_prompt("x")
    lines = [f"POST /v1/completions HTTP/{version}", "host: x", *(line.replace("N", str(len(body))) for line in headers)]
    if any("chunked" in line for line in headers):
        body = b"%x\r\n%b\r\n" % (len(body), body) + (chunks or b"0\r\n\r\n")
    return "\r\n".join(lines).encode("latin-1") + b"\r\n\r\n" + body + get("/version")


async def smuggling(mesh):
    """Requests on whose length a proxy in front and the node might differ."""
    cases = [
        # May be taken by its chunks, if the connection ends with it (RFC 9112, 6.1).
        ("length and chunked", smuggled("content-length: 5", "transfer-encoding: chunked")),
        ("chunked and length", smuggled("transfer-encoding: chunked", "content-length: 5")),
        ("two lengths", smuggled("content-length: N", "content-length: 6")),
        ("two in one", smuggled("content-length: N, 6")),
        ("length +N", smuggled("content-length: +N")),
        ("length -1", smuggled("content-length: -1")),
        ("length 0xN", smuggled("content-length: 0xN")),
        ("a space before the colon", smuggled("content-length : N")),
        ("chunked, identity", smuggled("transfer-encoding: chunked, identity")),
        ("xchunked", smuggled("transfer-encoding: xchunked")),
        ("chunked in HTTP/1.0", smuggled("transfer-encoding: chunked", version="1.0")),
        ("a folded header", smuggled("x: a", " b", "content-length: N")),
        ("NUL in a header", smuggled("x: a\0b", "content-length: N")),
        ("a chunk of 2^68 bytes", smuggled("transfer-encoding: chunked", chunks=b"100000000000000000\r\n")),
        ("a chunk of -1 bytes", smuggled("transfer-encoding: chunked", chunks=b"-1\r\n")),
    ]
    port = mesh.victims[0].http
    told, faults = [], []
    for name, data in cases:
        one = await talk(port, data)
        told.append(f"{name} {one}")
        refused = one.statuses[:1] > [399] or "length" in name and "chunked" in name
        if not one.closed or len(one.statuses) != 1 or not refused:
            faults.append(f"{name}: {one} instead of one refusal and the end")
    # What is in no doubt is served, both of it.
    for name, data in (("by length", smuggled("content-length: N")), ("in chunks", smuggled("transfer-encoding: chunked"))):
        if (one := await talk(port, data)).statuses != [200, 200]:
            faults.append(f"a good request {name}: {one}; the other answers prove nothing")
    return Seen("; ".join(told), faults)


async def unread(mesh):
    """A client that asks for pages, one request behind the other, and takes none."""
    node = mesh.victims[0]
    first = usage(node.process.pid)
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4_096)
    client.connect(("127.0.0.1", node.http))
    client.setblocking(False)
    with contextlib.suppress(OSError):
        client.send(get("/metrics") * 20_000)
    began = time.monotonic()

    async def condition():
        # What was sent last is refused once the node has closed its end.
        try:
            client.send(b"\r\n")
        except BlockingIOError:
            pass
        except OSError:
            return True, None
        return False, f"still open after {time.monotonic() - began:.0f} s"

    try:
        took = await mesh.nodes.until("the connection closed", 90, began, condition)
        faults = []
    except Failure as failure:
        took, faults = time.monotonic() - began, [str(failure)]
    grown = usage(node.process.pid).rss_mb - first.rss_mb
    client.close()
    return Seen(f"20,000 requests in a row, none of whose answers is read: {grown:+.0f} MB, closed after {took:.0f} s", faults)
