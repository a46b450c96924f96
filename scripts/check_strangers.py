"""Attacks a mesh of two nodes from outside, and tells for each threat what was observed.

Run by check-strangers.sh, which gets the binary and a QUIC client ready. Real processes with a simulated engine on loopback.
Meanwhile well-behaved clients stream through both nodes (stranger_guest.py): they must see no error, no other view and no gap
above two seconds. Afterwards both nodes must live, see each other and hold no more memory, threads and files than before. Then the
cluster key is changed under load, node by node.

The last line is `PASS strangers: figures` or `FAIL strangers: figures`.
"""

import argparse
import asyncio
import time

import stranger_alone
import stranger_gossip
import stranger_http
import stranger_http2
from mesh_nodes import Failure, conclude, note
from process_usage import raise_file_limit
from stranger_mesh import READY_WITHIN, Mesh, Seen, StrangeNodes

try:
    import stranger_quic
except ImportError:
    stranger_quic = None

# Before the first attack, so that what a process holds is what it needs.
WARM_STREAMS = 20
STREAMS_WITHIN = 120
EXIT_WITHIN = 40
# Tests of what needs a member's key to try.
QUIC_TESTS = "node/src/mesh/stream/tests/wire.rs, node/src/mesh/bulk/tests.rs, node/src/mesh/control/tests.rs"
FRAME_TESTS = "node/src/mesh/stream/tests/wire.rs, node/src/mesh/control/tests/wire.rs, node/src/mesh/codec/tests.rs"


async def begin(nodes):
    """Two nodes; the second finds the first through a forwarder that keeps copies of their gossip."""
    nodes.options = ["--header-timeout-ms", str(round(stranger_http.HEADER_TIMEOUT * 1000))]
    first = nodes.start("node1", [])
    gossip, seed = await stranger_gossip.forward(first.mesh)
    nodes.start("node2", [seed])
    await nodes.wait_until_ready(nodes.all(), READY_WITHIN)
    return gossip


async def gossip_rows(mesh, gossip, options):
    wrong = mesh.nodes.new_key("wrong")
    await mesh.row("a node without a key", stranger_gossip.strange_node(mesh, "keyless", None))
    await mesh.row("a node with another key", stranger_gossip.strange_node(mesh, "wrong", wrong))
    captured = await stranger_gossip.capture(gossip, mesh)
    taken = time.monotonic()
    await mesh.row("captured gossip, again at once", stranger_gossip.replay(mesh, captured, "replayed"))
    await mesh.row("captured gossip, to its own sender and damaged", stranger_gossip.reflect(mesh, captured))
    await mesh.row("a flood of junk datagrams", stranger_gossip.flood(mesh, options.datagrams))
    return captured, taken


async def http_rows(mesh, options, most):
    await mesh.row("slow loris", stranger_http.lorises(mesh))
    await mesh.row("a crowd of connections", stranger_http.crowd(mesh, options.connections, min(options.at_once, most - 1_000)))
    await mesh.row("floods of headers", stranger_http.headers(mesh))
    await mesh.row("bodies too long, compressed, of another type", stranger_http.long_bodies(mesh))
    await mesh.row("JSON bombs", stranger_http.json_bombs(mesh))
    await mesh.row("large bodies held open", stranger_http.held_bodies(mesh))
    await mesh.row("smuggled requests", stranger_http.smuggling(mesh))
    await mesh.row("answers that nobody reads", stranger_http.unread(mesh))
    await mesh.row("HTTP/2: rapid reset", stranger_http2.rapid_reset(mesh))
    await mesh.row("HTTP/2: headers without end", stranger_http2.endless_headers(mesh))
    await mesh.row("HTTP/2: nothing but pings", stranger_http2.idle_pings(mesh))


async def quic_rows(mesh, options):
    mesh.refer("junk and floods of frames from a member", FRAME_TESTS)
    if stranger_quic is None:
        mesh.refer("QUIC connections of no member", f"no QUIC client at hand: {QUIC_TESTS}")
        return
    await mesh.row("QUIC: no member, stolen and forged certificates", stranger_quic.identities(mesh))
    await mesh.row("QUIC: a flood of first packets", stranger_quic.first_packets(mesh, options.handshakes))
    await mesh.row("QUIC: handshakes held half open", stranger_quic.sieges(mesh))


async def alone_rows(mesh):
    await mesh.row("API: no key, wrong keys", stranger_alone.api_keys(mesh))
    await mesh.row("API: clients that would operate", stranger_alone.operators(mesh))
    await mesh.row("API: a web page of somebody else", stranger_alone.web_page(mesh))
    await mesh.row("more connections than files", stranger_alone.few_files(mesh))


async def attacks(mesh, gossip, options, most):
    """All rows but the change of the key; what a node holds before and after."""
    await warm(mesh)
    before = mesh.usages()
    # As long as a body may take: beside all others.
    halves = asyncio.create_task(stranger_http.half_bodies(mesh))
    try:
        captured, taken = await gossip_rows(mesh, gossip, options)
        await quic_rows(mesh, options)
        await http_rows(mesh, options, most)
        await alone_rows(mesh)
        await mesh.row("half a body, then silence", halves)
    finally:
        halves.cancel()
        await asyncio.gather(halves, return_exceptions=True)
    await asyncio.sleep(max(0.0, taken + stranger_gossip.STALE_AFTER - time.monotonic()))
    await mesh.row("captured gossip, half a minute later", stranger_gossip.replay(mesh, captured, "stale"))
    said, grown = await mesh.calm(before)
    mesh.faults += grown
    return said


async def warm(mesh):
    async def condition():
        nonlocal streams
        streams += (await mesh.guests.mark())["streams"]
        return streams >= WARM_STREAMS, f"{streams} streams"

    streams = 0
    await mesh.nodes.until("the well-behaved clients served", STREAMS_WITHIN, time.monotonic(), condition)


async def rotation(mesh):
    """A new cluster key, node by node, each restarted in order while clients use the other one."""
    nodes, old, new = mesh.nodes, mesh.nodes.key, mesh.nodes.new_key("new")
    stages = [("old, new accepted", (old, [new])), ("new, old accepted", (new, [old])), ("new alone", (new, []))]
    told, faults = [], []
    for name, ring in stages:
        began = time.monotonic()
        for node in mesh.victims:
            other = next(one for one in mesh.victims if one is not node)
            await mesh.guests.use([other.http])
            node.process.terminate()
            code = await asyncio.to_thread(node.process.wait, EXIT_WITHIN)
            if code:
                faults.append(f"{node.name} ended with {code}")
            nodes.rings[node.name] = ring
            nodes.restart(node)
            await nodes.wait_until_ready(mesh.victims, READY_WITHIN)
        told.append(f"{name} {time.monotonic() - began:.0f} s")
    await mesh.guests.use([node.http for node in mesh.victims])
    return Seen(f"both see each other ready after each of six restarts; {', '.join(told)}", faults)


async def change_key(mesh):
    old = mesh.nodes.key
    try:
        seen = await rotation(mesh)
    except (Failure, OSError, asyncio.TimeoutError) as error:
        seen = Seen("not carried out", [f"{type(error).__name__} {error}"])
    # Views change when nodes restart; who is in them must not.
    told = await mesh.guests.mark()
    ids = {node.id for node in mesh.victims}
    strange = {row.partition("/")[0] for view in told["views"] for row in view.split()} - ids
    faults = seen.faults + [f"{one} was in a view" for one in strange]
    mesh.judge("a new cluster key, under load", Seen(seen.observed, faults), told, views=False)
    await mesh.learn()
    await mesh.row("a node with the old key afterwards", stranger_gossip.strange_node(mesh, "late", old))


def table(rows):
    """The threat table, a row a line."""
    widths = [max(len(row[column]) for row in rows) for column in (0, 2)]
    for threat, observed, verdict in rows:
        note(f"{verdict:{widths[1]}} | {threat:{widths[0]}} | {observed}")


def panics(nodes):
    marks = (" ERROR ", "panicked at")
    return [f"log of {log.parent.name}: {line}" for log in sorted(nodes.folder.glob("*/log"))
            for line in log.read_text(errors="replace").splitlines() if any(mark in line for mark in marks)]


async def check(options, folder):
    most = raise_file_limit()
    nodes = StrangeNodes(options.binary, folder)
    mesh, said, complaints = Mesh(nodes), "", []
    try:
        gossip = await begin(nodes)
        await mesh.watch()
        said = await attacks(mesh, gossip, options, most)
        await change_key(mesh)
    except (Failure, OSError, asyncio.TimeoutError) as failure:
        complaints.append(f"{type(failure).__name__}: {failure}")
    finally:
        if mesh.guests is not None:
            await mesh.guests.end()
        await nodes.stop_all()
    table(mesh.rows)
    held = sum(verdict != "FAILED" for _, _, verdict in mesh.rows)
    figures = [
        f"{held} of {len(mesh.rows)} rows held", f"well-behaved clients: {mesh.streams} streams, {mesh.errors} errors, longest gap "
        f"{mesh.gap:.2f} s", f"before and after: {said}",
    ]
    return figures, mesh.faults + complaints + panics(nodes)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--binary", required=True, help="the shoal binary")
    parser.add_argument("--datagrams", type=int, default=20_000, help="junk datagrams to each of four ports")
    parser.add_argument("--connections", type=int, default=100_000, help="idle connections that are opened")
    parser.add_argument("--at-once", type=int, default=5_000, help="of them at a time, as far as the file limit goes")
    parser.add_argument("--handshakes", type=int, default=5_000, help="QUIC handshakes begun at each of four ports")
    parser.add_argument("--keep-logs", action="store_true", help="keep the nodes' folders even if all is well")
    conclude("strangers", parser.parse_args(), check)


if __name__ == "__main__":
    main()
