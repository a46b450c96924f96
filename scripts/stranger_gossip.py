"""Strangers at the state plane: nodes without the key, replayed and damaged datagrams, floods of junk on both UDP ports."""

import asyncio
import os
import random
import socket
import time

from mesh_nodes import Failure, counted
from stranger_mesh import MODEL, Seen

# Datagrams that a stranger's node must have had dropped before its failure counts as one.
KNOCKS = 10
KNOCKS_WITHIN = 30
# Captured datagrams to wait for each way, of the last seconds, and how often each is sent again.
CAPTURED, FRESH = 8, 15
CAPTURED_WITHIN = 60
TIMES = 40
# Seconds after which a captured datagram is stale (gossip/src/seal.rs), and one for the cut to whole seconds.
STALE_AFTER = 32
LONGEST = 1_400
# Datagrams between two rests of so many seconds: most of a flood finds room in the node's buffers, and nearly all replays do.
FLOOD, REPLAYS = (64, 0.002), (8, 0.005)
# Share of the replays that must be counted as such; the others found no room.
COUNTED = 0.9


class Forwarder(asyncio.DatagramProtocol):
    """A place on the way between two nodes: passes on what comes to its port, both ways, and keeps a copy."""

    def __init__(self, target):
        self.target = target
        self.asker = None
        self.kept = []
        self.transport = None

    def connection_made(self, transport):
        self.transport = transport

    def datagram_received(self, datagram, source):
        there = source == self.target
        if not there:
            self.asker = source
        to = self.asker if there else self.target
        if to is not None:
            self.transport.sendto(datagram, to)
        # Sealed gossip has QUIC's bit clear.
        if datagram and not datagram[0] & 0x40:
            self.kept.append((time.monotonic(), self.asker if there else self.target, datagram))

    def error_received(self, error):
        """A node that has ended; the other one tries again."""


async def forward(target):
    """Forwards to this control port and the port after it, where gossip is; the forwarder of gossip, and its seed address."""
    loop = asyncio.get_running_loop()
    for _ in range(50):
        first = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        second = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        first.bind(("127.0.0.1", 0))
        port = first.getsockname()[1]
        try:
            second.bind(("127.0.0.1", port + 1))
        except (OSError, OverflowError):
            first.close()
            second.close()
            continue
        await loop.create_datagram_endpoint(lambda: Forwarder(("127.0.0.1", target)), sock=first)
        _, gossip = await loop.create_datagram_endpoint(lambda: Forwarder(("127.0.0.1", target + 1)), sock=second)
        return gossip, f"127.0.0.1:{port}"
    raise Failure("no two free ports in a row for a forwarder")


async def more_dropped(nodes, node, before, reasons, least):
    """Until the node has dropped that many more datagrams for these reasons; how many of each."""
    grown = {}

    async def condition():
        nonlocal grown
        now = await nodes.dropped(node)
        grown = {reason: now[reason] - before.get(reason, 0) for reason in now if now[reason] != before.get(reason, 0)}
        return sum(grown.get(reason, 0) for reason in reasons) >= least, grown

    await nodes.until(f"{least:.0f} datagrams dropped at {node.name} as {reasons}", KNOCKS_WITHIN, time.monotonic(), condition)
    return grown


def words(grown):
    return ", ".join(f"{count:,} as {reason}" for reason, count in sorted(grown.items())) or "none"


async def strange_node(mesh, name, key):
    """A real node with this key, or none, that has the victims as its seeds."""
    nodes = mesh.nodes
    before = [await nodes.dropped(node) for node in mesh.victims]
    seeds = [f"127.0.0.1:{node.mesh}" for node in mesh.victims]
    flags = ["--cluster-key-file", str(key)] if key else []
    stranger = nodes.alone(name, "--model-id", f"{MODEL}-of-another", *flags, seeds=seeds)
    try:
        await nodes.started(stranger)
        reasons = ["wrong_key"] if key else ["keyless"]
        grown = [await more_dropped(nodes, node, first, reasons, KNOCKS) for node, first in zip(mesh.victims, before)]
        view = await nodes.view(stranger)
        counters = await nodes.counters(stranger) or {}
        heard = int(counted(counters, "shoal_gossip_datagrams_total", 'direction="received"'))
        status = await asyncio.to_thread(ask_for_tokens, stranger.http)
    finally:
        await nodes.end(stranger)
    faults = []
    if view is None or len(view["nodes"]) != 1:
        faults.append(f"the stranger sees {view and len(view['nodes'])} nodes")
    if heard:
        faults.append(f"{heard} datagrams were sent to it")
    if status != 404:
        faults.append(f"asked for the mesh's model it answered {status}")
    sent = " and ".join(words(one) for one in grown)
    return Seen(f"it sees itself only, heard {heard} datagrams, has 404 for the mesh's model; the nodes dropped {sent}", faults)


def ask_for_tokens(port):
    """The status of a request for the mesh's model."""
    body = f'{{"model":"{MODEL}","prompt":"x","max_tokens":1}}'
    with socket.create_connection(("127.0.0.1", port), timeout=10) as client:
        head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: {len(body)}\r\n\r\n"
        client.sendall((head + body).encode())
        return int(client.makefile("rb").readline().split()[1])


async def capture(gossip, mesh):
    """Waits for captured datagrams in both directions that are not stale yet; those for each victim."""

    def kept(node):
        since = time.monotonic() - FRESH
        return [datagram for moment, to, datagram in gossip.kept if to == ("127.0.0.1", node.mesh + 1) and moment > since]

    async def condition():
        counts = [len(kept(node)) for node in mesh.victims]
        return min(counts) >= CAPTURED, f"{counts} captured in the last {FRESH} s"

    await mesh.nodes.until(f"{CAPTURED} captured datagrams each way", CAPTURED_WITHIN, time.monotonic(), condition)
    return {node.name: kept(node) for node in mesh.victims}


def send_all(datagrams, ports, times=1, pace=FLOOD):
    """Sends each so many times to each port on loopback; how many were sent, and the bytes sent and answered."""
    burst, rest = pace
    sent = out = back = 0
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as flood:
        flood.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4 << 20)
        flood.bind(("127.0.0.1", 0))
        flood.setblocking(False)
        for _ in range(times):
            for datagram in datagrams:
                for port in ports:
                    try:
                        flood.sendto(datagram, ("127.0.0.1", port))
                    except BlockingIOError:
                        continue
                    sent += 1
                    out += len(datagram)
                    if sent % burst == 0:
                        back += heard(flood)
                        time.sleep(rest)
        time.sleep(0.5)
        back += heard(flood)
    return sent, out, back


def heard(flood):
    """Bytes that wait in a socket."""
    bytes_heard = 0
    while True:
        try:
            bytes_heard += len(flood.recv(65_536))
        except OSError:
            return bytes_heard


async def replay(mesh, captured, reason):
    """Sends captured datagrams again to where they went, and to the other node, whose own they are."""
    nodes, told, faults = mesh.nodes, [], []
    for node in mesh.victims:
        before = await nodes.dropped(node)
        datagrams = captured[node.name]
        sent, _, back = await asyncio.to_thread(send_all, datagrams, [node.mesh + 1], TIMES, REPLAYS)
        grown = await more_dropped(nodes, node, before, [reason], COUNTED * sent)
        told.append(f"{sent} to {node.name}, dropped {words(grown)}")
        if back:
            faults.append(f"{node.name} answered replayed datagrams with {back} bytes")
    return Seen("; ".join(told), faults)


async def reflect(mesh, captured):
    """Sends each node the datagrams that it has sealed itself, and those with one bit flipped."""
    nodes, told = mesh.nodes, []
    first, second = mesh.victims
    dice = random.Random(1)
    for node, other in ((first, second), (second, first)):
        own = captured[other.name]
        before = await nodes.dropped(node)
        sent, out, back = await asyncio.to_thread(send_all, own, [node.mesh + 1], TIMES, REPLAYS)
        damaged = [flipped(datagram, dice) for datagram in captured[node.name]]
        hurt, _, _ = await asyncio.to_thread(send_all, damaged, [node.mesh + 1], TIMES, REPLAYS)
        grown = await more_dropped(nodes, node, before, ["wrong_key", "replayed", "stale", "version", "keyless"],
                                   COUNTED * (sent - len(own) + hurt))
        told.append(f"{node.name}: {sent} of its own with {out:,} bytes, answered with {back:,}, and {hurt} damaged; dropped "
                    f"{words(grown)}")
    return Seen("; ".join(told), [])


def flipped(datagram, dice):
    bit = dice.randrange(len(datagram) * 8)
    damaged = bytearray(datagram)
    damaged[bit // 8] ^= 1 << bit % 8
    return bytes(damaged)


def junk(dice):
    """A datagram that no node would send."""
    kind = dice.randrange(6)
    body = os.urandom(dice.randrange(LONGEST))
    if kind == 0:
        return b""
    if kind == 1:
        return body
    if kind == 2:
        # An initial packet of QUIC version 1, padded as the first of a connection must be; its content is noise.
        ids = bytes([8]) + os.urandom(8) + bytes([8]) + os.urandom(8)
        return b"\xc3\x00\x00\x00\x01" + ids + b"\x00\x44\x96" + os.urandom(1_174)
    if kind == 3:
        # Of a version that nobody speaks.
        return b"\xc0\x1a\x2a\x3a\x4a\x08" + os.urandom(8) + b"\x08" + os.urandom(1_200)
    if kind == 4:
        # As of a connection that the node has forgotten.
        return b"\x40" + body
    # As sealed by somebody, and open.
    return dice.choice([b"\x01", b"\x02"]) + body


async def flood(mesh, count):
    """Junk on both UDP ports of both nodes."""
    nodes, dice = mesh.nodes, random.Random(2)
    before = [await nodes.dropped(node) for node in mesh.victims]
    datagrams = [junk(dice) for _ in range(count)]
    ports = [node.mesh + plane for node in mesh.victims for plane in (0, 1)]
    began = time.monotonic()
    sent, out, back = await asyncio.to_thread(send_all, datagrams, ports)
    took = time.monotonic() - began
    told = []
    for node, first in zip(mesh.victims, before):
        grown = await more_dropped(nodes, node, first, ["wrong_key", "keyless", "version", "truncated"], 1)
        told.append(f"{node.name} dropped {words(grown)}")
    faults = [f"{back:,} bytes of answers to {out:,} bytes of junk"] if back > out else []
    rate = f"{sent / took:,.0f} a second"
    return Seen(f"{sent:,} datagrams on four ports, {rate}, {out:,} bytes, answered with {back:,}; {'; '.join(told)}", faults)
