"""Strangers that speak HTTP/2 to the client plane: floods of resets, pings and header frames."""

import asyncio
import contextlib
import struct
import time

from mesh_nodes import Failure
from process_usage import usage
from stranger_http import HEADER_TIMEOUT, SLACK
from stranger_mesh import Seen

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
# Frame types and flags (RFC 9113).
HEADERS, RST_STREAM, SETTINGS, PING, GOAWAY, CONTINUATION = 1, 3, 4, 6, 7, 9
END_STREAM, END_HEADERS = 1, 4
CANCEL = struct.pack(">I", 8)
LONGEST_FRAME = 16_384
RESETS = 20_000
# Pings whose answers are not read: their bytes are more than sockets hold.
PINGS = 1_000_000
# Bytes of headers in one list that never ends.
ENDLESS = 64 << 20
# Seconds of a whole attack.
WITHIN = 30.0
# Memory that one connection may take, in MB: a bound of its own buffers, and what an allocator keeps.
GROWTH_MB = 24


def frame(kind, flags, stream, payload=b""):
    return struct.pack(">I", len(payload))[1:] + bytes([kind, flags]) + struct.pack(">I", stream) + payload


def text(value):
    """A string of HPACK, as it is."""
    length = len(value)
    if length < 127:
        return bytes([length]) + value
    length -= 127
    octets = bytearray([127])
    while length >= 128:
        octets.append(length % 128 + 128)
        length //= 128
    return bytes(octets) + bytes([length]) + value


def block(method, path):
    """The headers of a request: method and scheme by their place in HPACK's table, the others spelled out."""
    return bytes([{"GET": 0x82, "POST": 0x83}[method], 0x86]) + b"\x04" + text(path.encode()) + b"\x01" + text(b"x")


class Line:
    """A connection of HTTP/2, and what the other side has said on it."""

    def __init__(self, reader, writer):
        self.reader, self.writer = reader, writer
        self.frames = {}
        self.goaway = None
        self.closed = asyncio.Event()
        self.reading = None

    @classmethod
    async def open(cls, port, reads=True):
        line = cls(*await asyncio.open_connection("127.0.0.1", port, limit=4_096))
        line.writer.write(PREFACE + frame(SETTINGS, 0, 0))
        if reads:
            line.reading = asyncio.create_task(line.read())
        return line

    async def read(self):
        with contextlib.suppress(OSError, EOFError):
            while True:
                head = await self.reader.readexactly(9)
                payload = await self.reader.readexactly(int.from_bytes(head[:3], "big"))
                self.frames[head[3]] = self.frames.get(head[3], 0) + 1
                if head[3] == GOAWAY:
                    self.goaway = int.from_bytes(payload[4:8], "big")
        self.closed.set()

    async def write(self, data, within=WITHIN):
        """Whether all of it could be written: false when the other side has hung up, or takes nothing any more."""
        try:
            self.writer.write(data)
            await asyncio.wait_for(self.writer.drain(), within)
        except (OSError, asyncio.TimeoutError):
            return False
        return not self.closed.is_set()

    async def end(self):
        self.writer.close()
        if self.reading is not None:
            self.reading.cancel()
            await asyncio.gather(self.reading, return_exceptions=True)

    def __str__(self):
        return f"GOAWAY {self.goaway}" if self.goaway is not None else "closed" if self.closed.is_set() else "left open"


async def rapid_reset(mesh):
    """Streams that are reset as soon as they are opened (CVE-2023-44487)."""
    node = mesh.victims[0]
    first = usage(node.process.pid)
    line = await Line.open(node.http)
    request = block("GET", "/mesh/nodes")
    sent, began = 0, time.monotonic()
    while sent < RESETS and time.monotonic() - began < WITHIN:
        streams = range(2 * sent + 1, 2 * (sent + 100), 2)
        burst = b"".join(frame(HEADERS, END_HEADERS | END_STREAM, stream, request) + frame(RST_STREAM, 0, stream, CANCEL)
                         for stream in streams)
        if not await line.write(burst):
            break
        sent += len(streams)
    await asyncio.wait({asyncio.ensure_future(line.closed.wait())}, timeout=SLACK)
    seen = f"{sent:,} of {RESETS:,} streams opened and reset, then {line}"
    await line.end()
    return judged(seen, node, first)


def judged(seen, node, first):
    grown = usage(node.process.pid).rss_mb - first.rss_mb
    faults = [f"one connection took {grown:.0f} MB"] if grown > GROWTH_MB else []
    return Seen(f"{seen}, {grown:+.0f} MB", faults)


async def endless_headers(mesh):
    """A list of headers that never ends (CONTINUATION flood), and one that is short on the wire and long when it is read."""
    node = mesh.victims[0]
    first = usage(node.process.pid)
    line = await Line.open(node.http)
    await line.write(frame(HEADERS, END_STREAM, 1, block("GET", "/health")))
    piece = (b"\x00" + text(b"x-a") + text(b"v" * 4_000)) * 4
    sent, began = 0, time.monotonic()
    while sent < ENDLESS and time.monotonic() - began < WITHIN:
        if not await line.write(frame(CONTINUATION, 0, 1, piece)):
            break
        sent += len(piece)
    await asyncio.wait({asyncio.ensure_future(line.closed.wait())}, timeout=SLACK)
    flood = f"CONTINUATION: {line} after {sent / 2**20:.1f} MB"
    faults = [f"{sent >> 20} MB of one list of headers were taken"] if sent >= ENDLESS else []
    await line.end()
    line = await Line.open(node.http)
    # Put into the table once, then named 10,000 times by one byte each.
    bomb = block("GET", "/health") + b"\x40" + text(b"x-b") + text(b"v" * 3_000) + b"\xbe" * 10_000
    await line.write(frame(HEADERS, END_HEADERS | END_STREAM, 1, bomb))
    await asyncio.wait({asyncio.ensure_future(line.closed.wait())}, timeout=SLACK)
    named = {HEADERS: "an answer", RST_STREAM: "a reset", GOAWAY: "GOAWAY"}
    answers = [name for kind, name in named.items() if kind in line.frames]
    await line.end()
    seen = judged(f"{flood}; 30 MB in {len(bomb) >> 10} KB of HPACK: {' and '.join(answers) or line}", node, first)
    return Seen(seen.observed, seen.faults + faults)


async def idle_pings(mesh):
    """Connections that only ping: one that reads the answers, one that does not."""
    node = mesh.victims[0]
    first = usage(node.process.pid)
    polite = await Line.open(node.http)
    began = time.monotonic()

    async def condition():
        await polite.write(frame(PING, 0, 0, bytes(8)))
        return polite.closed.is_set(), f"{polite} after {time.monotonic() - began:.0f} s"

    faults = []
    try:
        took = await mesh.nodes.until("a pinging connection closed", HEADER_TIMEOUT + SLACK, began, condition)
        told = f"one ping at a time: {polite} after {took:.1f} s"
    except Failure as failure:
        told = f"one ping at a time: {polite}"
        faults.append(str(failure))
    await polite.end()
    rude = await Line.open(node.http, reads=False)
    burst = frame(PING, 0, 0, bytes(8)) * 1_000
    sent, began = 0, time.monotonic()
    while sent < PINGS and await rude.write(burst, within=SLACK):
        sent += 1_000
    seen = judged(f"{told}; answers not read: {sent:,} pings taken in {time.monotonic() - began:.1f} s", node, first)
    await rude.end()
    return Seen(seen.observed, seen.faults + faults)
