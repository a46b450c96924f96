"""Strangers at the QUIC ports, control plane and streams: identities that no record names, stolen and forged certificates, and
handshakes that are never finished. Needs aioquic.

Nodes prove who they are with libp2p's certificate: self-signed for a key of the moment, with the node's public key and its
signature of that key in an extension (https://github.com/libp2p/specs/blob/master/tls/tls.md).
"""

import asyncio
import contextlib
import datetime
import socket
import ssl
import time
from pathlib import Path

from aioquic.asyncio.protocol import QuicConnectionProtocol
from aioquic.quic.configuration import QuicConfiguration
from aioquic.quic.connection import QuicConnection
from aioquic.quic.events import ConnectionTerminated, HandshakeCompleted, StreamDataReceived
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519

from mesh_nodes import Failure
from stranger_mesh import Seen

EXTENSION = x509.ObjectIdentifier("1.3.6.1.4.1.53594.1.1")
SIGNED = b"libp2p-tls-handshake:"
STREAM, BULK, CONTROL = "shoal/stream/1", "shoal/bulk/1", "libp2p"
# What libp2p's peers say first on a stream (multistream-select).
HELLO = b"\x13/multistream/1.0.0\n"
# Seconds until a connection that nobody greets or closes counts as open.
WITHIN = 8.0
# Where strangers come from who are not on a member's host: another address of this machine, that no record names. Members have
# places for handshakes of their own, told by their address; one that shares it shares those of its host
# (node/src/mesh/stream/tests/wire.rs has members that dial from their own port).
ELSEWHERE = "127.0.0.2"
# First packets between two looks at what came back, and the seconds of a rest.
BURST, REST = 16, 0.001
# Handshakes that are held half open one after the other, and how many are begun a second at most.
SIEGE, SIEGE_RATE = 4_000, 400
# Share of a member's tries that have to be let in meanwhile.
LET_IN = 0.9
# Seconds until a member has to be let in after a flood, and until it is given up.
PATIENCE, GREETED_WITHIN = 5.0, 20.0
# Memory that handshakes at their bound may take, in MB: 224 at a time on each plane, 100 KB each, and what an allocator keeps.
GROWTH_MB = 64
# What an unproven address may be sent for each byte it sent (RFC 9000, 8.1).
AMPLIFICATION = 3


def sequence(*parts):
    """DER of a sequence of octet strings, short ones."""
    body = b"".join(b"\x04" + length(part) + part for part in parts)
    return b"\x30" + length(body) + body


def length(part):
    size = len(part)
    return bytes([size]) if size < 128 else bytes([0x81, size])


def certificate(name, signer):
    """A certificate in the name of this public key, signed by that node's key; with its private key."""
    moment = ec.generate_private_key(ec.SECP256R1())
    public = moment.public_key().public_bytes(serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo)
    # Protobuf: type Ed25519, then 32 bytes.
    identity = b"\x08\x01\x12\x20" + name.public_bytes_raw()
    value = sequence(identity, signer.sign(SIGNED + public))
    subject = x509.Name([])
    now = datetime.datetime.now(datetime.timezone.utc)
    builder = x509.CertificateBuilder(subject, subject, moment.public_key(), x509.random_serial_number(),
                                      now - datetime.timedelta(days=1), now + datetime.timedelta(days=1))
    builder = builder.add_extension(x509.UnrecognizedExtension(EXTENSION, value), critical=True)
    return builder.sign(moment, hashes.SHA256()), moment


class Caller(QuicConnectionProtocol):
    """One connection, and how far it got."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.shaken = self.heard = False
        self.ended = None
        self.news = asyncio.Event()

    def quic_event_received(self, event):
        if isinstance(event, HandshakeCompleted):
            self.shaken = True
            self.ask()
        elif isinstance(event, StreamDataReceived) and event.data:
            self.heard = True
            self.news.set()
        elif isinstance(event, ConnectionTerminated):
            self.ended = f"closed with {event.error_code:#x} {event.reason_phrase}".strip()
            self.news.set()

    def ask(self):
        """Asks for something: a greeting comes by itself, a libp2p peer answers a hello."""
        stream = self._quic.get_next_available_stream_id()
        self._quic.send_stream_data(stream, HELLO)
        self.transmit()


async def call(port, alpn, proof):
    """Connects with a certificate and its key, or without; whether something was said to us, words, and what the node presented."""
    configuration = QuicConfiguration(alpn_protocols=[alpn], verify_mode=ssl.CERT_NONE, idle_timeout=WITHIN)
    if proof:
        configuration.certificate, configuration.private_key = proof
    opening = asyncio.get_running_loop().create_datagram_endpoint(
        lambda: Caller(QuicConnection(configuration=configuration)), local_addr=("127.0.0.1", 0))
    transport, caller = await opening
    caller.connect(("127.0.0.1", port))
    with contextlib.suppress(asyncio.TimeoutError):
        await asyncio.wait_for(caller.news.wait(), WITHIN)
    presented = caller._quic.tls._peer_certificate
    words = "greeted" if caller.heard else caller.ended or ("connected and left alone" if caller.shaken else "no answer")
    caller.close()
    transport.close()
    return caller.heard, words, presented


def identity_of(node):
    """The key of a node, from its data directory."""
    secret = Path(node.folder / "data" / "identity.key").read_bytes()
    return ed25519.Ed25519PrivateKey.from_private_bytes(secret)


async def identities(mesh):
    """Certificates that should not be let in, on all three protocols; and one that should, so that the others prove something."""
    first, second = mesh.victims
    member, stranger = identity_of(second), ed25519.Ed25519PrivateKey.generate()
    doors = [(first.mesh, CONTROL), (first.mesh + 1, STREAM), (first.mesh + 1, BULK)]
    _, _, shown = await call(second.mesh + 1, STREAM, None)
    if shown is None:
        raise Failure(f"{second.name} presents no certificate")
    keys = {
        "an identity that no record names": certificate(stranger.public_key(), stranger),
        "no certificate": None,
        f"the certificate of {second.name} without its key": (shown, ec.generate_private_key(ec.SECP256R1())),
        f"a forged one in the name of {second.name}": certificate(member.public_key(), stranger),
    }
    told, faults = [], []
    for name, proof in keys.items():
        seen = [(alpn, *(await call(port, alpn, proof))[:2]) for port, alpn in doors]
        told.append(f"{name}: {', '.join(f'{alpn} {words}' for alpn, _, words in seen)}")
        faults += [f"{name} was let in by {alpn}" for alpn, heard, _ in seen if heard]
    heard, words, _ = await call(first.mesh + 1, "shoal/other/1", certificate(member.public_key(), member))
    told.append(f"another protocol: {words}")
    faults += ["another protocol was let in"] if heard else []
    for port, alpn in doors:
        heard, words, _ = await call(port, alpn, certificate(member.public_key(), member))
        if not heard:
            faults.append(f"the identity of {second.name} itself: {alpn} {words}; the other answers prove nothing")
    return Seen("; ".join(told), faults)


def opening(alpn):
    """A client of a connection that is begun, and its first datagrams."""
    client = QuicConnection(configuration=QuicConfiguration(alpn_protocols=[alpn], verify_mode=ssl.CERT_NONE))
    client.connect(("127.0.0.1", 1), now=time.monotonic())
    return client, [datagram for datagram, _ in client.datagrams_to_send(now=time.monotonic())]


def doors(mesh):
    """Every UDP port of the mesh, with a protocol that is spoken there."""
    return [(node.mesh + plane, (CONTROL, STREAM)[plane]) for node in mesh.victims for plane in (0, 1)]


@contextlib.contextmanager
def attacker(address="127.0.0.1"):
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as flood:
        flood.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4 << 20)
        flood.bind((address, 0))
        flood.setblocking(False)
        yield flood


def send(flood, datagram, port):
    with contextlib.suppress(BlockingIOError):
        flood.sendto(datagram, ("127.0.0.1", port))
    return len(datagram)


def packets(flood):
    """What has come back, packet by packet, with its kind (RFC 9000, 17.2)."""
    while True:
        try:
            packet = flood.recv(65_536)
        except OSError:
            return
        first = packet[0] if packet else 0
        yield packet, ("retry" if first >> 4 & 3 == 3 else "handshake") if first & 0x80 else "short"


class Blast:
    """First packets as fast as they can be sent, each of another connection; nothing is ever answered."""

    def __init__(self, ports, count):
        self.ports = ports
        ready = {alpn: [opening(alpn)[1] for _ in range(count)] for _, alpn in ports}
        self.ready = [[(datagram, port) for datagrams in ready[alpn] for datagram in datagrams] for port, alpn in ports]
        self.kinds, self.out, self.back, self.took = {}, 0, 0, 0.0

    def run(self):
        with attacker() as flood:
            began = time.monotonic()
            for number, together in enumerate(zip(*self.ready)):
                self.out += sum(send(flood, datagram, port) for datagram, port in together)
                if number % BURST == 0:
                    self.look(flood)
                    time.sleep(REST)
            self.took = time.monotonic() - began
            # The last answers are repeated for a while.
            time.sleep(1.0)
            self.look(flood)

    def look(self, flood):
        for packet, kind in packets(flood):
            self.back += len(packet)
            self.kinds[kind] = self.kinds.get(kind, 0) + 1


async def first_packets(mesh, count):
    """A flood of true first packets at all ports, from an address that answers nothing."""
    before = mesh.usages()
    blast = await asyncio.to_thread(Blast, doors(mesh), count)
    running = asyncio.create_task(asyncio.to_thread(blast.run))
    most = [one.rss_mb for one in before]
    while not running.done():
        await asyncio.wait({running}, timeout=0.1)
        most = [max(peak, one.rss_mb) for peak, one in zip(most, mesh.usages())]
    await running
    grown = max(peak - one.rss_mb for peak, one in zip(most, before))
    waited = [await until_greeted(mesh, *door) for door in doors(mesh)[:2]]
    faults = []
    if grown > GROWTH_MB:
        faults.append(f"a node grew by {grown:.0f} MB in {blast.took:.1f} s")
    if blast.back > AMPLIFICATION * blast.out:
        faults.append(f"{blast.back:,} bytes of answers to {blast.out:,} bytes")
    if max(waited) > PATIENCE:
        faults.append(f"a member was let in {max(waited):.1f} s afterwards only")
    answers = ", ".join(f"{number:,} {kind}" for kind, number in sorted(blast.kinds.items())) or "no"
    return Seen(f"{count:,} at each of four ports in {blast.took:.1f} s: {answers} packets back, {blast.back / blast.out:.2f} bytes a "
                f"byte, {grown:+.0f} MB at most; a member was let in {waited[0]:.1f} s (control) and {waited[1]:.1f} s (streams) "
                f"afterwards", faults)


async def until_greeted(mesh, port, alpn):
    """Seconds until the second node's identity is greeted."""
    began = time.monotonic()
    member = identity_of(mesh.victims[1])
    proof = certificate(member.public_key(), member)
    while time.monotonic() - began < GREETED_WITHIN:
        if (await call(port, alpn, proof))[0]:
            break
    return time.monotonic() - began


class Siege:
    """Handshakes that are begun all the time, prove their address where they are asked to, and are never finished."""

    def __init__(self, door):
        self.port, alpn = door
        self.clients = [opening(alpn) for _ in range(SIEGE)]
        self.over = False
        self.begun = self.proven = 0

    def run(self):
        waiting = {}
        with attacker(ELSEWHERE) as flood:
            for client, datagrams in self.clients:
                if self.over:
                    return
                waiting[client.host_cid] = client
                self.begun += 1
                for datagram in datagrams:
                    send(flood, datagram, self.port)
                time.sleep(1 / SIEGE_RATE)
                for packet, kind in packets(flood):
                    # A long header has the receiver's connection id behind its length.
                    client = waiting.pop(packet[6:6 + packet[5]], None) if kind == "retry" else None
                    if client is not None:
                        self.prove(flood, client, packet)

    def prove(self, flood, client, packet):
        client.receive_datagram(packet, ("127.0.0.1", 1), now=time.monotonic())
        for datagram, _ in client.datagrams_to_send(now=time.monotonic()):
            send(flood, datagram, self.port)
        self.proven += 1


async def siege(mesh, door, name):
    """Handshakes held half open at one port, while a member connects again and again."""
    siege = await asyncio.to_thread(Siege, door)
    member = identity_of(mesh.victims[1])
    proof = certificate(member.public_key(), member)
    running = asyncio.create_task(asyncio.to_thread(siege.run))
    tries, let_in, longest = 0, 0, 0.0
    began = last = time.monotonic()
    try:
        while not running.done():
            heard = (await call(*door, proof))[0]
            now = time.monotonic()
            tries, let_in = tries + 1, let_in + heard
            longest = max(longest, now - last)
            if heard:
                last = now
            await asyncio.wait({running}, timeout=0.1)
        took = time.monotonic() - began
    finally:
        siege.over = True
        await running
    rate, faults = siege.begun / took, []
    if let_in < LET_IN * tries:
        faults.append(f"{name}: a stranger with {rate:.0f} packets a second shut a member out at {tries - let_in} of {tries} tries")
    return Seen(f"{name}: {rate:.0f} a second for {took:.0f} s, {siege.proven:,} proved their address; a member was let in at {let_in} of "
                f"{tries} tries, shut out for {longest:.1f} s at most", faults)


async def sieges(mesh):
    seen = [await siege(mesh, door, name) for door, name in zip(doors(mesh), ("control", "streams"))]
    return Seen("; ".join(one.observed for one in seen), [fault for one in seen for fault in one.faults])
