"""The scheduler's side: knows the node's requests, keeps the KV of those it holds, and decides what is imported.

Two kinds of threads come here. vLLM's engine thread calls `added` to `finished`, in the middle of its loop. The node's questions come in
threads of their own (`answer`) while that loop runs, so they read vLLM's objects as they change; `_Progress` says how that stays right.
"""

import logging
import secrets
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm.v1.request import RequestStatus

from . import PROTOCOL, __version__, fields, params
from .fields import Refused
from .params import Import
from .pins import Pins, Question
from .step import NOTHING, Load, StepWork
from .wire import Server

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
    from vllm.v1.core.kv_cache_utils import KVCacheBlock
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request

logger = logging.getLogger("vllm.shoal")

MAX_HELD = 256
"""Requests held at once. One more is not held when it is aborted."""
MAX_HOLD_SECONDS = 120.0
"""Longest time that KV is held for a node that may have died."""
MAX_WAIT_SECONDS = 10.0
"""Longest wait for a request to become held."""


@dataclass(frozen=True)
class Engine:
    """What the node learns about this engine, and what the side needs to know of it."""

    version: str
    block_size: int
    prefix_caching: bool
    why_not: str | None
    """Why KV cannot be moved to or from it, or None."""
    feeds_grammars: bool
    """Whether structured output goes on in the right place when a request comes from elsewhere."""


@dataclass(frozen=True)
class _Progress:
    """How far a request is.

    `computed` counts the tokens whose KV is surely written and stays where it is: all but the newest once there is an output, because
    the step that drew the newest wrote the others. A preemption frees the blocks and draws nothing, so after one `computed` is 0 until
    the engine thread has seen that everything was computed again. A reader in another thread compares `preemptions` before and after.
    """

    state: str
    computed: int = 0
    prompt: int = 0
    output: int = 0
    preemptions: int = 0

    def fields(self) -> dict[str, Any]:
        """As it is sent to the node."""
        return vars(self).copy()


@dataclass
class _Live:
    """A request in the engine that a node named."""

    id: str
    request: "Request"
    prompt: int | None
    """Where tokens drawn elsewhere begin in its prompt; None once the grammar was fed, or if there is nothing to feed."""
    wanted: Import | None
    """What it can import; None once that was decided."""
    hold_for: float | None = None
    """Seconds to keep its KV when it is aborted."""
    whole_since: int = 0
    """The number of preemptions at which all its KV was there."""

    def progress(self) -> _Progress:
        """Safe to call in any thread."""
        request = self.request
        preemptions = request.num_preemptions
        output, total = request.num_output_tokens, request.num_tokens
        running = request.status == RequestStatus.RUNNING
        whole = running and output > 0 and self.whole_since == preemptions
        return _Progress(
            state="running" if running else "waiting",
            computed=total - 1 if whole else 0,
            prompt=request.num_prompt_tokens,
            output=output,
            preemptions=preemptions,
        )


@dataclass(frozen=True)
class _Held:
    """An aborted request whose KV is kept."""

    request_id: str
    """vLLM's id."""
    progress: _Progress
    block_ids: list[int]
    token_ids: list[int]
    """Prompt and output."""
    deadline: float
    """On the monotonic clock."""


class SchedulerSide:
    """See the module's documentation."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._generation = secrets.token_hex(8)
        self._server: Server | None = None
        self._manager: KVCacheManager | None = None
        # Of the engine thread only.
        self._by_request: dict[str, _Live] = {}
        self._recomputing: set[str] = set()
        self._loads: list[Load] = []
        self._drops: list[str] = []
        # Guards the rest, and wakes those who wait for a request to become held or pinned.
        self._changed = threading.Condition()
        self._pins = Pins(self._changed)
        self._live: dict[str, _Live] = {}
        self._held: dict[str, _Held] = {}
        self._released: list[str] = []

    def listen(self, path: Path) -> None:
        """Starts to answer the node."""
        self._server = Server(path, self.answer)

    def bind(self, manager: "KVCacheManager") -> None:
        """The manager of block tables is there."""
        self._manager = manager

    def close(self) -> None:
        """Stops answering."""
        if self._server is not None:
            self._server.close()

    # The engine thread.

    def added(self, request: "Request") -> None:
        """A request arrived. One that is not a node's, or says nonsense, is left alone."""
        try:
            found = params.parse(request.kv_transfer_params, request.num_prompt_tokens)
        except Refused as refused:
            logger.warning("shoal: the shoal parameter of request %s is ignored: %s", request.request_id, refused.message)
            return
        if found is None:
            return
        entry = _Live(id=found.id, request=request, prompt=found.prompt, wanted=found.wanted)
        if self._engine.why_not is not None:
            entry.wanted = None
        self._by_request[request.request_id] = entry
        with self._changed:
            self._live[found.id] = entry
            # The name now means the new request, so nobody could release the old one.
            self._release(found.id)

    def matched(self, request: "Request", hit: int) -> tuple[int, bool]:
        """How many tokens behind the `hit` first ones, which this engine has, can be loaded; and that this takes several steps."""
        entry = self._by_request.get(request.request_id)
        if entry is None:
            return 0, False
        self._feed_grammar(entry)
        wanted = entry.wanted
        if wanted is None or hit < wanted.first * self._engine.block_size:
            return 0, False
        count = wanted.end(request.num_tokens, self._engine.block_size) - hit
        return (count, True) if count > 0 else (0, False)

    def allocated(self, request: "Request", blocks: "KVCacheBlocks", count: int) -> None:
        """The request has its blocks, and `count` tokens of them are to be loaded. Decides once; a preempted request computes."""
        entry = self._by_request.get(request.request_id)
        if entry is None or entry.wanted is None:
            return
        wanted, entry.wanted = entry.wanted, None
        if count <= 0:
            self._drops.append(wanted.key)
            return
        size = self._engine.block_size
        end = wanted.end(request.num_tokens, size)
        first, last = (end - count) // size, -(-end // size)
        ids = blocks.get_block_ids()[0][first:last]
        self._loads.append(Load(request.request_id, wanted.key, skip=first - wanted.first, block_ids=list(ids)))

    def step(self, output: "SchedulerOutput") -> StepWork:
        """Work for the worker, collected since the last step. vLLM goes on stepping while something is held."""
        if output.preempted_req_ids:
            self._recomputing.update(output.preempted_req_ids & self._by_request.keys())
        if self._recomputing:
            self._note_recomputed()
        if not (self._loads or self._drops or self._held or self._released or self._pins):
            return NOTHING
        with self._changed:
            self._release_old()
            released, self._released = self._released, []
            if self._manager is not None:
                released += self._pins.step(self._manager.block_pool, self._look)
        loads, self._loads = self._loads, []
        drops, self._drops = self._drops, []
        return StepWork(loads=loads, drops=drops, released=released)

    def finished(self, request: "Request", block_ids: tuple[list[int], ...]) -> bool:
        """A request ended. True if its blocks must be kept until its id is reported as sent."""
        entry = self._by_request.pop(request.request_id, None)
        if entry is None:
            return False
        self._recomputing.discard(request.request_id)
        if entry.wanted is not None:
            self._drops.append(entry.wanted.key)
        with self._changed:
            if self._live.get(entry.id) is not entry:
                return False
            del self._live[entry.id]
            held = self._hold(entry, block_ids)
            pinned = self._pins.has(entry.id)
            self._pins.ended(entry)
            if held is not None:
                self._held[entry.id] = held
            elif pinned:
                self._pins.keep(entry.id, request.request_id)
            self._changed.notify_all()
        return held is not None or pinned

    def _hold(self, entry: _Live, block_ids: tuple[list[int], ...]) -> _Held | None:
        """What to keep of a request that ends now, or None: it was not to be held, was not aborted, or has no KV."""
        request = entry.request
        if entry.hold_for is None or request.status != RequestStatus.FINISHED_ABORTED or not request.num_output_tokens:
            return None
        # In this thread vLLM's own count is exact, also in the middle of computing again after a preemption.
        computed = min(request.num_tokens - 1, request.num_computed_tokens - request.num_in_flight_tokens)
        if computed <= 0:
            return None
        if len(self._held) >= MAX_HELD:
            logger.warning("shoal: %d requests are held, %s is not", MAX_HELD, entry.id)
            return None
        progress = replace(entry.progress(), state="held", computed=computed)
        return _Held(
            request_id=request.request_id,
            progress=progress,
            block_ids=block_ids[0][: -(-computed // self._engine.block_size)],
            token_ids=request.all_token_ids[:],
            deadline=time.monotonic() + entry.hold_for,
        )

    def _feed_grammar(self, entry: _Live) -> None:
        """Tells a fresh grammar, once, about the tokens that were drawn elsewhere and are prompt here."""
        prompt, entry.prompt = entry.prompt, None
        request = entry.request
        structured = request.structured_output_request
        if prompt is None or structured is None or prompt >= request.num_prompt_tokens:
            return
        if not self._engine.feeds_grammars or structured.grammar is None:
            logger.warning("shoal: the grammar of %s starts anew", entry.id)
            return
        drawn = request.all_token_ids[prompt : request.num_prompt_tokens]
        if not structured.grammar.accept_tokens(request.request_id, drawn):
            logger.warning("shoal: the grammar of %s does not accept what was drawn elsewhere", entry.id)

    def _note_recomputed(self) -> None:
        """Finds preempted requests whose KV is whole again."""
        for request_id in list(self._recomputing):
            entry = self._by_request[request_id]
            request = entry.request
            written = request.num_computed_tokens - request.num_in_flight_tokens
            if request.status == RequestStatus.RUNNING and written >= request.num_tokens - 1:
                entry.whole_since = request.num_preemptions
                self._recomputing.discard(request_id)

    # Under the lock.

    def _release(self, id: str) -> bool:
        held = self._held.pop(id, None)
        if held is not None and self._pins.has(id):
            self._pins.keep(id, held.request_id)
        elif held is not None:
            self._released.append(held.request_id)
        return held is not None

    def _release_old(self) -> None:
        now = time.monotonic()
        for id in [id for id, held in self._held.items() if held.deadline <= now]:
            logger.warning("shoal: nobody took the KV of %s in time, it is freed", id)
            self._release(id)

    # The node's requests, each in the thread of its connection.

    def answer(self, request: dict[str, Any], fd: int | None) -> dict[str, Any]:
        """Answers one request of the node."""
        match request.get("op"):
            case "hello":
                return self._answer_hello(request)
            case "info":
                return self._answer_info(request)
            case "blocks":
                return self._answer_blocks(request)
            case "hold":
                return self._answer_hold(request)
            case "wait_held":
                return self._answer_wait_held(request)
            case "release":
                return self._answer_release(request)
            case "pin":
                return self._answer_pin(request)
            case "unpin":
                with self._changed:
                    return {"unpinned": self._pins.end(fields.name(request, "key"))}
            case "list":
                with self._changed:
                    return {"live": list(self._live), "held": list(self._held), "pinned": self._pins.keys()}
            case op:
                raise Refused("bad", f"there is no op {op!r}")

    def _answer_hello(self, request: dict[str, Any]) -> dict[str, Any]:
        if fields.integer(request, "protocol") != PROTOCOL:
            raise Refused("unfit", f"this engine speaks protocol {PROTOCOL}")
        engine = self._engine
        answer = {
            "protocol": PROTOCOL,
            "package": __version__,
            "vllm": engine.version,
            "generation": self._generation,
            "block_size": engine.block_size,
            "prefix_caching": engine.prefix_caching,
            "grammar": engine.feeds_grammars,
            "kv": engine.why_not is None,
        }
        return answer if engine.why_not is None else {**answer, "why_not": engine.why_not}

    def _answer_info(self, request: dict[str, Any]) -> dict[str, Any]:
        live, held = self._find(request)
        if held is not None:
            return held.progress.fields()
        return (live.progress() if live is not None else _Progress(state="none")).fields()

    def _answer_blocks(self, request: dict[str, Any]) -> dict[str, Any]:
        self._movable()
        first, count = fields.integer(request, "first"), fields.integer(request, "count")
        live, held = self._find(request)
        if held is not None:
            progress, ids = held.progress, held.block_ids
        elif live is not None:
            progress, ids = self._table(live)
        else:
            raise Refused("gone", "there is no such request")
        return self._part(progress, ids, first, count)

    def _part(self, progress: _Progress, ids: list[int], first: int, count: int) -> dict[str, Any]:
        """The answer about some blocks of a table."""
        if first + count > min(len(ids), -(-progress.computed // self._engine.block_size)):
            raise Refused("unfit", f"only {progress.computed} tokens are computed")
        return {
            "ids": ids[first : first + count],
            "computed": progress.computed,
            "preemptions": progress.preemptions,
            "state": progress.state,
        }

    def _table(self, live: _Live) -> tuple[_Progress, list[int]]:
        """A running request's progress and the block table that belongs to it."""
        before = live.progress()
        ids = self._manager.get_block_ids(live.request.request_id)[0] if self._manager is not None else []
        after = live.progress()
        if before.state != "running" or after.state != "running":
            raise Refused("gone", "the request is not running")
        if before.preemptions != after.preemptions:
            raise Refused("gone", "the request was preempted")
        return before, ids

    def _answer_pin(self, request: dict[str, Any]) -> dict[str, Any]:
        self._movable()
        key = fields.name(request, "key")
        first, count = fields.integer(request, "first"), fields.integer(request, "count", low=1)
        keep_for = fields.seconds(request, "ttl_ms", MAX_HOLD_SECONDS)
        deadline = time.monotonic() + fields.seconds(request, "timeout_ms", MAX_WAIT_SECONDS)
        with self._changed:
            id, (live, held) = fields.name(request, "id"), self._find(request)
            if live is not None:
                return self._pins.ask(Question(key, id, live, first, count, keep_for), deadline)
            if held is None:
                raise Refused("gone", "there is no such request")
            # What is held stays where it is.
            answer = self._part(held.progress, held.block_ids, first, count)
            self._held[id] = replace(held, deadline=max(held.deadline, time.monotonic() + keep_for))
            return answer

    def _look(self, question: Question) -> tuple[dict[str, Any], Sequence["KVCacheBlock"]]:
        """In the engine thread: the answer to a pin, and the blocks that it names."""
        live, first, count = self._live.get(question.id), question.first, question.count
        if self._manager is None or live is None or live is not question.request:
            raise Refused("gone", "there is no such request")
        progress, ids = self._table(live)
        answer = self._part(progress, ids, first, count)
        return answer, self._manager.get_blocks(live.request.request_id).blocks[0][first : first + count]

    def _answer_hold(self, request: dict[str, Any]) -> dict[str, Any]:
        self._movable()
        hold_for = fields.seconds(request, "ttl_ms", MAX_HOLD_SECONDS)
        with self._changed:
            live, held = self._find(request)
            if live is not None:
                live.hold_for = hold_for
            elif held is not None:
                self._held[fields.name(request, "id")] = replace(held, deadline=time.monotonic() + hold_for)
            else:
                raise Refused("gone", "there is no such request")
        return {}

    def _answer_wait_held(self, request: dict[str, Any]) -> dict[str, Any]:
        deadline = time.monotonic() + fields.seconds(request, "timeout_ms", MAX_WAIT_SECONDS)
        with self._changed:
            while True:
                live, held = self._find(request)
                if held is not None:
                    return {**held.progress.fields(), "token_ids": held.token_ids}
                if live is None:
                    raise Refused("gone", "the request is not here, or ended with nothing to hold")
                left = deadline - time.monotonic()
                if left <= 0:
                    raise Refused("busy", "the request was not aborted yet")
                self._changed.wait(left)

    def _answer_release(self, request: dict[str, Any]) -> dict[str, Any]:
        with self._changed:
            live, _ = self._find(request)
            if live is None:
                return {"released": self._release(fields.name(request, "id"))}
            was_to_be_held, live.hold_for = live.hold_for is not None, None
            return {"released": was_to_be_held}

    def _find(self, request: dict[str, Any]) -> tuple[_Live | None, _Held | None]:
        """The request a node asks about. It is live, or held, or neither."""
        id = fields.name(request, "id")
        with self._changed:
            return self._live.get(id), self._held.get(id)

    def _movable(self) -> None:
        if self._engine.why_not is not None:
            raise Refused("unfit", self._engine.why_not)
