"""What the tests share: a client of the sockets, files in memory, and stand-ins for vLLM's requests."""

import json
import logging
import os
import socket
import struct
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.v1.request import RequestStatus


class Client:
    """A node's end of a socket."""

    def __init__(self, path: Path) -> None:
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.socket.settimeout(20)
        self.socket.connect(os.fspath(path))

    def ask(self, fd: int | None = None, **request: Any) -> dict[str, Any]:
        self.send(json.dumps(request).encode(), fd)
        return self.answer()

    def send(self, body: bytes, fd: int | None = None) -> None:
        frame = struct.pack(">I", len(body)) + body
        if fd is not None:
            frame = frame[socket.send_fds(self.socket, [frame], [fd]) :]
        if frame:
            self.socket.sendall(frame)

    def answer(self) -> dict[str, Any]:
        (length,) = struct.unpack(">I", self.receive(4))
        return json.loads(self.receive(length))

    def receive(self, count: int) -> bytes:
        received = b""
        while len(received) < count:
            part = self.socket.recv(count - len(received))
            if not part:
                raise EOFError
            received += part
        return received

    def is_closed(self) -> bool:
        """Waits for the end of the connection."""
        try:
            return self.socket.recv(1) == b""
        except ConnectionResetError:
            return True


class Grammar:
    """Remembers what it was fed."""

    def __init__(self) -> None:
        self.fed: list[list[int]] = []

    def accept_tokens(self, request_id: str, tokens: list[int]) -> bool:
        self.fed.append(tokens)
        return True


class Request:
    """The part of vLLM's `Request` that the connector reads."""

    def __init__(self, request_id: str, prompt: int, shoal: Any = None, grammar: Grammar | None = None) -> None:
        self.request_id = request_id
        self.kv_transfer_params = {"shoal": shoal} if shoal is not None else None
        self.num_prompt_tokens = prompt
        self.all_token_ids = list(range(100, 100 + prompt))
        self.status = RequestStatus.WAITING
        self.num_preemptions = 0
        self.num_computed_tokens = 0
        self.num_in_flight_tokens = 0
        self.structured_output_request = SimpleNamespace(grammar=grammar) if grammar is not None else None

    @property
    def num_tokens(self) -> int:
        return len(self.all_token_ids)

    @property
    def num_output_tokens(self) -> int:
        return self.num_tokens - self.num_prompt_tokens

    def run(self, output: int) -> "Request":
        """Runs until it has `output` tokens of output."""
        self.status = RequestStatus.RUNNING
        self.all_token_ids += range(900, 900 + output - self.num_output_tokens)
        self.num_computed_tokens = self.num_tokens - 1
        return self

    def preempt(self) -> None:
        self.status = RequestStatus.PREEMPTED
        self.num_computed_tokens = 0
        self.num_preemptions += 1


class Pool:
    """vLLM's blocks, counted as `BlockPool` counts them. Each block is its id."""

    def __init__(self) -> None:
        self.references: dict[int, int] = {}
        self.freed: list[int] = []

    def touch(self, blocks: list[int]) -> None:
        for block in blocks:
            self.references[block] = self.references.get(block, 0) + 1

    def free_blocks(self, ordered_blocks: Iterable[int]) -> None:
        for block in ordered_blocks:
            self.references[block] -= 1
            self.freed.append(block)
            if not self.references[block]:
                del self.references[block]


class Manager:
    """vLLM's block tables. Each request has blocks of its own."""

    def __init__(self) -> None:
        self.tables: dict[str, list[int]] = {}
        self.on_read = lambda: None
        self.block_pool = Pool()

    def get_blocks(self, request_id: str) -> SimpleNamespace:
        return SimpleNamespace(blocks=(self.tables[request_id],))

    def get_block_ids(self, request_id: str) -> tuple[list[int]]:
        ids = list(self.tables.get(request_id, []))
        self.on_read()
        return (ids,)


def memfd(size: int = 0, data: bytes = b"") -> int:
    fd = os.memfd_create("test")
    os.ftruncate(fd, max(size, len(data)))
    os.pwrite(fd, data, 0)
    return fd


def open_fds(of: str = "") -> set[str]:
    """What this process has open, of a name with `of` in it."""
    found = set()
    for fd in os.listdir("/proc/self/fd"):
        try:
            found.add(f"{fd} {os.readlink(f'/proc/self/fd/{fd}')}")
        except FileNotFoundError:
            continue
    return {entry for entry in found if of in entry}


@pytest.fixture(autouse=True)
def what_is_logged_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some versions of vLLM keep their loggers from `caplog` as soon as they are imported."""
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)


@pytest.fixture
def directory() -> Iterator[Path]:
    """A directory whose path is short enough for a socket."""
    with tempfile.TemporaryDirectory(prefix="shoal") as path:
        yield Path(path)
