"""Well-behaved clients of a mesh, in a process of their own: what a check does beside them must not make them look slow.

At each port one client streams completions one after the other over one connection, and one asks for the view. Commands are
lines of JSON on standard input, each answered by a line of JSON on standard output:

  {"do": "use", "ports": [..]}   only these ports from now on; answered when no stream is left at another
  {"do": "mark"}                 what was seen since the last mark

The process ends with its input. Run by check_strangers.py.
"""

import asyncio
import json
import sys
import time

# Seconds between two looks at a view, after an error, and until an answer counts as none.
LOOK_EVERY = 0.25
AFTER_ERROR = 0.2
PIECE_WITHIN = 60
TOKENS = 48
# Errors that are told in full.
TOLD = 5


class Kept:
    """A connection that is kept from one request to the next."""

    def __init__(self, port):
        self.port = port
        self.reader = self.writer = None

    def close(self):
        if self.writer is not None:
            self.writer.close()
        self.reader = self.writer = None

    async def ask(self, method, path, body=None):
        """Sends a request; the pieces of its answer, which has to be 200."""
        if self.writer is None:
            self.reader, self.writer = await asyncio.open_connection("127.0.0.1", self.port, limit=1 << 20)
        data = b"" if body is None else json.dumps(body).encode()
        head = (f"{method} {path} HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\n"
                f"content-length: {len(data)}\r\n\r\n")
        self.writer.write(head.encode() + data)
        head = (await asyncio.wait_for(self.reader.readuntil(b"\r\n\r\n"), PIECE_WITHIN)).decode().lower()
        if " 200 " not in head.partition("\r\n")[0]:
            raise ConnectionError(f"answered {head.splitlines()[0]}")
        async for piece in self.pieces(head):
            yield piece

    async def pieces(self, head):
        if "transfer-encoding: chunked" not in head:
            yield await self.reader.readexactly(int(head.partition("content-length: ")[2].split()[0]))
            return
        while True:
            size = int(await asyncio.wait_for(self.reader.readline(), PIECE_WITHIN), 16)
            piece = await self.reader.readexactly(size)
            await self.reader.readexactly(2)
            if not size:
                return
            yield piece


class Guest:
    """The clients at one port, and what they have seen since the last mark."""

    def __init__(self, port, model):
        self.port, self.model = port, model
        self.wanted, self.rests = asyncio.Event(), asyncio.Event()
        self.rests.set()
        self.last = None
        self.first_text = None
        self.forget()

    def forget(self):
        self.streams = self.tokens = self.looks = 0
        self.gap = 0.0
        self.errors, self.views = [], {}

    def moment(self):
        """A token has come, or it is asked how long none has."""
        now = time.monotonic()
        if self.last is not None:
            self.gap = max(self.gap, now - self.last)
        return now

    def wrong(self, what, error):
        self.errors.append(f"port {self.port}, {what}: {type(error).__name__} {error}")

    async def stream_on(self):
        kept = Kept(self.port)
        while True:
            if not self.wanted.is_set():
                kept.close()
                self.last = None
                self.rests.set()
                await self.wanted.wait()
                self.rests.clear()
                self.last = time.monotonic()
            try:
                await self.stream(kept)
            except (OSError, ValueError, EOFError, asyncio.TimeoutError) as error:
                kept.close()
                self.wrong("stream", error)
                await asyncio.sleep(AFTER_ERROR)

    async def stream(self, kept):
        body = {"model": self.model, "prompt": "a guest", "max_tokens": TOKENS, "ignore_eos": True, "seed": 1, "stream": True}
        text, buffer = "", b""
        async for piece in kept.ask("POST", "/v1/completions", body):
            *events, buffer = (buffer + piece).split(b"\n\n")
            for event in events:
                if not event.startswith(b"data: {"):
                    continue
                told = json.loads(event[6:])
                if "error" in told:
                    raise ValueError(str(told["error"]))
                for choice in told["choices"]:
                    text += choice["text"]
                    self.tokens += 1
                    self.last = self.moment()
        # The simulated engine says the same to the same question.
        self.first_text = self.first_text or text
        if text != self.first_text:
            raise ValueError(f"another text than before, {len(text)} instead of {len(self.first_text)} characters")
        self.streams += 1

    async def look_on(self):
        kept = Kept(self.port)
        while True:
            if not self.wanted.is_set():
                kept.close()
                await self.wanted.wait()
            try:
                whole = b"".join([piece async for piece in kept.ask("GET", "/mesh/nodes")])
                rows = json.loads(whole)["nodes"]
                seen = " ".join(sorted(f"{row['node']}/{row['facts']['incarnation']}" for row in rows))
                self.views[seen] = self.views.get(seen, 0) + 1
                self.looks += 1
                await asyncio.sleep(LOOK_EVERY)
            except (OSError, ValueError, EOFError, asyncio.TimeoutError) as error:
                kept.close()
                if self.wanted.is_set():
                    self.wrong("view", error)
                await asyncio.sleep(AFTER_ERROR)

    def mark(self):
        self.moment()
        told = {"streams": self.streams, "tokens": self.tokens, "looks": self.looks, "gap": self.gap, "views": self.views,
                "errors": len(self.errors), "told": self.errors[:TOLD]}
        self.forget()
        return told


async def obey(command, guests):
    if command["do"] == "mark":
        return {port: guest.mark() for port, guest in guests.items()}
    for port, guest in guests.items():
        if port in command["ports"]:
            guest.wanted.set()
        else:
            guest.wanted.clear()
    await asyncio.gather(*(guest.rests.wait() for port, guest in guests.items() if port not in command["ports"]))
    return {}


async def main(model, ports):
    guests = {port: Guest(port, model) for port in ports}
    tasks = [asyncio.create_task(work) for guest in guests.values() for work in (guest.stream_on(), guest.look_on())]
    loop = asyncio.get_running_loop()
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        print(json.dumps(await obey(json.loads(line), guests)), flush=True)
    # A task whose answer comes at that moment may miss that it is cancelled.
    while tasks:
        for task in tasks:
            task.cancel()
        _, tasks = await asyncio.wait(tasks, timeout=1)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], [int(port) for port in sys.argv[2:]]))
