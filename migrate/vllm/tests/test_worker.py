"""The worker's side with real tensors on the CPU."""

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import Client, memfd, open_fds

from shoal_vllm import blocks, worker
from shoal_vllm.blocks import KvBlocks, Unmovable
from shoal_vllm.step import Load, StepWork
from shoal_vllm.worker import WorkerSide

NUM_BLOCKS, TOKENS = 12, 4
SHAPE = (NUM_BLOCKS, 2, TOKENS, 6)


def caches(seed: int, shape: tuple[int, ...] = SHAPE, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    random = torch.Generator().manual_seed(seed)
    return {f"model.layers.{layer}.attn": torch.randn(shape, generator=random).to(dtype) for layer in range(3)}


def kv_blocks(found: dict[str, torch.Tensor], version: str = "0.32.0", block_size: int = TOKENS) -> KvBlocks:
    return KvBlocks(found, NUM_BLOCKS, block_size, page_bytes={}, version=version)


class Engine:
    """A worker's side with a socket, driven as vLLM's worker drives it."""

    def __init__(self, path: Path, seed: int, shape: tuple[int, ...] = SHAPE, open_direct: Any = None) -> None:
        self.caches = caches(seed, shape)
        self.blocks = kv_blocks(self.caches)
        self.side = WorkerSide(open_direct)
        self.side.set_blocks(self.blocks, "")
        self.side.listen(path)
        self.client = Client(path)

    def connect(self) -> None:
        """Anew: what is bad ends a connection."""
        self.client = Client(self.side._server._path)

    def load(self, key: str, ids: list[int], skip: int = 0) -> set[int]:
        """Loads as one step of vLLM does it, and answers the blocks that failed."""
        self.side.start(StepWork(loads=[Load("request", key, skip, ids)]))
        deadline = time.monotonic() + 10
        while (done := self.side.finished()) == (None, None):
            assert time.monotonic() < deadline
            time.sleep(0.001)
        assert done == (None, {"request"})
        return self.side.failed_blocks()


@pytest.fixture
def engines(directory: Path) -> Iterator[tuple[Engine, Engine]]:
    both = Engine(directory / "a.sock", seed=1), Engine(directory / "b.sock", seed=2)
    yield both
    for engine in both:
        engine.side.close()


def test_hello_describes_the_layout(engines: tuple[Engine, Engine]) -> None:
    first, second = (engine.client.ask(op="hello", protocol=1) for engine in engines)
    assert first["layout"] == second["layout"]
    assert first["generation"] != second["generation"]
    digest = first["layout"].pop("digest")
    assert len(bytes.fromhex(digest)) == 8
    assert first["layout"] == {"block_bytes": 3 * 2 * TOKENS * 6 * 4, "layers": 3, "dtype": "float32", "num_blocks": NUM_BLOCKS}
    assert engines[0].client.ask(op="hello", protocol=2)["why"] == "unfit"


def test_exported_blocks_are_the_same_after_stage_and_load(engines: tuple[Engine, Engine]) -> None:
    source, target = engines
    before = {name: cache.clone() for name, cache in target.caches.items()}
    fd = memfd(size=3 * source.blocks.layout.block_bytes)
    assert source.client.ask(op="export", blocks=[7, 2, 9], fd=fd) == {"ok": True}
    assert target.client.ask(op="stage", key="k", blocks=3, ttl_ms=10_000, fd=fd) == {"ok": True}
    os.close(fd)
    assert target.load("k", [5, 0], skip=1) == set()
    for name, cache in target.caches.items():
        expected = before[name]
        expected[[5, 0]] = source.caches[name][[2, 9]]
        assert torch.equal(cache, expected)
    assert target.client.ask(op="drop", key="k") == {"ok": True, "dropped": False}


@pytest.mark.parametrize("chunk", [1, 2 * TOKENS * 6 * 4 * 2, 1 << 20])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
@pytest.mark.parametrize(
    "shape",
    [
        (NUM_BLOCKS, 2, TOKENS, 6),
        (2, NUM_BLOCKS, TOKENS, 2, 6),
        (NUM_BLOCKS * 2, 2, TOKENS // 2, 6),  # The kernel splits each block in two.
        (2, NUM_BLOCKS * 2, TOKENS // 2, 2, 6),
    ],
)
def test_blocks_of_every_shape_go_through_a_file(
    shape: tuple[int, ...], dtype: torch.dtype, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(blocks, "CHUNK_BYTES", chunk)
    source, target = kv_blocks(caches(1, shape, dtype)), kv_blocks(caches(2, shape, dtype))
    fd, copy = (memfd(size=4 * source.layout.block_bytes) for _ in range(2))
    source.export([3, 1, 11, 0], fd)
    target.load(fd, file_blocks=4, skip=1, ids=[8, 9, 2], after=None)
    target.export([8, 9, 2], copy)
    again = memfd(size=3 * source.layout.block_bytes)
    source.export([1, 11, 0], again)
    assert os.pread(copy, 1 << 20, 0)[: 3 * source.layout.block_bytes] == os.pread(again, 1 << 20, 0)


def test_blocks_of_interleaved_layers_go_through_a_file() -> None:
    def interleaved(seed: int) -> dict[str, torch.Tensor]:
        packed = torch.randn((NUM_BLOCKS, 3, 2, TOKENS, 6), generator=torch.Generator().manual_seed(seed))
        return {f"model.layers.{layer}.attn": packed[:, layer] for layer in range(3)}

    source, target = interleaved(1), interleaved(2)
    fd = memfd(size=2 * kv_blocks(source).layout.block_bytes)
    kv_blocks(source).export([4, 5], fd)
    kv_blocks(target).load(fd, file_blocks=2, skip=0, ids=[1, 7], after=None)
    for name in source:
        assert torch.equal(source[name][[4, 5]], target[name][[1, 7]])


def test_a_file_is_ordered_by_layer_and_then_by_block() -> None:
    found = caches(1)
    fd = memfd(size=2 * kv_blocks(found).layout.block_bytes)
    kv_blocks(found).export([6, 4], fd)
    expected = b"".join(found[f"model.layers.{layer}.attn"][block].numpy().tobytes() for layer in range(3) for block in (6, 4))
    assert os.pread(fd, 1 << 20, 0) == expected


def test_the_digest_differs_when_bytes_cannot_be_exchanged() -> None:
    digests = {
        kv_blocks(caches(1)).layout.digest,
        kv_blocks(caches(1), version="0.32.1").layout.digest,
        kv_blocks(caches(1), block_size=8).layout.digest,
        kv_blocks(caches(1, dtype=torch.int32)).layout.digest,
        kv_blocks(caches(1, shape=(NUM_BLOCKS, TOKENS, 2, 6))).layout.digest,
        kv_blocks(caches(1, shape=(2, NUM_BLOCKS, TOKENS, 6))).layout.digest,
        kv_blocks(dict(list(caches(1).items())[:2])).layout.digest,
    }
    assert len(digests) == 7
    more_blocks = KvBlocks(caches(2, shape=(20, 2, TOKENS, 6)), 20, TOKENS, {}, "0.32.0")
    assert more_blocks.layout.digest == kv_blocks(caches(1)).layout.digest


def test_layers_are_in_the_order_of_their_numbers_and_shared_caches_count_once() -> None:
    one, other = caches(1).values(), caches(2).values()
    tensors = [*one, *other]
    names = ["layers.10.attn", "layers.2.attn", "layers.9.attn"]
    found = kv_blocks(dict(zip(names, tensors, strict=False)) | {"layers.11.attn": tensors[0]})
    assert found.layout.layers == 3
    fd = memfd(size=found.layout.block_bytes)
    found.export([0], fd)
    assert os.pread(fd, 8, 0) == tensors[1][0].numpy().tobytes()[:8]


@pytest.mark.parametrize(
    ("found", "message"),
    [
        ({}, "no KV cache"),
        ({"a": torch.zeros(7, 2)}, "no place for 12 blocks"),
        ({"a": torch.zeros(3, NUM_BLOCKS, 2)}, "no place for 12 blocks"),
        ({"a": [torch.zeros(NUM_BLOCKS, 2)]}, "not one tensor"),
        ({"a": torch.zeros(NUM_BLOCKS, 3)}, "has 8 bytes"),
    ],
)
def test_a_cache_of_another_kind_cannot_be_moved(found: Any, message: str) -> None:
    with pytest.raises(Unmovable, match=message):
        KvBlocks(found, NUM_BLOCKS, TOKENS, page_bytes={"a": 8}, version="0.32.0")


def test_an_engine_without_usable_blocks_says_so_and_serves_on() -> None:
    side = WorkerSide()
    side.set_blocks(None, "speculative decoding is on")
    answer = side.answer({"op": "hello", "protocol": 1}, None)
    assert (answer["layout"], answer["why_not"]) == (None, "speculative decoding is on")
    side.start(StepWork(loads=[Load("request", "k", 0, [1, 2])], released=["other"]))
    assert side.finished() == ({"other"}, {"request"})
    assert side.failed_blocks() == {1, 2}
    side.close()


@pytest.mark.parametrize("ids", [[NUM_BLOCKS], [-1], [True], [1.0], "1", None, [[1]]])
def test_an_export_of_blocks_that_do_not_exist_is_bad(engines: tuple[Engine, Engine], ids: Any) -> None:
    fd = memfd(size=1 << 20)
    assert engines[0].client.ask(op="export", blocks=ids, fd=fd)["why"] == "bad"
    os.close(fd)


@pytest.mark.parametrize("request_", [{"op": "export", "blocks": [1, 2]}, {"op": "stage", "key": "k", "blocks": 2, "ttl_ms": 1000}])
def test_a_file_that_is_too_small_or_missing_is_bad(engines: tuple[Engine, Engine], request_: dict[str, Any]) -> None:
    size = 2 * engines[0].blocks.layout.block_bytes
    fd, (pipe, other) = memfd(size=size - 1), os.pipe()
    for wrong in (fd, pipe, None):
        with Client(engines[0].side._server._path).socket as connection:
            client = Client.__new__(Client)
            client.socket = connection
            assert client.ask(**request_, fd=wrong)["why"] == "bad"
    for used in (fd, pipe, other):
        os.close(used)


def test_a_file_that_cannot_be_written_is_bad(engines: tuple[Engine, Engine]) -> None:
    fd = memfd(size=engines[0].blocks.layout.block_bytes)
    reader = os.open(f"/proc/self/fd/{fd}", os.O_RDONLY)
    assert engines[0].client.ask(op="export", blocks=[1], fd=reader)["why"] == "bad"
    for used in (fd, reader):
        os.close(used)


@pytest.mark.parametrize("field", ["key", "blocks", "ttl_ms"])
def test_a_stage_without_a_field_is_bad(engines: tuple[Engine, Engine], field: str) -> None:
    request = {"op": "stage", "key": "k", "blocks": 1, "ttl_ms": 1000}
    del request[field]
    fd = memfd(size=1 << 16)
    assert engines[0].client.ask(**request, fd=fd)["why"] == "bad"
    os.close(fd)


def test_a_load_of_what_is_not_staged_is_reported(engines: tuple[Engine, Engine]) -> None:
    assert engines[0].load("missing", [3, 4]) == {3, 4}


def test_a_load_of_more_than_is_staged_is_reported(engines: tuple[Engine, Engine]) -> None:
    engine = engines[0]
    before = {name: cache.clone() for name, cache in engine.caches.items()}
    fd = memfd(size=2 * engine.blocks.layout.block_bytes)
    engine.client.ask(op="stage", key="k", blocks=2, ttl_ms=1000, fd=fd)
    os.close(fd)
    assert engine.load("k", [3, 4], skip=1) == {3, 4}
    assert all(torch.equal(cache, before[name]) for name, cache in engine.caches.items())


def test_a_file_that_was_cut_after_it_was_staged_is_reported(engines: tuple[Engine, Engine]) -> None:
    engine = engines[0]
    fd = memfd(size=2 * engine.blocks.layout.block_bytes)
    engine.client.ask(op="stage", key="k", blocks=2, ttl_ms=1000, fd=fd)
    os.ftruncate(fd, 10)
    os.close(fd)
    assert engine.load("k", [3, 4]) == {3, 4}


def test_staged_files_are_closed_when_they_were_loaded_dropped_replaced_or_too_old(engines: tuple[Engine, Engine]) -> None:
    engine = engines[0]
    before = open_fds("memfd")
    fd = memfd(size=engine.blocks.layout.block_bytes)
    for key, ttl_ms in (("loaded", 9000), ("asked", 9000), ("unused", 9000), ("replaced", 9000), ("replaced", 9000), ("old", 50)):
        assert engine.client.ask(op="stage", key=key, blocks=1, ttl_ms=ttl_ms, fd=fd)["ok"]
    os.close(fd)
    assert engine.load("loaded", [1]) == set()
    assert engine.client.ask(op="drop", key="asked")["dropped"]
    engine.side.start(StepWork(drops=["unused", "replaced", "unknown"]))
    # Nobody does anything: the time must end by itself.
    deadline = time.monotonic() + 5
    while open_fds("memfd") != before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert open_fds("memfd") == before
    assert engine.load("old", [1]) == {1}


def test_the_number_of_staged_files_is_bounded(engines: tuple[Engine, Engine], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker, "MAX_STAGED", 2)
    fd = memfd(size=engines[0].blocks.layout.block_bytes)

    def stage(key: str) -> dict[str, Any]:
        return engines[0].client.ask(op="stage", key=key, blocks=1, ttl_ms=5000, fd=fd)

    assert stage("a")["ok"] and stage("b")["ok"]
    assert stage("c")["why"] == "busy"
    assert stage("b")["ok"]
    assert engines[0].client.ask(op="drop", key="a")["dropped"]
    assert stage("c")["ok"]
    os.close(fd)


def test_a_stage_is_limited_in_time(engines: tuple[Engine, Engine]) -> None:
    fd = memfd(size=engines[0].blocks.layout.block_bytes)
    engines[0].client.ask(op="stage", key="k", blocks=1, ttl_ms=10**12, fd=fd)
    os.close(fd)
    assert engines[0].side._staged["k"].deadline <= time.monotonic() + worker.MAX_STAGE_SECONDS


def test_close_lets_go_of_staged_files(directory: Path) -> None:
    before = open_fds("memfd")
    engine = Engine(directory / "c.sock", seed=3)
    fd = memfd(size=engine.blocks.layout.block_bytes)
    engine.client.ask(op="stage", key="k", blocks=1, ttl_ms=5000, fd=fd)
    os.close(fd)
    engine.side.close()
    assert open_fds("memfd") == before


def test_an_unknown_op_is_bad(engines: tuple[Engine, Engine]) -> None:
    assert engines[0].client.ask(op="wait_held", id="a")["why"] == "bad"


def test_a_step_with_nothing_to_do_does_nothing(engines: tuple[Engine, Engine]) -> None:
    engines[0].side.start(StepWork())
    assert engines[0].side.finished() == (None, None)
    assert engines[0].side.failed_blocks() == set()
