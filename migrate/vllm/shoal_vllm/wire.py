"""The socket that a node speaks to: frames, file descriptors, and a server with limits.

A frame is a big-endian u32 length and one JSON object of that many bytes. A file descriptor may come with the first byte of a
request (`SCM_RIGHTS`). Requests on one connection are answered in order. An answer is `{"ok": true, ...}` or
`{"ok": false, "why": ..., "message": ...}`, see `fields.Refused`.
"""

import array
import contextlib
import errno
import fcntl
import json
import logging
import os
import socket
import stat
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .fields import Refused

logger = logging.getLogger("vllm.shoal")

MAX_FRAME = 4 << 20
"""Bytes of the JSON object. A wait_held answer for 500,000 tokens fits."""
MAX_CONNECTIONS = 32
"""A node needs one or two; the rest is room for a restarted one."""
FRAME_SECONDS = 5.0
"""A peer that began a frame must finish it within this time, and take an answer within it."""
IDLE_SECONDS = 60.0
"""A connection on which nothing is asked for this long is closed."""
MAX_SOCKET_PATH = 107
"""Linux keeps 108 bytes for the path of a Unix socket, and the last one is 0."""

Handler = Callable[[dict[str, Any], int | None], dict[str, Any]]
"""Answers one request. The file descriptor is closed after the call; who wants to keep it duplicates it."""


class SocketInUse(RuntimeError):
    """Another process answers on this socket."""


class Server:
    """Answers requests on a Unix socket, each connection in its own thread."""

    def __init__(self, path: Path, handler: Handler) -> None:
        self._path = path
        self._handler = handler
        self._lock = threading.Lock()
        self._connections: set[socket.socket] = set()
        self._listener: socket.socket | None
        self._listener, self._inode = _listen(path)
        threading.Thread(target=self._accept, name=f"shoal {path.name}", daemon=True).start()

    def close(self) -> None:
        """Stops answering and removes the socket, if it is still ours. Calling it again does nothing."""
        with self._lock:
            listener, self._listener = self._listener, None
            connections = list(self._connections)
        if listener is None:
            return
        for open_socket in (listener, *connections):
            _shut(open_socket)
        listener.close()
        if _inode(self._path) == self._inode:
            self._path.unlink(missing_ok=True)

    def _accept(self) -> None:
        while (listener := self._listener) is not None:
            try:
                connection, _ = listener.accept()
            except OSError as error:
                if self._listener is None:
                    return
                # For example out of file descriptors, which passes.
                logger.warning("shoal: cannot accept a connection: %s", error)
                time.sleep(0.1)
                continue
            with self._lock:
                full = len(self._connections) >= MAX_CONNECTIONS or self._listener is None
                if not full:
                    self._connections.add(connection)
            if full:
                connection.close()
                continue
            threading.Thread(target=self._serve, args=(connection,), name="shoal connection", daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        try:
            with connection:
                while self._answer_one(connection):
                    pass
        except OSError as error:
            logger.debug("shoal: a connection ended: %s", error)
        finally:
            with self._lock:
                self._connections.discard(connection)

    def _answer_one(self, connection: socket.socket) -> bool:
        """Reads and answers one request. False when the connection is over."""
        fd: int | None = None
        try:
            frame = read_frame(connection)
            if frame is None:
                return False
            body, fd = frame
            answer = {"ok": True, **self._handler(parse(body), fd)}
        except Refused as refused:
            answer = _refusal(refused)
        except OSError as error:
            if fd is None:
                raise
            answer = _refusal(Refused("bad", f"the file cannot be used: {error}"))
        except Exception as error:
            # The engine goes on serving; the node takes this as "cannot move it".
            logger.exception("shoal: a request from the node failed")
            answer = _refusal(Refused("unfit", f"internal error: {error!r}"))
        finally:
            if fd is not None:
                os.close(fd)
        connection.settimeout(FRAME_SECONDS)
        connection.sendall(encode(answer))
        return answer.get("why") != "bad"


def parse(body: bytes) -> dict[str, Any]:
    """The JSON object in a frame."""
    try:
        request = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise Refused("bad", "not JSON") from error
    if not isinstance(request, dict):
        raise Refused("bad", "not a JSON object")
    return request


def encode(answer: dict[str, Any]) -> bytes:
    """The frame of an answer. One that is too long becomes a refusal."""
    body = json.dumps(answer, separators=(",", ":")).encode()
    if len(body) > MAX_FRAME:
        body = json.dumps(_refusal(Refused("unfit", f"the answer has {len(body)} bytes, over the limit"))).encode()
    return len(body).to_bytes(4, "big") + body


def read_frame(connection: socket.socket) -> tuple[bytes, int | None] | None:
    """One frame, and the file descriptor that came with it, which the caller must close. None when the peer is done or idle."""
    connection.settimeout(IDLE_SECONDS)
    try:
        head, fd = _receive_first(connection)
    except TimeoutError:
        return None
    if not head:
        return None
    try:
        deadline = time.monotonic() + FRAME_SECONDS
        head += _receive(connection, 4 - len(head), deadline)
        length = int.from_bytes(head, "big")
        if length > MAX_FRAME:
            raise Refused("bad", f"a frame of {length} bytes is over the limit of {MAX_FRAME}")
        return _receive(connection, length, deadline), fd
    except BaseException:
        if fd is not None:
            os.close(fd)
        raise


def _receive_first(connection: socket.socket) -> tuple[bytes, int | None]:
    """The first bytes of a frame, at most its length field, and the file descriptor that came with them."""
    room = socket.CMSG_LEN(array.array("i").itemsize)
    head, control, flags, _ = connection.recvmsg(4, room, socket.MSG_CMSG_CLOEXEC)
    fds = array.array("i")
    for level, kind, data in control:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            fds.frombytes(data[: len(data) - len(data) % fds.itemsize])
    if len(fds) <= 1 and not flags & socket.MSG_CTRUNC:
        return head, fds[0] if fds else None
    for fd in fds:
        os.close(fd)
    raise Refused("bad", "more than one file descriptor")


def _receive(connection: socket.socket, count: int, deadline: float) -> bytes:
    """Exactly `count` bytes before the deadline. File descriptors that come with them are closed by the kernel."""
    received = bytearray()
    while len(received) < count:
        left = deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError("the frame was not finished in time")
        connection.settimeout(left)
        part = connection.recv(min(count - len(received), 1 << 16))
        if not part:
            raise ConnectionError("the peer left in the middle of a frame")
        received += part
    return bytes(received)


def _refusal(refused: Refused) -> dict[str, Any]:
    return {"ok": False, "why": refused.why, "message": refused.message}


def _listen(path: Path) -> tuple[socket.socket, tuple[int, int] | None]:
    """A socket that listens on `path`, and the file's identity. A socket file that nobody answers on is replaced."""
    if len(os.fsencode(path)) > MAX_SOCKET_PATH:
        raise SocketInUse(f"the path {path} is too long for a socket ({MAX_SOCKET_PATH} bytes); choose a shorter directory.")
    # Two engines that start at once must not both find the socket stale.
    directory = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(directory, fcntl.LOCK_EX)
        _clear_stale(path)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            # Before bind, so that the file never has another mode.
            os.fchmod(listener.fileno(), 0o600)
            listener.bind(os.fspath(path))
            listener.listen(MAX_CONNECTIONS)
        except BaseException:
            listener.close()
            raise
        return listener, _inode(path)
    finally:
        os.close(directory)


def _clear_stale(path: Path) -> None:
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise SocketInUse(f"{path} exists and is not a socket.")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(1.0)
        failed = probe.connect_ex(os.fspath(path))
    if failed != errno.ECONNREFUSED:
        raise SocketInUse(f"another running engine uses {path}; give each engine its own directory.")
    path.unlink()


def _inode(path: Path) -> tuple[int, int] | None:
    try:
        found = path.lstat()
    except FileNotFoundError:
        return None
    return found.st_dev, found.st_ino


def _shut(open_socket: socket.socket) -> None:
    """Wakes the thread that waits on the socket. A socket that is already closed is fine."""
    with contextlib.suppress(OSError):
        open_socket.shutdown(socket.SHUT_RDWR)
