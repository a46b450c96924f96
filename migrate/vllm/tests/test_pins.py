"""Pins of the scheduler's side, with stand-ins for vLLM's requests, block tables and references."""

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
from conftest import Request
from test_scheduler import Node
from vllm.v1.request import RequestStatus

from shoal_vllm import pins, scheduler
from shoal_vllm.fields import Refused
from shoal_vllm.step import NOTHING, StepWork

FINISHED = [RequestStatus.FINISHED_STOPPED, RequestStatus.FINISHED_LENGTH_CAPPED, RequestStatus.FINISHED_ABORTED]


class PinNode(Node):
    """A scheduler's side whose engine thread makes a step when a question waits for one."""

    def references(self) -> dict[int, int]:
        """How many references pins have on each block."""
        return self.manager.block_pool.references

    def pin(
        self,
        id: str,
        key: str = "k",
        first: int = 0,
        count: int = 1,
        ttl_ms: int = 60_000,
        meanwhile: Callable[[], Any] | None = None,
    ) -> Any:
        """The answer, or why there is none. `meanwhile` is what the engine does once it was asked; a step if nothing is said."""
        answer: list[Any] = []

        def ask() -> None:
            try:
                answer.append(self.ask("pin", id=id, key=key, first=first, count=count, ttl_ms=ttl_ms, timeout_ms=10_000))
            except Refused as refused:
                answer.append(refused.why)

        asker = threading.Thread(target=ask)
        asker.start()
        deadline = time.monotonic() + 10
        while not self.side._pins._questions and asker.is_alive():
            assert time.monotonic() < deadline
            time.sleep(0.001)
        (meanwhile or self.step)()
        asker.join(10)
        return answer[0]


def pinned(node: PinNode) -> list[str]:
    return node.ask("list")["pinned"]


def test_blocks_of_a_running_request_are_pinned_by_a_step_until_unpin() -> None:
    node = PinNode()
    node.add("a", tokens=40, output=9)
    assert node.pin("a", first=1, count=2) == node.ask("blocks", id="a", first=1, count=2)
    assert (node.references(), pinned(node)) == ({11: 1, 12: 1}, ["k"])
    assert node.step() == StepWork()
    assert node.ask("unpin", key="k") == {"unpinned": True}
    assert node.references() == {11: 1, 12: 1}, "only the engine's thread gives references back"
    node.step()
    assert (node.references(), pinned(node)) == ({}, [])
    assert node.manager.block_pool.freed == [12, 11]
    assert node.step() is NOTHING
    assert node.ask("unpin", key="k") == {"unpinned": False}


def test_a_newer_pin_of_a_request_leaves_the_older_which_may_still_be_read() -> None:
    node = PinNode()
    node.add("a", tokens=40, output=9)
    node.pin("a", key="old", first=0, count=2)
    node.pin("a", key="new", first=1, count=2)
    assert node.references() == {10: 1, 11: 2, 12: 1}
    assert node.pin("a", key="third", first=3, count=1) == "unfit", "its only token has no KV yet"
    node.ask("unpin", key="old")
    node.step()
    assert (node.references(), pinned(node)) == ({11: 1, 12: 1}, ["new"])


def test_a_pin_under_the_same_key_replaces_the_older_and_shared_blocks_stay_all_the_time() -> None:
    node = PinNode()
    node.add("a", tokens=40, output=9)
    node.pin("a", first=0, count=2)
    node.pin("a", first=1, count=2)
    assert node.references() == {11: 1, 12: 1}
    assert node.manager.block_pool.freed == [11, 10]


def test_a_pin_ends_when_its_time_is_over() -> None:
    node = PinNode()
    node.add("a", output=3)
    node.pin("a", ttl_ms=20)
    time.sleep(0.03)
    node.step()
    assert (node.references(), pinned(node)) == ({}, [])


def test_a_pin_is_limited_in_time() -> None:
    node = PinNode()
    node.add("a", output=3)
    node.pin("a", ttl_ms=10**12)
    assert node.side._pins._pins["k"].deadline <= time.monotonic() + scheduler.MAX_HOLD_SECONDS


def test_an_engine_without_steps_pins_nothing_late() -> None:
    node = PinNode()
    node.add("a", output=3)
    assert node.why("pin", id="a", key="k", first=0, count=1, ttl_ms=1000, timeout_ms=10) == "busy"
    assert node.step() is NOTHING
    assert node.references() == {}


@pytest.mark.parametrize("field", ["id", "key", "first", "count", "ttl_ms", "timeout_ms"])
@pytest.mark.parametrize("value", [-1, 1.5, True, "", None])
def test_a_pin_with_nonsense_is_bad(field: str, value: Any) -> None:
    node = PinNode()
    node.add("a", output=3)
    assert node.why("pin", **({"id": "a", "key": "k", "first": 0, "count": 1, "ttl_ms": 1, "timeout_ms": 1} | {field: value})) == "bad"
    assert node.why("unpin", key=None) == "bad"


def test_a_request_that_is_not_there_or_has_no_kv_is_not_pinned() -> None:
    node = PinNode()
    waiting = node.add("a")
    assert node.pin("b") == "gone"
    assert node.pin("a") == "gone"
    waiting.run(3)
    node.manager.tables[waiting.request_id] = [10, 11, 12]
    assert node.pin("a", meanwhile=lambda: (waiting.preempt(), node.step(preempted=waiting))) == "gone"
    assert node.references() == {}


def test_an_engine_whose_kv_cannot_be_moved_pins_nothing() -> None:
    node = PinNode(why_not="speculative decoding is on")
    node.add("a", output=3)
    assert node.why("pin", id="a", key="k", first=0, count=1, ttl_ms=1, timeout_ms=1) == "unfit"


def test_a_request_that_ends_before_the_step_is_not_pinned() -> None:
    node = PinNode()
    request = node.add("a", output=3)
    assert node.pin("a", meanwhile=lambda: node.end(request)) == "gone"
    assert node.step() is NOTHING


def test_another_request_under_the_id_is_not_pinned() -> None:
    node = PinNode()
    node.add("a", output=3)
    assert node.pin("a", meanwhile=lambda: (node.side.added(Request("vllm-second", 50, {"id": "a"})), node.step())) == "gone"
    assert node.references() == {}


@pytest.mark.parametrize("status", FINISHED)
@pytest.mark.parametrize("ending", ["unpin", "time"])
def test_a_pinned_request_that_ends_is_kept_until_the_pin_is_over(status: RequestStatus, ending: str) -> None:
    node = PinNode()
    request = node.add("a", output=3)
    node.pin("a", count=2, ttl_ms=50 if ending == "time" else 60_000)
    assert node.end(request, status)
    node.manager.tables.clear()
    assert (node.ask("info", id="a")["state"], pinned(node)) == ("none", ["k"])
    assert node.why("wait_held", id="a", timeout_ms=1) == "gone"
    assert node.step() == StepWork()
    if ending == "time":
        time.sleep(0.06)
    else:
        assert node.ask("release", id="a") == {"released": False}, "a release is no word about who reads"
        assert node.step() == StepWork()
        node.ask("unpin", key="k")
    assert node.step() == StepWork(released=["vllm-a"])
    assert (node.references(), pinned(node)) == ({}, [])
    assert node.step() is NOTHING


def test_a_request_preempted_while_it_is_pinned_keeps_what_is_read_until_the_pin_is_over() -> None:
    node = PinNode()
    request = node.add("a", output=3)
    node.pin("a", count=2)
    request.preempt()
    node.manager.tables.clear()
    node.step(preempted=request)
    assert node.references() == {10: 1, 11: 1}
    assert node.end(request), "the engine must go on stepping, or nobody gives the references back"
    node.step()
    assert node.references() == {10: 1, 11: 1}
    node.ask("unpin", key="k")
    assert node.step() == StepWork(released=["vllm-a"])
    assert node.references() == {}


def test_a_request_that_ended_is_kept_until_its_last_pin_is_over() -> None:
    node = PinNode()
    request = node.add("a", output=3)
    node.pin("a", key="one")
    node.pin("a", key="two")
    assert node.end(request)
    node.ask("unpin", key="one")
    assert node.step() == StepWork()
    node.ask("unpin", key="two")
    assert node.step() == StepWork(released=["vllm-a"])
    assert (node.references(), node.step()) == ({}, NOTHING)


def test_a_held_request_that_is_released_is_kept_until_its_pin_is_over() -> None:
    node = PinNode()
    request = node.add("a", output=3)
    node.pin("a", count=2)
    node.ask("hold", id="a", ttl_ms=60_000)
    assert node.end(request)
    assert node.step() == StepWork()
    assert node.ask("release", id="a") == {"released": True}
    assert node.step() == StepWork(), "the engine must go on stepping, or nobody gives the references back"
    node.ask("unpin", key="k")
    assert node.step() == StepWork(released=["vllm-a"])
    assert (node.references(), pinned(node)) == ({}, [])


def test_a_pin_of_a_held_request_touches_nothing_and_makes_the_hold_last() -> None:
    node = PinNode()
    request = node.add("a", output=3)
    node.ask("hold", id="a", ttl_ms=20)
    node.end(request)
    answer = node.ask("pin", id="a", key="k", first=1, count=2, ttl_ms=60_000, timeout_ms=0)
    assert answer == node.ask("blocks", id="a", first=1, count=2)
    assert node.why("pin", id="a", key="k", first=1, count=3, ttl_ms=1, timeout_ms=0) == "unfit"
    node.ask("pin", id="a", key="k", first=0, count=1, ttl_ms=1, timeout_ms=0)
    time.sleep(0.03)
    assert node.step() == StepWork()
    assert node.references() == {}
    assert node.ask("unpin", key="k") == {"unpinned": False}
    assert node.ask("release", id="a") == {"released": True}


def test_the_number_of_pins_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pins, "MAX_PINNED", 2)
    node = PinNode()
    for id in "abc":
        node.add(id, output=3)
    assert [type(node.pin(id, key=id)) for id in "ab"] == [dict, dict]
    assert node.pin("c", key="c") == "busy"
    assert type(node.pin("b", key="b", count=2)) is dict
    node.ask("unpin", key="a")
    node.step()
    assert type(node.pin("c", key="c")) is dict
