"""The class as vLLM builds and calls it: both roles on one directory, and a hand-over through both sockets."""

import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from conftest import Client, Manager, Request, memfd
from test_settings import FULL, config, groups
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole, supports_hma
from vllm.v1.request import RequestStatus

from shoal_vllm import connector as module
from shoal_vllm.blocks import KvBlocks
from shoal_vllm.connector import ShoalConnector
from shoal_vllm.direct import Direct, NoNixl
from shoal_vllm.settings import BadSettings
from shoal_vllm.versions import UntestedVersion
from shoal_vllm.wire import SocketInUse

NUM_BLOCKS = 12


def build(directory: Path, role: KVConnectorRole, nixl: bool = False, **changed: Any) -> ShoalConnector:
    vllm_config = config(**changed)
    vllm_config.kv_transfer_config.kv_connector_extra_config = {"dir": str(directory), "nixl": nixl}
    found = groups(FULL)
    found.num_blocks = NUM_BLOCKS
    return ShoalConnector(vllm_config, role, found)


@dataclass
class Engine:
    """Both sides of one engine, and a node's connections to them."""

    directory: Path
    seed: int

    def __post_init__(self) -> None:
        self.scheduler = build(self.directory, KVConnectorRole.SCHEDULER)
        self.worker = build(self.directory, KVConnectorRole.WORKER)
        self.manager = Manager()
        self.scheduler.bind_kv_cache_manager(self.manager)
        self.cache = torch.randn((NUM_BLOCKS, 2, 16, 16), generator=torch.Generator().manual_seed(self.seed))
        self.worker.register_kv_caches({"layer.0": self.cache})
        self.to_scheduler = Client(self.directory / "scheduler.sock")
        self.to_worker = Client(self.directory / "worker.sock")

    def step(self) -> Any:
        """One step of the engine with nothing to run."""
        work = self.scheduler.build_connector_meta(SimpleNamespace(preempted_req_ids=set()))
        self.worker.bind_connector_metadata(work)
        self.worker.start_load_kv(None)
        self.worker.wait_for_save()
        results = self.worker.get_transfer_results(set())
        failed = self.worker.get_block_ids_with_load_errors()
        self.worker.clear_connector_metadata()
        return results, failed

    def step_until_received(self) -> set[int]:
        deadline = time.monotonic() + 10
        while True:
            results, failed = self.step()
            if results.finished_recving:
                return failed
            assert time.monotonic() < deadline
            time.sleep(0.001)

    def close(self) -> None:
        self.scheduler.shutdown()
        self.worker.shutdown()


@pytest.fixture
def engines(directory: Path) -> Iterator[tuple[Engine, Engine]]:
    both = Engine(directory / "a", 1), Engine(directory / "b", 2)
    yield both
    for engine in both:
        engine.close()


def test_vllm_can_build_it() -> None:
    assert supports_hma(ShoalConnector)
    assert ShoalConnector.__abstractmethods__ == frozenset()


def test_vllm_is_told_that_kv_comes_from_a_peer(directory: Path) -> None:
    source = pytest.importorskip("vllm.v1.metrics.cache_hit_source", reason="new in vLLM 0.32").CacheHitSource
    scheduler = build(directory, KVConnectorRole.SCHEDULER)
    assert scheduler.get_external_cache_hit_sources(Request("r", 40), 32) == {source.P2P: 32}
    scheduler.shutdown()


def test_a_running_request_moves_with_its_kv(engines: tuple[Engine, Engine]) -> None:
    source, target = engines
    request = Request("at-source", 40, {"id": "r"})
    source.scheduler.on_new_request(request)
    request.run(10)
    source.manager.tables["at-source"] = [3, 8, 1, 6]
    source.to_scheduler.ask(op="hold", id="r", ttl_ms=10_000)
    request.status = RequestStatus.FINISHED_ABORTED
    assert source.scheduler.request_finished_all_groups(request, ([3, 8, 1, 6],)) == (True, None)
    held = source.to_scheduler.ask(op="wait_held", id="r", timeout_ms=1000)
    ids = source.to_scheduler.ask(op="blocks", id="r", first=0, count=4)["ids"]

    block_bytes = source.to_worker.ask(op="hello", protocol=1)["layout"]["block_bytes"]
    fd = memfd(size=4 * block_bytes)
    assert source.to_worker.ask(op="export", blocks=ids, fd=fd)["ok"]
    assert target.to_worker.ask(op="stage", key="k", blocks=4, ttl_ms=10_000, fd=fd)["ok"]
    os.close(fd)

    wanted = {"key": "k", "first": 0, "blocks": 4, "tokens": held["computed"]}
    moved = Request("at-target", len(held["token_ids"]), {"id": "r", "prompt": 40, "import": wanted})
    target.scheduler.on_new_request(moved)
    assert target.scheduler.get_num_new_matched_tokens(moved, 0) == (49, True)
    target.scheduler.update_state_after_alloc(moved, SimpleNamespace(get_block_ids=lambda: ([2, 4, 5, 7],)), 49)
    assert target.step_until_received() == set()
    assert torch.equal(target.cache[[2, 4, 5, 7]], source.cache[[3, 8, 1, 6]])

    assert source.to_scheduler.ask(op="release", id="r")["released"]
    results, _ = source.step()
    assert results.finished_sending == {"at-source"}


def test_an_import_of_what_was_never_staged_fails_its_blocks(engines: tuple[Engine, Engine]) -> None:
    target = engines[1]
    wanted = {"key": "k", "first": 0, "blocks": 2, "tokens": 32}
    request = Request("r", 40, {"id": "r", "import": wanted})
    target.scheduler.on_new_request(request)
    target.scheduler.update_state_after_alloc(request, SimpleNamespace(get_block_ids=lambda: ([2, 4, 5],)), 32)
    assert target.step_until_received() == {2, 4}


def test_shutdown_removes_the_sockets(directory: Path) -> None:
    engine = Engine(directory, 1)
    assert sorted(path.name for path in directory.iterdir()) == ["scheduler.sock", "worker.sock"]
    engine.close()
    assert list(directory.iterdir()) == []


def test_a_second_engine_in_the_same_directory_is_refused(directory: Path) -> None:
    first = build(directory, KVConnectorRole.SCHEDULER)
    with pytest.raises(SocketInUse, match="another running engine"):
        build(directory, KVConnectorRole.SCHEDULER)
    first.shutdown()


def test_another_policy_or_version_is_refused(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(BadSettings, match="recompute"):
        build(directory, KVConnectorRole.SCHEDULER, kv_transfer_config__kv_load_failure_policy="fail")
    monkeypatch.setattr(module.vllm, "__version__", "0.99.0")
    with pytest.raises(UntestedVersion, match="0.32.x"):
        build(directory, KVConnectorRole.WORKER)


@pytest.mark.parametrize("changed", [{"parallel_config__rank": 1, "parallel_config__world_size": 2}, {"parallel_config__data_parallel_index": 1}])
def test_further_ranks_do_not_speak(directory: Path, changed: dict[str, Any]) -> None:
    worker = build(directory, KVConnectorRole.WORKER, **changed)
    worker.register_kv_caches({"layer.0": torch.zeros(NUM_BLOCKS, 2, 16, 16)})
    assert list(directory.iterdir()) == []
    worker.shutdown()


def test_an_engine_with_an_unknown_cache_starts_and_says_why(directory: Path) -> None:
    worker = build(directory, KVConnectorRole.WORKER)
    worker.register_kv_caches({"layer.0": torch.zeros(NUM_BLOCKS, 2, 16, 15)})
    answer = Client(directory / "worker.sock").ask(op="hello", protocol=1)
    assert answer["layout"] is None
    assert "bytes" in answer["why_not"]
    worker.shutdown()


@pytest.mark.parametrize("nixl", [False, True])
def test_an_engine_opens_the_direct_path_only_if_it_is_told_to_and_serves_without(
    directory: Path, monkeypatch: pytest.MonkeyPatch, nixl: bool
) -> None:
    monkeypatch.setattr(module.vllm, "__version__", "0.32.0")

    def fail(name: str, blocks: KvBlocks) -> Direct:
        raise NoNixl("the package nixl is not installed")

    monkeypatch.setattr(module, "Direct", fail)
    worker = build(directory, KVConnectorRole.WORKER, nixl=nixl)
    worker.register_kv_caches({"layer.0": torch.zeros(NUM_BLOCKS, 2, 16, 16)})
    answer = Client(directory / "worker.sock").ask(op="hello", protocol=1)
    assert answer["layout"] is not None
    assert answer["direct"] is False
    assert answer.get("why_not_direct") == ("the package nixl is not installed" if nixl else None)
    worker.shutdown()


def test_the_direct_path_is_off_where_it_was_not_tested(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module.vllm, "__version__", "0.31.0")
    worker = build(directory, KVConnectorRole.WORKER, nixl=True)
    worker.register_kv_caches({"layer.0": torch.zeros(NUM_BLOCKS, 2, 16, 16)})
    answer = Client(directory / "worker.sock").ask(op="hello", protocol=1)
    assert answer["layout"] is not None
    assert "its direct path was tested with vLLM 0.32.x, and this is vLLM 0.31.0" in answer["why_not_direct"]
    worker.shutdown()
