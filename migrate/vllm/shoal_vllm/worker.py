"""The worker's side: takes blocks out for the node, keeps what the node staged, and loads it when the scheduler says so."""

import logging
import os
import secrets
import stat
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from . import PROTOCOL, fields
from .blocks import KvBlocks
from .direct import MAX_FETCH_SECONDS, Direct
from .fields import Refused
from .step import Load, StepWork
from .wire import Server

logger = logging.getLogger("vllm.shoal")

MAX_STAGED = 64
"""Files kept at once. Each is one request on its way to this engine."""
MAX_STAGE_SECONDS = 120.0
"""Longest time a file is kept that nobody loads."""


@dataclass(frozen=True)
class Staged:
    """KV from another engine, in a file of the node."""

    fd: int
    blocks: int
    deadline: float
    """On the monotonic clock."""


class WorkerSide:
    """Everything but `answer` and the loading is called by vLLM's worker thread, every step, and must cost nothing."""

    def __init__(self, open_direct: Callable[[str, KvBlocks], Direct] | None = None) -> None:
        """`open_direct` opens the direct path; None if the operator does not want it."""
        self._generation = secrets.token_hex(8)
        self._open_direct = open_direct
        self._direct: Direct | None = None
        self._blocks: KvBlocks | None = None
        self._why_not = self._why_not_direct = "the engine is still starting"
        self._server: Server | None = None
        # Guards the rest, and wakes the loader.
        self._changed = threading.Condition()
        self._staged: dict[str, Staged] = {}
        self._loads: deque[tuple[Load, torch.cuda.Event | None]] = deque()
        self._stopped = False
        self._sent: set[str] = set()
        self._received: set[str] = set()
        self._failed_blocks: set[int] = set()

    def set_blocks(self, blocks: KvBlocks | None, why_not: str) -> None:
        """The KV cache is there; `why_not` counts if it is of no use to us."""
        self._blocks = blocks
        self._why_not = self._why_not_direct = why_not
        if blocks is not None:
            self._start_direct(blocks)
            threading.Thread(target=self._keep, name="shoal loader", daemon=True).start()

    def _start_direct(self, blocks: KvBlocks) -> None:
        """Opens the direct path, or remembers why there is none. The engine serves in any case."""
        if self._open_direct is None:
            self._why_not_direct = "the settings do not ask for it"
            return
        try:
            self._direct = self._open_direct(self._generation, blocks)
        except Exception as error:
            self._why_not_direct = str(error) or repr(error)
            logger.warning("shoal: there is no direct path to other engines: %s", self._why_not_direct)

    def listen(self, path: Path) -> None:
        """Starts to answer the node."""
        self._server = Server(path, self.answer)

    def start(self, work: StepWork) -> None:
        """Takes over the work of one engine step. Loads run in the loader's thread."""
        if work.is_empty():
            return
        moment = self._blocks.now() if work.loads and self._blocks is not None else None
        with self._changed:
            self._sent.update(work.released)
            for key in work.drops:
                self._drop(key)
            for load in work.loads:
                if self._blocks is None:
                    self._report(load, failed=True)
                else:
                    self._loads.append((load, moment))
            self._changed.notify_all()

    def finished(self) -> tuple[set[str] | None, set[str] | None]:
        """Requests whose held blocks can be freed, and requests whose load is over, since the last call."""
        if not self._sent and not self._received:
            return None, None
        with self._changed:
            sent, self._sent = self._sent, set()
            received, self._received = self._received, set()
        return sent or None, received or None

    def failed_blocks(self) -> set[int]:
        """Blocks whose load failed since the last call."""
        if not self._failed_blocks:
            return set()
        with self._changed:
            failed, self._failed_blocks = self._failed_blocks, set()
        return failed

    def close(self) -> None:
        """Stops answering and loading, and lets go of the staged files."""
        if self._server is not None:
            self._server.close()
        if self._direct is not None:
            self._direct.close()
        with self._changed:
            self._stopped = True
            for key in list(self._staged):
                self._drop(key)
            self._changed.notify_all()

    # The node's requests, each in the thread of its connection.

    def answer(self, request: dict[str, Any], fd: int | None) -> dict[str, Any]:
        """Answers one request of the node."""
        match request.get("op"):
            case "hello":
                return self._hello(request)
            case "export":
                return self._export(request, fd)
            case "stage":
                return self._stage(request, fd)
            case "address":
                return {"address": self._reachable().address}
            case "drop":
                return self._drop_asked(request)
            case op:
                raise Refused("bad", f"there is no op {op!r}")

    def _hello(self, request: dict[str, Any]) -> dict[str, Any]:
        if fields.integer(request, "protocol") != PROTOCOL:
            raise Refused("unfit", f"this engine speaks protocol {PROTOCOL}")
        answer: dict[str, Any] = {"protocol": PROTOCOL, "generation": self._generation, "direct": self._direct is not None}
        if self._direct is None and self._open_direct is not None:
            answer["why_not_direct"] = self._why_not_direct
        if self._blocks is None:
            return {**answer, "layout": None, "why_not": self._why_not}
        return {**answer, "layout": self._blocks.layout_fields()}

    def _export(self, request: dict[str, Any], fd: int | None) -> dict[str, Any]:
        blocks = self._movable()
        ids = fields.integers(request, "blocks", below=blocks.num_blocks)
        file = _file_for(fd, len(ids) * blocks.layout.block_bytes)
        blocks.export(ids, file)
        return {}

    def _stage(self, request: dict[str, Any], fd: int | None) -> dict[str, Any]:
        blocks = self._movable()
        key = fields.name(request, "key")
        count = fields.integer(request, "blocks", low=1)
        keep_for = fields.seconds(request, "ttl_ms", MAX_STAGE_SECONDS)
        file = _file_for(fd, count * blocks.layout.block_bytes)
        if request.get("from") is not None:
            self._fetch(request, key, count, file)
        with self._changed:
            self._make_room(key)
            self._staged[key] = Staged(os.dup(file), count, time.monotonic() + keep_for)
            self._changed.notify_all()
        return {}

    def _fetch(self, request: dict[str, Any], key: str, count: int, file: int) -> None:
        """Reads the blocks out of another engine into the file. If that fails, nothing is left under the key."""
        direct = self._reachable()
        source = direct.source(request["from"], count)
        seconds = fields.seconds(request, "timeout_ms", MAX_FETCH_SECONDS)
        with self._changed:
            self._make_room(key)
        direct.fetch(source, file, seconds)

    def _drop_asked(self, request: dict[str, Any]) -> dict[str, Any]:
        key = fields.name(request, "key")
        with self._changed:
            return {"dropped": self._drop(key)}

    def _movable(self) -> KvBlocks:
        if self._blocks is None:
            raise Refused("unfit", self._why_not)
        return self._blocks

    def _reachable(self) -> Direct:
        if self._direct is None:
            raise Refused("unfit", self._why_not_direct)
        return self._direct

    # The loader's thread.

    def _keep(self) -> None:
        """Loads what is asked for, and lets go of files whose time is over, also while the engine is idle."""
        while True:
            with self._changed:
                while not self._loads and not self._stopped:
                    self._drop_old()
                    self._changed.wait(self._until_next_deadline())
                if self._stopped:
                    return
                load, moment = self._loads.popleft()
                staged = self._staged.pop(load.key, None)
            self._load(load, staged, moment)

    def _load(self, load: Load, staged: Staged | None, moment: torch.cuda.Event | None) -> None:
        """Loads one request's blocks and reports it. Whatever goes wrong, the request must not wait for ever: vLLM recomputes."""
        failed = True
        try:
            if staged is None:
                logger.warning("shoal: nothing is staged under %s, the request is recomputed", load.key)
            elif load.skip < 0 or load.skip + len(load.block_ids) > staged.blocks:
                logger.warning("shoal: %s has only %d blocks, the request is recomputed", load.key, staged.blocks)
            else:
                self._movable().load(staged.fd, staged.blocks, load.skip, load.block_ids, moment)
                failed = False
        except Exception as error:
            logger.warning("shoal: loading %s failed, the request is recomputed: %r", load.key, error)
        finally:
            if staged is not None:
                os.close(staged.fd)
            with self._changed:
                self._report(load, failed)

    def _report(self, load: Load, failed: bool) -> None:
        """The blocks first: vLLM must know them no later than that the load is over."""
        if failed:
            self._failed_blocks.update(load.block_ids)
        self._received.add(load.request_id)

    # The staged files, under the lock.

    def _make_room(self, key: str) -> None:
        self._drop_old()
        self._drop(key)
        if self._stopped or len(self._staged) >= MAX_STAGED:
            raise Refused("busy", f"{MAX_STAGED} files are staged already")

    def _drop(self, key: str) -> bool:
        staged = self._staged.pop(key, None)
        if staged is not None:
            os.close(staged.fd)
        return staged is not None

    def _drop_old(self) -> None:
        now = time.monotonic()
        for key in [key for key, staged in self._staged.items() if staged.deadline <= now]:
            logger.debug("shoal: the time of %s is over", key)
            self._drop(key)

    def _until_next_deadline(self) -> float | None:
        """Seconds, or None if nothing is staged."""
        deadlines = [staged.deadline for staged in self._staged.values()]
        return max(0.0, min(deadlines) - time.monotonic()) if deadlines else None


def _file_for(fd: int | None, size: int) -> int:
    """Checks that a file of at least `size` bytes came along."""
    if fd is None:
        raise Refused("bad", "a file descriptor is missing")
    found = os.fstat(fd)
    if not stat.S_ISREG(found.st_mode):
        raise Refused("bad", "the file descriptor is not that of a file")
    if found.st_size < size:
        raise Refused("bad", f"the file has {found.st_size} bytes, {size} are needed")
    return fd
