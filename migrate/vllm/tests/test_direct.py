"""The direct path with real tensors and a stand-in for NIXL."""

import base64
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import memfd
from fake_nixl import Agent, Network
from test_worker import NUM_BLOCKS, SHAPE, TOKENS, Engine, caches, kv_blocks

from shoal_vllm import blocks, direct
from shoal_vllm.blocks import KvBlocks, Unmovable
from shoal_vllm.direct import Direct, NoNixl
from shoal_vllm.fields import Refused
from shoal_vllm.worker import WorkerSide

SPLIT = (2, NUM_BLOCKS, TOKENS, 2, 6)
SHAPES = [
    SHAPE,
    SPLIT,
    (NUM_BLOCKS * 2, 2, TOKENS // 2, 6),  # The kernel splits each block in two.
    (2, NUM_BLOCKS * 2, TOKENS // 2, 2, 6),
]


class Pair:
    """Two engines' blocks, a source and a target, and the direct path between them."""

    def __init__(self, shape: tuple[int, ...] = SHAPE) -> None:
        self.network = Network()
        self.from_ = kv_blocks(caches(1, shape))
        self.blocks = kv_blocks(caches(2, shape))
        self.source = Direct("source", self.from_, self.network.start)
        self.target = Direct("target", self.blocks, self.network.start)
        self.agent: Agent = self.network.agents["target"]

    def fetch(self, ids: list[int], seconds: float = 10.0, **changed: Any) -> bytes:
        """What arrived in the file."""
        size = len(ids) * self.blocks.layout.block_bytes
        fd = memfd(size=size)
        try:
            address = {**self.source.address, **changed}
            self.target.fetch(self.target.source({"address": address, "ids": ids}, len(ids)), fd, seconds)
            return os.pread(fd, size, 0)
        finally:
            os.close(fd)

    def why(self, ids: list[int], seconds: float = 10.0, **changed: Any) -> tuple[str, str]:
        with pytest.raises(Refused) as refused:
            self.fetch(ids, seconds, **changed)
        return refused.value.why, refused.value.message


def exported(source: KvBlocks, ids: list[int]) -> bytes:
    size = len(ids) * source.layout.block_bytes
    fd = memfd(size=size)
    source.export(ids, fd)
    data = os.pread(fd, size, 0)
    os.close(fd)
    return data


@pytest.mark.parametrize("ids", [[7], [3, 1, 11, 0], [4, 5, 6, 2, 3], list(range(NUM_BLOCKS))])
@pytest.mark.parametrize("chunk", [1, 2 * 2 * TOKENS * 6 * 4, 1 << 20])
@pytest.mark.parametrize("shape", SHAPES)
def test_what_is_fetched_is_what_would_have_been_exported(
    shape: tuple[int, ...], chunk: int, ids: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(blocks, "CHUNK_BYTES", chunk)
    pair = Pair(shape)
    assert pair.fetch(ids) == exported(pair.from_, ids)
    assert pair.agent.open_handles() == []


def test_blocks_of_interleaved_layers_are_fetched() -> None:
    packed = torch.randn((NUM_BLOCKS, 3, 2, TOKENS, 6))
    pair = Pair()
    pair.from_ = kv_blocks({f"model.layers.{layer}.attn": packed[:, layer] for layer in range(3)})
    pair.source = Direct("source", pair.from_, pair.network.start)
    assert len(pair.network.agents["source"].regions) == 2, "the memory that all layers share, and a buffer"
    assert pair.fetch([5, 4, 9]) == exported(pair.from_, [5, 4, 9])


def test_an_address_says_where_the_blocks_are() -> None:
    found = caches(1)
    address = Direct("me", kv_blocks(found), Network().start).address
    agent = address.pop("agent")
    tensors = [found[f"model.layers.{layer}.attn"] for layer in range(3)]
    size = tensors[0].nbytes // NUM_BLOCKS
    assert address == {
        "kind": "nixl",
        "memory": "DRAM",
        "device": 0,
        "num_blocks": NUM_BLOCKS,
        "planes": [[[tensor.data_ptr(), size, size]] for tensor in tensors],
    }
    # The KV and nothing else.
    regions = [[tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes] for tensor in tensors]
    assert base64.b64decode(agent) == f'{{"name": "me", "regions": {regions}}}'.encode()


def test_an_address_has_two_planes_where_keys_and_values_lie_apart() -> None:
    found = caches(1, SPLIT)
    planes = Direct("me", kv_blocks(found), Network().start).address["planes"]
    cache = found["model.layers.0.attn"]
    half = cache.nbytes // 2
    assert planes[0] == [[cache.data_ptr() + part * half, half // NUM_BLOCKS, half // NUM_BLOCKS] for part in (0, 1)]


def test_blocks_that_lie_in_many_pieces_have_no_direct_path() -> None:
    found = {name: cache.transpose(2, 3) for name, cache in caches(1).items()}
    with pytest.raises(Unmovable, match="one or two pieces"):
        Direct("me", kv_blocks(found), Network().start)


def test_neighbours_are_read_in_one_piece() -> None:
    pair = Pair()
    pair.fetch([4, 5, 6, 1])
    (handle,) = pair.agent.handles
    assert len(handle.into) == 3 * 2, "two pieces in each layer"


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"kind": "rdma"}, "unfit"),
        ({"kind": None}, "unfit"),
        ({"agent": None}, "bad"),
        ({"agent": ""}, "bad"),
        ({"agent": "ab c"}, "bad"),
        ({"agent": "ä"}, "bad"),
        ({"agent": "A" * ((1 << 20) + 4)}, "bad"),
        ({"memory": "FILE"}, "bad"),
        ({"memory": None}, "bad"),
        ({"memory": []}, "bad"),
        ({"device": -1}, "bad"),
        ({"device": 1 << 40}, "bad"),
        ({"device": True}, "bad"),
        ({"num_blocks": 0}, "bad"),
        ({"num_blocks": 9}, "bad"),  # The ids are not below it.
        ({"num_blocks": 1 << 40}, "bad"),
        ({"num_blocks": "12"}, "bad"),
        ({"planes": None}, "bad"),
        ({"planes": {}}, "bad"),
        ({"planes": []}, "unfit"),
        ({"planes": [[[0, 8, 192]]] * 4}, "unfit"),
        ({"planes": [[[0, 8, 192]] * 2] * 3}, "unfit"),
        ({"planes": [[[0, 8, 191]]] * 3}, "unfit"),
        ({"planes": [[[0, 8]]] * 3}, "bad"),
        ({"planes": [[0, 8, 192]] * 3}, "unfit"),
        ({"planes": [[[0, 8, True]]] * 3}, "bad"),
        ({"planes": [[[0.5, 8, 192]]] * 3}, "bad"),
        ({"planes": [[[-1, 8, 192]]] * 3}, "bad"),
        ({"planes": [[[(1 << 64) - 100, 0, 192]]] * 3}, "bad"),
        ({"planes": [[[0, 1 << 61, 192]]] * 3}, "bad"),
    ],
)
def test_an_address_that_makes_no_sense_is_refused_before_anything_is_read(changed: dict[str, Any], why: str) -> None:
    pair = Pair()
    assert pair.why([9, 2], **changed)[0] == why
    assert pair.agent.remote == []


@pytest.mark.parametrize("wanted", [1, [], {}, {"ids": [1]}, {"address": 1, "ids": [1]}])
def test_a_source_that_is_none_is_bad(wanted: Any) -> None:
    with pytest.raises(Refused, match="from must be"):
        Pair().target.source(wanted, 1)


@pytest.mark.parametrize("ids", [None, [1], [1, 2, 3], [1, NUM_BLOCKS], [1, -1], [1, True], ["1", "2"]])
def test_ids_that_are_not_those_of_the_blocks_are_bad(ids: Any) -> None:
    pair = Pair()
    with pytest.raises(Refused) as refused:
        pair.target.source({"address": pair.source.address, "ids": ids}, 2)
    assert refused.value.why == "bad"


def test_memory_that_the_other_engine_does_not_give_cannot_be_read() -> None:
    pair = Pair()
    planes = [[[plane[0][0] + (1 << 30), *plane[0][1:]]] for plane in pair.source.address["planes"]]
    assert pair.why([9, 2], planes=planes) == ("unfit", "NIXL failed: LookupError('NIXL_ERR_NOT_FOUND')")
    assert pair.fetch([9, 2]) == exported(pair.from_, [9, 2])


@pytest.mark.parametrize("call", ["initialize_xfer", "transfer", "check_xfer_state"])
def test_a_transfer_that_fails_is_refused_and_the_next_one_connects_anew(call: str) -> None:
    pair = Pair()
    pair.agent.error = (call, ConnectionError("gone"))
    assert pair.why([1]) == ("unfit", "NIXL failed: ConnectionError('gone')")
    assert (pair.agent.open_handles(), pair.agent.remote, pair.agent.removed) == ([], [], [b"source"])
    pair.agent.error = None
    assert pair.fetch([1]) == exported(pair.from_, [1])


def test_a_transfer_that_ends_badly_is_refused() -> None:
    pair = Pair()
    pair.agent.ends_as = "ERR"
    assert pair.why([1]) == ("unfit", "NIXL failed: RuntimeError('a transfer ended as ERR')")
    assert pair.agent.open_handles() == []


def test_what_arrives_late_is_not_in_the_way_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    pair = Pair()
    pair.agent.looks = None
    began = time.monotonic()
    assert pair.why([1], seconds=0.05) == ("unfit", "the blocks did not arrive in time")
    assert time.monotonic() - began < 5
    (late,) = pair.agent.open_handles()
    for _ in range(direct.MAX_LATE - 1):
        assert pair.why([2], seconds=0.01)[0] == "unfit"
    assert pair.why([2], seconds=0.01)[0] == "busy"
    assert len({handle.into[0][0] for handle in pair.agent.open_handles()}) == direct.MAX_LATE, "each keeps its buffer"
    assert pair.agent.removed == [], "NIXL may not lose an agent under a transfer"
    # They end, all of them, while others use a buffer.
    pair.agent.looks = 1
    assert pair.fetch([3]) == exported(pair.from_, [3])
    assert pair.agent.open_handles() == []
    assert late.released
    assert len(pair.target._free) == direct.MAX_LATE


def test_a_fetch_is_limited_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(direct, "MAX_FETCH_SECONDS", 0.05)
    pair = Pair()
    pair.agent.looks = None
    assert pair.why([1], seconds=10**6)[0] == "unfit"


def test_a_fetch_does_not_wait_longer_than_its_time_for_others() -> None:
    pair = Pair()
    with pair.target._lock:
        assert pair.why([1], seconds=0.02) == ("busy", "other fetches took all the time")


def test_fetches_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks, "CHUNK_BYTES", 400)
    pair = Pair()
    wanted = [[first, 5, 9] for first in range(4)]
    found: dict[int, bytes] = {}
    threads = [threading.Thread(target=lambda n=n, ids=ids: found.update({n: pair.fetch(ids)})) for n, ids in enumerate(wanted)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert found == {n: exported(pair.from_, ids) for n, ids in enumerate(wanted)}


def test_the_number_of_engines_known_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(direct, "MAX_AGENTS", 2)
    pair = Pair()
    addresses = {name: Direct(name, pair.from_, pair.network.start).address for name in "abc"}
    for name in "abacb":
        assert pair.fetch([1], **addresses[name]) == exported(pair.from_, [1])
    assert (pair.agent.remote, pair.agent.removed) == ([b"c", b"b"], [b"b", b"a"])


def test_close_ends_a_fetch() -> None:
    pair = Pair()
    pair.agent.looks = None
    why: list[Any] = []
    thread = threading.Thread(target=lambda: why.append(pair.why([1])))
    thread.start()
    while not pair.agent.handles:
        time.sleep(0.001)
    pair.target.close()
    thread.join(5)
    assert why[0][0] == "unfit"
    assert pair.why([1]) == ("unfit", "the engine stops")


# The worker's side around it.


@pytest.fixture
def engines(directory: Path) -> Iterator[tuple[Engine, Engine]]:
    network = Network()

    def open_direct(name: str, found: KvBlocks) -> Direct:
        return Direct(name, found, network.start)

    both = Engine(directory / "a.sock", 1, open_direct=open_direct), Engine(directory / "b.sock", 2, open_direct=open_direct)
    yield both
    for engine in both:
        engine.side.close()


def stage(engines: tuple[Engine, Engine], ids: list[int], **changed: Any) -> dict[str, Any]:
    """Asks the second engine to fetch blocks of the first."""
    source, target = engines
    address = source.client.ask(op="address")["address"]
    fd = memfd(size=len(ids) * target.blocks.layout.block_bytes)
    request = {"op": "stage", "key": "k", "blocks": len(ids), "ttl_ms": 10_000, "timeout_ms": 5_000}
    answer = target.client.ask(**request | {"from": {"address": address, "ids": ids}} | changed, fd=fd)
    os.close(fd)
    return answer


def test_a_stage_can_fetch_its_blocks_from_the_other_engine(engines: tuple[Engine, Engine]) -> None:
    source, target = engines
    assert target.client.ask(op="hello", protocol=1)["direct"] is True
    assert "why_not_direct" not in target.client.ask(op="hello", protocol=1)
    assert stage(engines, [7, 2, 9]) == {"ok": True}
    assert target.load("k", [5, 0], skip=1) == set()
    for name, cache in target.caches.items():
        assert torch.equal(cache[[5, 0]], source.caches[name][[2, 9]])


def test_a_fetch_that_fails_leaves_nothing_staged(engines: tuple[Engine, Engine]) -> None:
    target = engines[1]
    assert stage(engines, [1, 2])["ok"]
    target.side._direct._agent.ends_as = "ERR"
    assert stage(engines, [3, 4])["why"] == "unfit"
    assert target.client.ask(op="drop", key="k") == {"ok": True, "dropped": False}


def test_a_fetch_without_a_time_or_for_other_blocks_is_bad(engines: tuple[Engine, Engine]) -> None:
    assert stage(engines, [1, 2], timeout_ms=None)["why"] == "bad"
    engines[1].connect()
    assert stage(engines, [1, 2], blocks=1)["why"] == "bad"


def test_steps_go_on_while_blocks_are_fetched(engines: tuple[Engine, Engine]) -> None:
    target = engines[1]
    target.side._direct._agent.looks = None
    thread = threading.Thread(target=lambda: stage(engines, [1, 2], timeout_ms=2_000))
    thread.start()
    while not target.side._direct._agent.handles:
        time.sleep(0.001)
    began = time.monotonic()
    assert target.load("missing", [3]) == {3}
    assert time.monotonic() - began < 1
    target.side._direct.close()
    thread.join(5)


def test_an_engine_without_the_direct_path_stages_as_ever(directory: Path) -> None:
    def no_nixl(name: str, found: KvBlocks) -> Direct:
        raise NoNixl("the package nixl is not installed")

    asked, unasked = Engine(directory / "a.sock", 1, open_direct=no_nixl), Engine(directory / "b.sock", 2)
    hello = asked.client.ask(op="hello", protocol=1)
    assert (hello["direct"], hello["why_not_direct"]) == (False, "the package nixl is not installed")
    hello = unasked.client.ask(op="hello", protocol=1)
    assert (hello["direct"], "why_not_direct" in hello) == (False, False)
    refused = {"ok": False, "why": "unfit", "message": "the package nixl is not installed"}
    assert asked.client.ask(op="address") == refused
    fd = memfd(size=asked.blocks.layout.block_bytes)
    request = {"op": "stage", "key": "k", "blocks": 1, "ttl_ms": 1000}
    assert asked.client.ask(**request | {"from": {}, "timeout_ms": 1}, fd=fd) == refused
    assert asked.client.ask(**request, fd=fd) == {"ok": True}
    os.close(fd)
    for engine in (asked, unasked):
        engine.side.close()


def test_an_engine_whose_kv_cannot_be_moved_has_no_direct_path() -> None:
    side = WorkerSide(lambda name, found: pytest.fail("there are no blocks"))
    side.set_blocks(None, "speculative decoding is on")
    assert side.answer({"op": "hello", "protocol": 1}, None)["why_not_direct"] == "speculative decoding is on"
    side.close()
