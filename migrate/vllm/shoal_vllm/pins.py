"""Keeps blocks of requests where they are, while another engine reads them.

A pin holds references of its own on the blocks, as a request with the same prefix would, so it does not matter what becomes of its
request. Each has a key of its own: a request that is tried to be moved once more does not end the pin of the first try, whose blocks may
be in the middle of being read. Only vLLM's engine thread may touch block references: questions of the node wait for its next step, and
references that are no longer needed go back in a step as well. A pinned request that ends is therefore kept until its pins are over,
because vLLM makes steps as long as something is kept.
"""

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .fields import Refused

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_utils import KVCacheBlock

logger = logging.getLogger("vllm.shoal")

MAX_PINNED = 64
"""Pins at once. Each is a part of a request that another engine reads."""


@dataclass(eq=False)
class Question:
    """A node's wish to pin blocks `first..first + count` of a request."""

    key: str
    """The name of the pin."""
    id: str
    request: object
    """What the one who asks knows it by."""
    first: int
    count: int
    keep_for: float
    """Seconds."""
    answer: dict[str, Any] | Refused | None = None


Look = Callable[[Question], tuple[dict[str, Any], Sequence["KVCacheBlock"]]]
"""Answers a question, and names the blocks. Raises `Refused`."""


@dataclass
class _Pin:
    id: str
    """The request, as the node named it."""
    blocks: Sequence["KVCacheBlock"]
    deadline: float
    """On the monotonic clock."""


class Pins:
    """Everything is called under the lock of `changed`, except the test whether there is anything to do."""

    def __init__(self, changed: threading.Condition) -> None:
        self._changed = changed
        self._questions: list[Question] = []
        self._pins: dict[str, _Pin] = {}
        self._over: list[_Pin] = []
        # Requests that ended and are kept for their pins: the node's name and vLLM's id.
        self._kept: list[tuple[str, str]] = []

    def __bool__(self) -> bool:
        """Whether a step has work here."""
        return bool(self._questions or self._pins or self._over)

    def keys(self) -> list[str]:
        """The names of all pins."""
        return list(self._pins)

    def has(self, id: str) -> bool:
        """Whether a request is pinned."""
        return any(pin.id == id for pin in self._pins.values())

    # A thread of the node.

    def ask(self, question: Question, deadline: float) -> dict[str, Any]:
        """Waits until the engine thread has answered. Raises `Refused`; then nothing was pinned, and will not be."""
        self._questions.append(question)
        while question.answer is None:
            left = deadline - time.monotonic()
            if left <= 0:
                self._questions.remove(question)
                raise Refused("busy", "the engine made no step in time")
            self._changed.wait(left)
        if isinstance(question.answer, Refused):
            raise question.answer
        return question.answer

    def end(self, key: str) -> bool:
        """Ends a pin, if there is one. The references go back in the next step."""
        pin = self._pins.pop(key, None)
        if pin is not None:
            self._over.append(pin)
        return pin is not None

    # The engine thread.

    def step(self, pool: "BlockPool", look: Look) -> list[str]:
        """Answers the questions and gives back what is not needed. Answers vLLM's ids of requests whose last pin is over."""
        now = time.monotonic()
        if self._questions:
            for question in self._questions:
                question.answer = self._pin(question, pool, look, now)
            self._questions.clear()
            self._changed.notify_all()
        for key in [key for key, pin in self._pins.items() if pin.deadline <= now]:
            logger.info("shoal: nobody said that the blocks of %s were read, they are let go", self._pins[key].id)
            self.end(key)
        over, self._over = self._over, []
        for pin in over:
            # In vLLM's own order: the end of a prefix is evicted before its beginning.
            pool.free_blocks(reversed(pin.blocks))
        released = [request_id for id, request_id in self._kept if not self.has(id)]
        self._kept = [(id, request_id) for id, request_id in self._kept if self.has(id)]
        return released

    def ended(self, request: object) -> None:
        """A request ended: it will not be pinned any more."""
        for question in [question for question in self._questions if question.request is request]:
            question.answer = Refused("gone", "the request ended")
            self._questions.remove(question)

    def keep(self, id: str, request_id: str) -> None:
        """A pinned request that ended is kept for its pins alone. `step` answers vLLM's id of it once they are over."""
        self._kept.append((id, request_id))

    def _pin(self, question: Question, pool: "BlockPool", look: Look, now: float) -> dict[str, Any] | Refused:
        try:
            answer, blocks = look(question)
        except Refused as refused:
            return refused
        if question.key not in self._pins and len(self._pins) >= MAX_PINNED:
            return Refused("busy", f"there are {MAX_PINNED} pins")
        pool.touch(blocks)
        self.end(question.key)
        self._pins[question.key] = _Pin(question.id, blocks, now + question.keep_for)
        return answer
