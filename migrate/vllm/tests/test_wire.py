"""The server: frames, limits, file descriptors, and who owns a socket."""

import os
import socket
import stat
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import Client, memfd, open_fds

from shoal_vllm import wire
from shoal_vllm.fields import Refused
from shoal_vllm.wire import Server, SocketInUse


def echo(request: dict[str, Any], fd: int | None) -> dict[str, Any]:
    match request.get("op"):
        case "size":
            return {"size": os.fstat(fd).st_size if fd is not None else None}
        case "long":
            return {"text": "x" * wire.MAX_FRAME}
        case "fail":
            raise RuntimeError("broken")
        case "read":
            os.pwrite(fd, b"x", 0)
        case "gone":
            raise Refused("gone", "not here")
    return {"echo": request}


@pytest.fixture
def server(directory: Path) -> Iterator[Path]:
    path = directory / "test.sock"
    server = Server(path, echo)
    yield path
    server.close()


def settles(check: Any) -> bool:
    """Whether it becomes true soon; connection threads end in their own time."""
    deadline = time.monotonic() + 5
    while not check():
        if time.monotonic() > deadline:
            return False
        threading.Event().wait(0.01)
    return True


def test_requests_on_one_connection_are_answered_in_order(server: Path) -> None:
    client = Client(server)
    for number in range(3):
        client.send(b'{"number": %d}' % number)
    assert [client.answer()["echo"]["number"] for _ in range(3)] == [0, 1, 2]


def test_a_frame_may_arrive_byte_by_byte(server: Path) -> None:
    client = Client(server)
    for byte in b"\x00\x00\x00\x07" + b'{"a":1}':
        client.socket.sendall(bytes([byte]))
    assert client.answer() == {"ok": True, "echo": {"a": 1}}


@pytest.mark.parametrize("body", [b"", b"{", b"[1]", b"null", b"\xff", b"[" * 100_000, b'{"a":' + b"1" * 5000 + b"}"])
def test_junk_is_answered_bad_and_the_connection_closed(server: Path, body: bytes) -> None:
    client = Client(server)
    client.send(body)
    answer = client.answer()
    assert (answer["ok"], answer["why"]) == (False, "bad")
    assert client.is_closed()


def test_a_frame_over_the_limit_is_refused_before_it_is_read(server: Path) -> None:
    client = Client(server)
    client.socket.sendall((wire.MAX_FRAME + 1).to_bytes(4, "big"))
    assert client.answer()["why"] == "bad"
    assert client.is_closed()


def test_a_frame_at_the_limit_is_read(server: Path) -> None:
    client = Client(server)
    client.send(b'{"op":"size"}'.ljust(wire.MAX_FRAME))
    assert client.answer() == {"ok": True, "size": None}


def test_an_answer_over_the_limit_becomes_a_refusal(server: Path) -> None:
    client = Client(server)
    assert client.ask(op="long")["why"] == "unfit"
    assert client.ask(op="size")["ok"]


def test_a_refusal_keeps_the_connection_and_a_failure_too(server: Path) -> None:
    client = Client(server)
    assert client.ask(op="gone") == {"ok": False, "why": "gone", "message": "not here"}
    assert client.ask(op="fail")["why"] == "unfit"
    assert client.ask(op="size")["ok"]


def test_a_frame_that_is_not_finished_in_time_ends_the_connection(server: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "FRAME_SECONDS", 0.1)
    client = Client(server)
    client.socket.sendall(b"\x00\x00\x00\x07{")
    assert client.is_closed()


def test_an_idle_connection_is_closed(server: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "IDLE_SECONDS", 0.1)
    assert Client(server).is_closed()


def test_a_file_descriptor_comes_along_and_is_closed_after(server: Path) -> None:
    client = Client(server)
    assert client.ask(op="size")["size"] is None
    before = open_fds()
    fd = memfd(size=123)
    assert client.ask(op="size", fd=fd)["size"] == 123
    os.close(fd)
    assert client.ask(op="size")["size"] is None
    assert open_fds() == before


@pytest.mark.parametrize("body", [b"{", b'{"op":"fail"}', b'{"op":"gone"}'])
def test_a_file_descriptor_is_closed_after_a_failure(server: Path, body: bytes) -> None:
    before = open_fds()
    client = Client(server)
    fd = memfd(size=1)
    client.send(body, fd)
    client.answer()
    os.close(fd)
    client.socket.close()
    assert settles(lambda: open_fds() == before)


def test_a_file_descriptor_of_an_unfinished_frame_is_closed(server: Path) -> None:
    before = open_fds()
    client = Client(server)
    fd = memfd(size=1)
    socket.send_fds(client.socket, [b"\x00\x00\x00\x07{"], [fd])
    client.socket.close()
    os.close(fd)
    assert settles(lambda: open_fds() == before)


def test_two_file_descriptors_are_refused_and_closed(server: Path) -> None:
    before = open_fds()
    client = Client(server)
    fds = [memfd(size=1), memfd(size=1)]
    socket.send_fds(client.socket, [b"\x00\x00\x00\x02{}"], fds)
    assert client.answer()["why"] == "bad"
    for fd in fds:
        os.close(fd)
    client.socket.close()
    assert settles(lambda: open_fds() == before)


def test_a_file_that_cannot_be_used_is_bad(server: Path) -> None:
    client = Client(server)
    fd = os.open("/dev/null", os.O_RDONLY)
    assert client.ask(op="read", fd=fd)["why"] == "bad"
    os.close(fd)


def test_connections_over_the_limit_are_closed_at_once(server: Path) -> None:
    clients = [Client(server) for _ in range(wire.MAX_CONNECTIONS)]
    assert all(client.ask(op="size")["ok"] for client in clients)
    assert Client(server).is_closed()
    clients.pop().socket.close()

    def there_is_room() -> bool:
        try:
            return Client(server).ask(op="size")["ok"]
        except (EOFError, OSError):
            return False

    assert settles(there_is_room)


def test_the_socket_is_for_this_user_only(server: Path) -> None:
    assert stat.S_IMODE(server.stat().st_mode) == 0o600


def test_a_stale_socket_is_replaced(directory: Path) -> None:
    path = directory / "test.sock"
    left_behind = socket.socket(socket.AF_UNIX)
    left_behind.bind(os.fspath(path))
    left_behind.close()
    server = Server(path, echo)
    assert Client(path).ask(op="size")["ok"]
    server.close()


def test_the_socket_of_a_running_engine_is_not_replaced(server: Path) -> None:
    with pytest.raises(SocketInUse, match="another running engine"):
        Server(server, echo)
    assert Client(server).ask(op="size")["ok"]


def test_a_file_in_place_of_the_socket_is_left_alone(directory: Path) -> None:
    path = directory / "test.sock"
    path.write_text("mine")
    with pytest.raises(SocketInUse, match="not a socket"):
        Server(path, echo)
    assert path.read_text() == "mine"


def test_a_path_that_is_too_long_is_said_so(directory: Path) -> None:
    with pytest.raises(SocketInUse, match="too long"):
        Server(directory / ("x" * 120), echo)


def test_close_ends_connections_and_removes_the_socket(directory: Path) -> None:
    path = directory / "test.sock"
    threads = threading.active_count()
    server = Server(path, echo)
    client = Client(path)
    assert client.ask(op="size")["ok"]
    server.close()
    server.close()
    assert client.is_closed()
    assert not path.exists()
    assert settles(lambda: threading.active_count() == threads)


def test_close_leaves_the_socket_of_a_successor(directory: Path) -> None:
    path = directory / "test.sock"
    server = Server(path, echo)
    path.unlink()
    successor = Server(path, echo)
    server.close()
    assert Client(path).ask(op="size")["ok"]
    successor.close()
