"""Strangers at nodes of their own: API keys, the web page of somebody else, more connections than a node may have files.

What may end a node is tried on one that nobody else needs.
"""

import asyncio
import contextlib

from process_usage import usage
from stranger_http import HEADER_TIMEOUT, SLACK, get, post, served_again, talk, with_prompt
from stranger_mesh import MODEL, Place, Seen, own_address

KEY, OPERATOR = "sk-of-a-guest", "op-of-a-guest"
# Paths that clients without a key may ask: they tell whether the node is well.
OPEN = ["/health", "/liveness", "/readiness", "/ping"]
GUARDED = [
    ("GET", "/metrics"), ("GET", "/mesh/nodes"), ("GET", "/mesh/requests"), ("POST", "/mesh/requests/1-1/migrate"),
    ("POST", "/mesh/drain"), ("GET", "/v1/models"), ("GET", "/version"), ("POST", "/v1/completions"),
    ("POST", "/v1/chat/completions"), ("POST", "/generate"), ("POST", "/any/other"),
    # As a careless comparison of paths would let through.
    ("GET", "//mesh/nodes"), ("GET", "/mesh/nodes/"), ("GET", "/health/../mesh/nodes"), ("GET", "/%6desh/nodes"),
    ("GET", "/MESH/NODES"), ("GET", "http://x/mesh/nodes"), ("GET", "/mesh/nodes?/health"), ("HEAD", "/metrics"),
    ("OPTIONS", "/mesh/drain"), ("GET", "/metrics;/health"),
]
WRONG = [
    (), ("authorization: Bearer wrong",), ("authorization: Basic c2stb2YtYS1ndWVzdA==",), (f"authorization: {KEY}",),
    ("authorization: Bearer ",), ("x-api-key: ",), (f"x-api-key: {KEY}x",), (f"x-api-key: {KEY[:-1]}",), (f"cookie: key={KEY}",),
    (f"authorization: Bearer wrong\r\nx-api-key: {KEY}",),
]
# Open files of the node that is to run out of them, and connections that come to it.
FILES = 512
CROWD, CROWD_CONNECT = 1_500, 5
# Lines about it in the log that somebody may still want to read.
WARNINGS = 20


def ask(method, path, headers=()):
    lines = [f"{method} {path} HTTP/1.1", "host: x", "content-length: 0", "connection: close", *headers]
    return "\r\n".join(lines).encode() + b"\r\n\r\n"


async def api_keys(mesh):
    """A node with --api-key-file, asked without a key and with wrong ones."""
    nodes = mesh.nodes
    keys = nodes.folder / "api.keys"
    keys.write_text(f"# guests\n{KEY}\n")
    node = nodes.alone("guarded", "--model-id", MODEL, "--api-key-file", str(keys))
    try:
        await nodes.started(node)
        faults = []
        for headers in WRONG:
            asked = [(method, path, await talk(node.http, ask(method, path, headers))) for method, path in GUARDED]
            faults += [f"{method} {path} with {headers or 'no key'}: {one}" for method, path, one in asked if one.statuses != [401]]
        for path in OPEN:
            if (one := await talk(node.http, ask("GET", path))).statuses != [200]:
                faults.append(f"{path} without a key: {one}")
        refused = len(WRONG) * len(GUARDED) - len(faults)
        # Without a key no request gets as far as a place, whatever it holds back of its body.
        halves = [await asyncio.open_connection("127.0.0.1", node.http) for _ in range(100)]
        for _, writer in halves:
            writer.write(post(b"{", length=100))
        heads = [await asyncio.wait_for(reader.readline(), 10) for reader, _ in halves]
        early = sum(b" 401 " in head for head in heads)
        for _, writer in halves:
            writer.close()
        if early != len(halves):
            faults.append(f"{len(halves) - early} half requests without a key were not refused at once")
        for header in (f"authorization: Bearer {KEY}", f"x-api-key: {KEY}"):
            one = await talk(node.http, post(with_prompt("x"), header, "connection: close"))
            if one.statuses != [200]:
                faults.append(f"with the key: {one}")
        if not await nodes.is_ready(node):
            faults.append("the node is not ready any more")
    finally:
        await nodes.end(node)
    return Seen(f"{refused} of {len(WRONG) * len(GUARDED)} requests 401 ({len(GUARDED)} paths, {len(WRONG)} ways to have no key), "
                f"{early} of {len(halves)} half requests 401 before their body; health open; with the key 200", faults)


async def operators(mesh):
    """A node with keys for clients and for operators: who may change the mesh."""
    nodes = mesh.nodes
    files = {name: nodes.folder / f"{name}.keys" for name in ("client", "operator")}
    files["client"].write_text(f"{KEY}\n")
    files["operator"].write_text(f"{OPERATOR}\n")
    flags = ["--api-key-file", str(files["client"]), "--operator-key-file", str(files["operator"])]
    node = nodes.alone("operated", "--model-id", MODEL, *flags)
    no_key, client, operator = (), (f"x-api-key: {KEY}",), (f"x-api-key: {OPERATOR}",)
    cases = [
        ("POST", "/mesh/drain", no_key, 401), ("POST", "/mesh/drain", client, 401), ("POST", "/mesh/drain?x", client, 401),
        ("POST", "/mesh/requests/1-1/migrate", client, 401), ("GET", "/mesh/nodes", client, 200), ("GET", "/mesh/nodes", operator, 200),
        ("GET", "/metrics", no_key, 401), ("POST", "/mesh/requests/1-1/migrate", operator, 400),
    ]
    told, faults = [], []
    try:
        await nodes.started(node)
        for method, path, headers, status in cases:
            one = await talk(node.http, ask(method, path, headers))
            who = {no_key: "no key", client: "a client's", operator: "an operator's"}[headers]
            told.append(f"{path} with {who} {one}")
            if one.statuses != [status]:
                faults.append(f"{method} {path} with {who}: {one} instead of {status}")
        if not await nodes.is_ready(node):
            faults.append("the node is not ready any more")
    finally:
        await nodes.end(node)
    far = await from_elsewhere(mesh)
    return Seen("; ".join([*told, far.observed]), faults + far.faults)


async def from_elsewhere(mesh):
    """A node without any API keys, asked to stop from another address than its own host's loopback."""
    nodes, address = mesh.nodes, own_address()
    if address is None:
        return Seen("from another host: not tried, there is no network", [])
    node = nodes.alone("reachable", "--model-id", MODEL, "--cluster-key-file", str(nodes.key), place=Place(address))
    try:
        await nodes.started(node)
        one = await talk(node.http, ask("POST", "/mesh/drain"), host=address)
        faults = [] if one.statuses == [403] and await nodes.is_ready(node) else [f"a drain from another address without keys: {one}"]
    finally:
        await nodes.end(node)
    return Seen(f"a drain from another address without keys {one}", faults)


async def web_page(mesh):
    """What a web page of somebody else can make a browser send to a node without API keys on its user's machine."""
    nodes = mesh.nodes
    node = nodes.alone("visited", "--model-id", MODEL)
    page = ("origin: http://elsewhere.example", "sec-fetch-site: cross-site", "sec-fetch-mode: no-cors", "connection: close")
    text, form = "content-type: text/plain;charset=UTF-8", "content-type: application/x-www-form-urlencoded"
    cases = [
        ("a completion as text", post(with_prompt("x"), text, *page)),
        ("a completion as a form", post(b"prompt=x", form, *page)),
        # A page may send bytes without saying what they are.
        ("a completion without a type", post(with_prompt("x"), *page)),
        ("/generate as text", post(b'{"prompt":"x"}', text, *page, path="/generate")),
        ("a drain as text", post(b"{}", text, *page, path="/mesh/drain")),
        ("a drain as a form", post(b"", form, *page, path="/mesh/drain")),
        ("a drain without a body", post(b"", *page, path="/mesh/drain")),
    ]
    told, faults = [], []
    try:
        await nodes.started(node)
        # A request that nobody knows: 404 would mean that it was looked for.
        this = (await nodes.view(node))["this"]
        move = post(b'{"to":"%b"}' % this.encode(), text, *page, path=f"/mesh/requests/{this}-{1:016x}/migrate")
        for name, data in [("a move as text", move), *cases]:
            try:
                one = await talk(node.http, data)
            except OSError as error:
                faults.append(f"{name}: {type(error).__name__}")
                break
            told.append(f"{name} {one}")
            if not one.statuses or one.statuses[0] not in (400, 403, 415):
                faults.append(f"{name}: {one}, not refused")
        if not await nodes.is_ready(node):
            faults.append("the node is not ready any more")
    finally:
        await nodes.end(node)
    return Seen("; ".join(told), faults)


async def press_in(port, crowd):
    """Opens connections that say nothing, one after the other; some are answered by the kernel alone."""
    for _ in range(CROWD):
        with contextlib.suppress(OSError, asyncio.TimeoutError):
            crowd.append(await asyncio.wait_for(asyncio.open_connection("127.0.0.1", port), CROWD_CONNECT))


async def is_told(reader):
    """Whether a connection is told that it is one too many, by now."""
    with contextlib.suppress(OSError, asyncio.TimeoutError):
        return b" 503 " in await asyncio.wait_for(reader.readline(), 1)
    return False


async def few_files(mesh):
    """More connections than the node's process may open files."""
    nodes = mesh.nodes
    node = nodes.alone("crowded", "--model-id", MODEL, "--header-timeout-ms", str(round(HEADER_TIMEOUT * 1000)), files=FILES)
    pressed, told, asked, answers, handles = [], 0, 0, 0, 0
    try:
        await nodes.started(node)
        # One who is connected before is served through all of it.
        reader, writer = await asyncio.open_connection("127.0.0.1", node.http)
        crowd = asyncio.create_task(press_in(node.http, pressed))
        while not crowd.done():
            asked += 1
            writer.write(get("/health"))
            answers += b" 200 " in await asyncio.wait_for(reader.readuntil(b"}"), 10)
            handles = max(handles, usage(node.process.pid).handles)
            await asyncio.wait({crowd}, timeout=0.2)
        told = sum(await asyncio.gather(*(is_told(one) for one, _ in pressed)))
        writer.close()
        for _, one in pressed:
            one.close()
        freed = await served_again(node.http)
    except EOFError:
        return Seen(f"{FILES} files: one who was there got {answers} of {asked} answers", ["one who was there was hung up on"])
    finally:
        for _, one in pressed:
            one.close()
        await nodes.end(node)
    warned = sum("could not be accepted" in line for line in node.log.read_text(errors="replace").splitlines())
    faults = [] if answers == asked else [f"one who was there got {answers} of {asked} answers"]
    if freed > HEADER_TIMEOUT + SLACK:
        faults.append(f"a new client was served {freed:.1f} s after the end only")
    if not told:
        faults.append("none of those too many was told so")
    if warned > WARNINGS:
        faults.append(f"the log has {warned} lines about connections that could not be accepted")
    return Seen(f"{FILES} files, {len(pressed):,} of {CROWD:,} connections came through, {told:,} were told 503, {handles} handles at most; "
                f"one who was there got {answers} of {asked} answers, a new client was served {freed:.1f} s after the end, {warned} warnings", faults)
