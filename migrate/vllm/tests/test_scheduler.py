"""The scheduler's side with stand-ins for vLLM's requests and block tables."""

import logging
import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest
from conftest import Grammar, Manager, Request
from vllm.v1.request import RequestStatus

from shoal_vllm import scheduler
from shoal_vllm.fields import Refused
from shoal_vllm.scheduler import Engine, SchedulerSide
from shoal_vllm.step import NOTHING, Load, StepWork

BLOCK = 16


class Node:
    """A scheduler's side, driven as vLLM's engine thread and a node drive it."""

    def __init__(self, why_not: str | None = None, feeds_grammars: bool = True) -> None:
        self.side = SchedulerSide(Engine("0.32.0", BLOCK, True, why_not, feeds_grammars))
        self.manager = Manager()
        self.side.bind(self.manager)

    def ask(self, op: str, **request: Any) -> dict[str, Any]:
        return self.side.answer({"op": op, **request}, None)

    def why(self, op: str, **request: Any) -> str:
        with pytest.raises(Refused) as refused:
            self.ask(op, **request)
        return refused.value.why

    def add(self, id: str, tokens: int = 40, output: int = 0, grammar: Grammar | None = None, **shoal: Any) -> Request:
        request = Request(f"vllm-{id}", tokens, {"id": id, **shoal}, grammar)
        self.side.added(request)
        if output:
            request.run(output)
            self.manager.tables[request.request_id] = list(range(10, 10 + -(-request.num_tokens // BLOCK)))
        return request

    def end(self, request: Request, status: RequestStatus = RequestStatus.FINISHED_ABORTED) -> bool:
        request.status = status
        return self.side.finished(request, self.manager.get_block_ids(request.request_id))

    def step(self, preempted: Request | None = None) -> StepWork:
        return self.side.step(SimpleNamespace(preempted_req_ids={preempted.request_id} if preempted else None))

    def allocate(self, request: Request, count: int, table: list[int]) -> None:
        blocks = SimpleNamespace(get_block_ids=lambda: (table,))
        self.side.allocated(request, blocks, count)


def test_hello_says_what_the_engine_is() -> None:
    answer = Node().ask("hello", protocol=1)
    assert len(answer.pop("generation")) == 16
    assert answer == {
        "protocol": 1,
        "package": "0.2.0",
        "vllm": "0.32.0",
        "block_size": BLOCK,
        "prefix_caching": True,
        "grammar": True,
        "kv": True,
    }
    assert Node().why("hello", protocol=2) == "unfit"


def test_an_engine_whose_kv_cannot_be_moved_says_why_and_serves_on() -> None:
    node = Node(why_not="speculative decoding is on")
    answer = node.ask("hello", protocol=1)
    assert (answer["kv"], answer["why_not"]) == (False, "speculative decoding is on")
    request = node.add("a", output=3, **{"import": {"key": "k", "first": 0, "blocks": 3, "tokens": 40}})
    assert node.side.matched(request, 0) == (0, False)
    assert node.ask("info", id="a")["state"] == "running"
    assert node.why("hold", id="a", ttl_ms=1000) == "unfit"
    assert node.why("blocks", id="a", first=0, count=1) == "unfit"
    assert not node.end(request)
    assert node.step() is NOTHING


@pytest.mark.parametrize("op", [None, 1, "no such op", ["info"]])
def test_an_unknown_op_is_bad(op: Any) -> None:
    assert Node().why(op) == "bad"


@pytest.mark.parametrize("id", [None, 1, "", "x" * 129, ["a"]])
def test_an_id_that_is_no_name_is_bad(id: Any) -> None:
    node = Node()
    for op in ("info", "blocks", "hold", "wait_held", "release"):
        assert node.why(op, id=id, first=0, count=0, ttl_ms=1, timeout_ms=1) == "bad"


@pytest.mark.parametrize("value", [-1, 1.5, True, "1", None])
def test_a_number_that_is_no_count_is_bad(value: Any) -> None:
    node = Node()
    node.add("a", output=1)
    assert node.why("blocks", id="a", first=value, count=1) == "bad"
    assert node.why("blocks", id="a", first=0, count=value) == "bad"
    assert node.why("hold", id="a", ttl_ms=value) == "bad"
    assert node.why("wait_held", id="a", timeout_ms=value) == "bad"


def test_info_follows_a_request() -> None:
    node = Node()
    nothing = {"state": "none", "computed": 0, "prompt": 0, "output": 0, "preemptions": 0}
    assert node.ask("info", id="a") == nothing
    request = node.add("a")
    assert node.ask("info", id="a") == {**nothing, "state": "waiting", "prompt": 40}
    request.status = RequestStatus.RUNNING
    assert node.ask("info", id="a") == {**nothing, "state": "running", "prompt": 40}
    request.run(3)
    assert node.ask("info", id="a") == {**nothing, "state": "running", "computed": 42, "prompt": 40, "output": 3}
    assert node.ask("list") == {"live": ["a"], "held": [], "pinned": []}
    node.end(request, RequestStatus.FINISHED_STOPPED)
    assert node.ask("info", id="a") == nothing
    assert node.ask("list") == {"live": [], "held": [], "pinned": []}


def test_nothing_is_computed_after_a_preemption_until_everything_was_computed_again() -> None:
    node = Node()
    request = node.add("a", output=3)
    request.preempt()
    node.step(preempted=request)
    assert node.ask("info", id="a") == {"state": "waiting", "computed": 0, "prompt": 40, "output": 3, "preemptions": 1}
    assert node.why("blocks", id="a", first=0, count=1) == "gone"
    request.status = RequestStatus.RUNNING
    request.num_computed_tokens = request.num_in_flight_tokens = 32
    node.step()
    assert node.ask("info", id="a")["computed"] == 0
    request.num_computed_tokens, request.num_in_flight_tokens = 43, 11
    node.step()
    assert node.ask("info", id="a")["computed"] == 0
    request.num_in_flight_tokens = 0
    node.step()
    assert node.ask("info", id="a")["computed"] == 42
    assert node.step() is NOTHING


def test_blocks_are_given_as_far_as_they_are_computed() -> None:
    node = Node()
    request = node.add("a", tokens=40, output=9)
    node.manager.tables[request.request_id] = [7, 8, 9, 10]
    assert node.ask("blocks", id="a", first=1, count=2) == {"ids": [8, 9], "computed": 48, "preemptions": 0, "state": "running"}
    # The newest token is the first of block 3, and its KV is not written yet.
    assert node.why("blocks", id="a", first=0, count=4) == "unfit"
    assert node.ask("blocks", id="a", first=3, count=0)["ids"] == []
    assert node.why("blocks", id="b", first=0, count=1) == "gone"


def test_blocks_of_a_request_without_output_are_not_given() -> None:
    node = Node()
    node.add("a")
    assert node.why("blocks", id="a", first=0, count=1) == "gone"


def test_a_table_read_around_a_preemption_is_not_given() -> None:
    node = Node()
    request = node.add("a", output=3)

    def preempt_and_resume() -> None:
        request.preempt()
        request.status = RequestStatus.RUNNING

    node.manager.on_read = preempt_and_resume
    assert node.why("blocks", id="a", first=0, count=1) == "gone"


def test_an_aborted_request_with_a_hold_is_held_until_it_is_released() -> None:
    node = Node()
    request = node.add("a", tokens=40, output=9)
    node.manager.tables[request.request_id] = [7, 8, 9, 10]
    assert node.ask("hold", id="a", ttl_ms=60_000) == {}
    request.num_computed_tokens, request.num_in_flight_tokens = 49, 1
    assert node.end(request)
    node.manager.tables.clear()
    info = {"state": "held", "computed": 48, "prompt": 40, "output": 9, "preemptions": 0}
    assert node.ask("info", id="a") == info
    assert node.ask("wait_held", id="a", timeout_ms=0) == {**info, "token_ids": [*range(100, 140), *range(900, 909)]}
    assert node.ask("blocks", id="a", first=0, count=3) == {"ids": [7, 8, 9], "computed": 48, "preemptions": 0, "state": "held"}
    assert node.why("blocks", id="a", first=0, count=4) == "unfit"
    assert node.ask("list") == {"live": [], "held": ["a"], "pinned": []}
    assert node.step() == StepWork()
    assert node.ask("release", id="a") == {"released": True}
    assert node.step() == StepWork(released=["vllm-a"])
    assert node.step() is NOTHING
    assert node.ask("info", id="a")["state"] == "none"
    assert node.ask("release", id="a") == {"released": False}


def test_the_kv_is_freed_when_its_time_is_over(caplog: pytest.LogCaptureFixture) -> None:
    node = Node()
    request = node.add("a", output=2)
    node.ask("hold", id="a", ttl_ms=20)
    assert node.end(request)
    time.sleep(0.03)
    assert node.step() == StepWork(released=["vllm-a"])
    assert "a in time" in caplog.text
    assert node.why("wait_held", id="a", timeout_ms=0) == "gone"


def test_a_hold_on_a_held_request_gives_it_more_time() -> None:
    node = Node()
    request = node.add("a", output=2)
    node.ask("hold", id="a", ttl_ms=20)
    node.end(request)
    node.ask("hold", id="a", ttl_ms=60_000)
    time.sleep(0.03)
    assert node.step().released == []


def test_a_hold_is_limited_in_time() -> None:
    node = Node()
    request = node.add("a", output=2)
    node.ask("hold", id="a", ttl_ms=10**12)
    node.end(request)
    assert node.side._held["a"].deadline <= time.monotonic() + scheduler.MAX_HOLD_SECONDS


@pytest.mark.parametrize(
    ("output", "hold", "status"),
    [
        (3, False, RequestStatus.FINISHED_ABORTED),
        (0, True, RequestStatus.FINISHED_ABORTED),
        (3, True, RequestStatus.FINISHED_STOPPED),
        (3, True, RequestStatus.FINISHED_LENGTH_CAPPED),
    ],
)
def test_what_is_not_held(output: int, hold: bool, status: RequestStatus) -> None:
    node = Node()
    request = node.add("a", output=output)
    if hold:
        node.ask("hold", id="a", ttl_ms=1000)
    assert not node.end(request, status)
    assert node.why("wait_held", id="a", timeout_ms=1000) == "gone"
    assert node.step() is NOTHING


def test_a_preempted_request_has_nothing_to_hold() -> None:
    node = Node()
    request = node.add("a", output=3)
    node.ask("hold", id="a", ttl_ms=1000)
    request.preempt()
    assert not node.end(request)


def test_a_request_aborted_while_it_is_computed_again_is_held_as_far_as_it_came() -> None:
    node = Node()
    request = node.add("a", output=3)
    node.ask("hold", id="a", ttl_ms=1000)
    request.preempt()
    request.status, request.num_computed_tokens = RequestStatus.RUNNING, 20
    assert node.end(request)
    assert node.ask("info", id="a")["computed"] == 20
    assert len(node.ask("blocks", id="a", first=0, count=2)["ids"]) == 2


def test_a_hold_can_be_taken_back() -> None:
    node = Node()
    request = node.add("a", output=3)
    assert node.ask("release", id="a") == {"released": False}
    node.ask("hold", id="a", ttl_ms=1000)
    assert node.ask("release", id="a") == {"released": True}
    assert not node.end(request)
    assert node.why("hold", id="a", ttl_ms=1000) == "gone"


def test_wait_held_is_woken_by_the_end_of_the_request() -> None:
    node = Node()
    aborted, finished = node.add("a", output=3), node.add("b", output=3)
    for id in ("a", "b"):
        node.ask("hold", id=id, ttl_ms=10_000)
    answers: dict[str, Any] = {}

    def wait(id: str) -> None:
        try:
            answers[id] = node.ask("wait_held", id=id, timeout_ms=10_000)["state"]
        except Refused as refused:
            answers[id] = refused.why

    threads = [threading.Thread(target=wait, args=(id,)) for id in ("a", "b")]
    for thread in threads:
        thread.start()
    node.end(aborted)
    node.end(finished, RequestStatus.FINISHED_STOPPED)
    for thread in threads:
        thread.join(5)
    assert answers == {"a": "held", "b": "gone"}


def test_wait_held_of_a_running_request_ends_with_busy() -> None:
    node = Node()
    node.add("a", output=3)
    assert node.why("wait_held", id="a", timeout_ms=10) == "busy"


def test_the_number_of_held_requests_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduler, "MAX_HELD", 2)
    node = Node()
    requests = [node.add(id, output=1) for id in "abc"]
    for id in "abc":
        node.ask("hold", id=id, ttl_ms=1000)
    assert [node.end(request) for request in requests] == [True, True, False]
    assert node.why("wait_held", id="c", timeout_ms=0) == "gone"


def test_a_second_request_under_an_id_replaces_the_first() -> None:
    node = Node()
    first = node.add("a", output=3)
    node.ask("hold", id="a", ttl_ms=1000)
    second = Request("vllm-second", 50, {"id": "a"})
    node.side.added(second)
    assert node.ask("info", id="a")["prompt"] == 50
    assert not node.end(first)
    assert node.ask("info", id="a")["prompt"] == 50
    second.run(2)
    node.manager.tables["vllm-second"] = [1, 2, 3, 4]
    node.ask("hold", id="a", ttl_ms=1000)
    assert node.end(second)
    node.add("a")
    assert node.ask("list") == {"live": ["a"], "held": [], "pinned": []}
    assert node.step() == StepWork(released=["vllm-second"])


@pytest.mark.parametrize(
    "shoal",
    [
        1,
        {},
        {"id": 1},
        {"id": "a", "prompt": "x"},
        {"id": "a", "prompt": 0},
        {"id": "a", "prompt": 41},
        {"id": "a", "import": []},
        {"id": "a", "import": {"key": "k", "first": 0, "blocks": 0, "tokens": 1}},
        {"id": "a", "import": {"key": "k", "first": -1, "blocks": 1, "tokens": 1}},
        {"id": "a", "import": {"key": "k", "first": 0, "blocks": 1, "tokens": True}},
        {"id": "a", "import": {"first": 0, "blocks": 1, "tokens": 1}},
    ],
)
def test_a_malformed_parameter_is_ignored_with_a_warning(shoal: Any, caplog: pytest.LogCaptureFixture) -> None:
    node = Node()
    request = Request("vllm-a", 40, shoal)
    with caplog.at_level(logging.WARNING):
        node.side.added(request)
    assert "is ignored" in caplog.text
    assert node.side.matched(request, 0) == (0, False)
    node.allocate(request, 0, [])
    assert not node.end(request)
    assert node.ask("list") == {"live": [], "held": [], "pinned": []}


@pytest.mark.parametrize("kv_transfer_params", [None, {}, {"do_remote_decode": True}, "x"])
def test_a_request_of_nobody_is_left_alone(kv_transfer_params: Any, caplog: pytest.LogCaptureFixture) -> None:
    node = Node()
    request = Request("vllm-a", 40)
    request.kv_transfer_params = kv_transfer_params
    node.side.added(request)
    assert node.side.matched(request, 0) == (0, False)
    assert not node.end(request)
    assert caplog.text == ""


@pytest.mark.parametrize(
    ("first", "blocks", "tokens", "hit", "expected"),
    [
        (0, 3, 40, 0, 39),  # The last token is always computed here.
        (0, 3, 36, 0, 36),
        (0, 3, 36, 16, 20),
        (1, 2, 36, 16, 20),
        (1, 2, 36, 32, 4),
        (1, 2, 36, 0, 0),  # The hit does not reach the first staged block.
        (2, 1, 36, 16, 0),
        (0, 1, 36, 0, 16),  # Fewer blocks than tokens.
        (0, 2, 32, 32, 0),  # Nothing that is not here.
        (0, 2, 20, 32, 0),
    ],
)
def test_how_much_is_imported(first: int, blocks: int, tokens: int, hit: int, expected: int) -> None:
    node = Node()
    request = node.add("a", tokens=40, **{"import": {"key": "k", "first": first, "blocks": blocks, "tokens": tokens}})
    for _ in range(2):
        assert node.side.matched(request, hit) == (expected, expected > 0)
    assert node.step() is NOTHING


def test_an_import_is_loaded_once_into_the_blocks_that_lack_it() -> None:
    node = Node()
    request = node.add("a", tokens=70, **{"import": {"key": "k", "first": 1, "blocks": 4, "tokens": 69}})
    assert node.side.matched(request, 32) == (37, True)
    node.allocate(request, 37, [50, 51, 52, 53, 54])
    assert node.step() == StepWork(loads=[Load("vllm-a", "k", skip=1, block_ids=[52, 53, 54])])
    node.allocate(request, 0, [50, 51, 52, 53, 54])
    assert node.side.matched(request, 0) == (0, False)
    assert node.step() is NOTHING


def test_an_import_that_is_not_needed_is_dropped() -> None:
    node = Node()
    request = node.add("a", tokens=40, **{"import": {"key": "k", "first": 0, "blocks": 2, "tokens": 32}})
    assert node.side.matched(request, 32) == (0, False)
    node.allocate(request, 0, [1, 2, 3])
    assert node.step() == StepWork(drops=["k"])
    node.end(request)
    assert node.step() is NOTHING


def test_an_import_of_a_request_that_ends_before_is_dropped() -> None:
    node = Node()
    request = node.add("a", **{"import": {"key": "k", "first": 0, "blocks": 2, "tokens": 32}})
    node.end(request)
    assert node.step() == StepWork(drops=["k"])


def test_a_grammar_is_fed_once_what_was_drawn_elsewhere() -> None:
    node, grammar = Node(), Grammar()
    request = node.add("a", tokens=40, grammar=grammar, prompt=37)
    for _ in range(2):
        node.side.matched(request, 0)
    request.run(5).preempt()
    node.side.matched(request, 0)
    assert grammar.fed == [[137, 138, 139]]


@pytest.mark.parametrize("prompt", [None, 40])
def test_a_grammar_of_a_request_that_begins_here_is_not_fed(prompt: int | None) -> None:
    node, grammar = Node(), Grammar()
    node.side.matched(node.add("a", tokens=40, grammar=grammar, prompt=prompt), 0)
    assert grammar.fed == []


def test_a_grammar_behind_reasoning_is_not_fed() -> None:
    node, grammar = Node(feeds_grammars=False), Grammar()
    assert not node.ask("hello", protocol=1)["grammar"]
    node.side.matched(node.add("a", tokens=40, grammar=grammar, prompt=37), 0)
    assert grammar.fed == []


def test_a_request_without_a_grammar_can_name_its_prompt() -> None:
    node = Node()
    assert node.side.matched(node.add("a", tokens=40, prompt=37), 0) == (0, False)
