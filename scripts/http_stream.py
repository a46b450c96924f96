"""Requests to nodes with nothing but the standard library: a stream of events, and small questions."""

import asyncio
import json
import time

# Seconds between two pieces of one answer; beyond it something hangs.
PIECE_WITHIN = 240


class HttpError(Exception):
    """An answer that is an error."""

    def __init__(self, status, body):
        super().__init__(f"{status}: {body[:300]}")
        self.status = status
        self.body = body


async def exchange(reader, writer, request, body):
    """Sends a request (its method, its path and the host it is for), with a body in JSON or in bytes, over a connection; gives what
    reads and writes it, the status and the headers. Closes it when it comes to nothing."""
    method, path, host = request
    try:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        head = f"{method} {path} HTTP/1.1\r\nhost: {host}\r\nconnection: close\r\ncontent-type: application/json\r\n"
        writer.write(f"{head}content-length: {len(data)}\r\n\r\n".encode() + data)
        await writer.drain()
        status = (await asyncio.wait_for(reader.readline(), PIECE_WITHIN)).split()
        if len(status) < 2:
            raise ConnectionResetError("the connection was closed without an answer")
        headers = {}
        while line := (await reader.readline()).decode().strip():
            name, _, value = line.partition(":")
            headers[name.lower()] = value.strip()
        return reader, writer, int(status[1]), headers
    except BaseException:
        writer.close()
        raise


async def _open(port, method, path, body):
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 20)
    return await exchange(reader, writer, (method, path, "127.0.0.1"), b"" if body is None else body)


async def _rest(reader, headers):
    if headers.get("transfer-encoding") == "chunked":
        whole = b""
        while size := int(await reader.readline(), 16):
            whole += await reader.readexactly(size)
            await reader.readline()
        return whole
    return await reader.read()


async def question(port, path, body=None, within=60):
    """The JSON answer to a GET, or to a POST of `body`."""

    async def ask():
        reader, writer, status, headers = await _open(port, "GET" if body is None else "POST", path, body)
        text = (await _rest(reader, headers)).decode()
        writer.close()
        if status // 100 != 2:
            raise HttpError(status, text)
        return json.loads(text)

    return await asyncio.wait_for(ask(), within)


async def move(node, request, to, copy="staged"):
    """Moves a request; its figures, or the reason why it stays."""
    try:
        return await question(node.http, f"/mesh/requests/{request}/migrate", {"to": to, "copy": copy})
    except HttpError as error:
        return str(error)


class Stream:
    """One streamed completion. `pieces` are (moment, text); `finish`, `usage` and `failed` say how it ended."""

    def __init__(self, port, path, body):
        self.port, self.path = port, path
        self.body = body | {"stream": True, "stream_options": {"include_usage": True}}
        self.id = None
        self.pieces = []
        self.finish = None
        self.usage = None
        self.failed = None
        self.asked = None
        self.done = asyncio.Event()
        self._news = asyncio.Condition()

    async def _tell(self):
        async with self._news:
            self._news.notify_all()

    async def run(self):
        self.asked = time.monotonic()
        try:
            await self._read()
        except (OSError, asyncio.TimeoutError, asyncio.IncompleteReadError, HttpError, ValueError) as error:
            self.failed = f"{type(error).__name__} {error}"
        self.done.set()
        await self._tell()

    async def _read(self):
        reader, writer, status, headers = await _open(self.port, "POST", self.path, self.body)
        try:
            if status != 200:
                raise HttpError(status, (await _rest(reader, headers)).decode())
            await self._follow(reader)
        finally:
            # A reader that is cancelled hangs up, which aborts the request.
            writer.close()
        if self.finish is None and self.failed is None:
            self.failed = "the stream ended without an end"

    async def _follow(self, reader):
        buffer = b""
        ended = False
        while not ended:
            size = int(await asyncio.wait_for(reader.readline(), PIECE_WITHIN), 16)
            buffer += await reader.readexactly(size)
            await reader.readline()
            ended = size == 0
            *events, buffer = buffer.split(b"\n\n")
            for event in events:
                if event.startswith(b"data: {"):
                    await self._take(json.loads(event[6:]))

    async def _take(self, chunk):
        if "error" in chunk:
            self.failed = str(chunk["error"])
            return
        self.id = chunk["id"].partition("-")[2]
        self.usage = chunk.get("usage") or self.usage
        for choice in chunk.get("choices", []):
            text = choice["delta"].get("content") if "delta" in choice else choice.get("text")
            if text:
                self.pieces.append((time.monotonic(), text))
            self.finish = choice.get("finish_reason") or self.finish
        await self._tell()

    async def until(self, condition):
        """Waits until `condition(self)` holds; false when the stream ended first."""
        async with self._news:
            await self._news.wait_for(lambda: condition(self) or self.done.is_set())
        return condition(self)

    @property
    def text(self):
        return "".join(text for _, text in self.pieces)

    @property
    def tokens(self):
        return self.usage["completion_tokens"] if self.usage else None

    def gaps(self, after=0.0, before=float("inf")):
        """Seconds between two consecutive pieces that both lie in the time given."""
        moments = [moment for moment, _ in self.pieces if after <= moment <= before]
        return [late - early for early, late in zip(moments, moments[1:])]
