"""An engine that takes no time: a server that looks like vLLM, and streams bytes made beforehand.

Run by bench_front.py. A streamed chat gets as many events as its `max_tokens` says, one every `seed` milliseconds, or all as
fast as they go with a seed of 0: two fields that everything in between passes on. What else a router or a node asks of a
vLLM is answered in vLLM's words.
"""

import argparse
import asyncio
import json
import re
import time

MODEL = "stub"
TOKENS_EACH = re.compile(rb'"max_tokens":\s*(\d+)')
EVERY_MS = re.compile(rb'"seed":\s*(\d+)')
LENGTH = re.compile(rb"(?i)\r\ncontent-length:\s*(\d+)")
BLOCKS, BLOCK_SIZE = 65536, 16

METRICS = """# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{{engine="0",model_name="stub"}} {running}.0
# HELP vllm:num_requests_waiting Number of requests waiting to be processed.
# TYPE vllm:num_requests_waiting gauge
vllm:num_requests_waiting{{engine="0",model_name="stub"}} 0.0
# HELP vllm:kv_cache_usage_perc KV-cache usage. 1 means 100 percent usage.
# TYPE vllm:kv_cache_usage_perc gauge
vllm:kv_cache_usage_perc{{engine="0",model_name="stub"}} {usage}
# HELP vllm:num_preemptions_total Cumulative number of preemption from the engine.
# TYPE vllm:num_preemptions_total counter
vllm:num_preemptions_total{{engine="0",model_name="stub"}} 0.0
# HELP vllm:cache_config_info Information of the LLMEngine CacheConfig
# TYPE vllm:cache_config_info gauge
vllm:cache_config_info{{block_size="16",engine="0",kv_cache_size_tokens="1048576",num_gpu_blocks="65536"}} 1.0
"""


def chunked(data):
    return b"%x\r\n%s\r\n" % (len(data), data)


def event(body):
    return chunked(b"data: " + json.dumps(body, separators=(",", ":")).encode() + b"\n\n")


def chunk(delta, finish=None):
    ids = [7042] if delta.get("content") else None
    choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish, "token_ids": ids}
    about = {"id": "chatcmpl-9f4adf96ef24899f", "object": "chat.completion.chunk", "created": 1795963204}
    return about | {"model": MODEL, "choices": [choice]}


STREAM_HEAD = (
    b"HTTP/1.1 200 OK\r\ndate: Sun, 29 Nov 2026 14:40:03 GMT\r\nserver: uvicorn\r\n"
    b"content-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n"
)
FIRST = event(chunk({"role": "assistant", "content": ""}))
MIDDLE = event(chunk({"content": " capital"}))
LAST = event(chunk({"content": "."}, "length"))
DONE = chunked(b"data: [DONE]\n\n") + b"0\r\n\r\n"


def usage(events):
    counts = {"prompt_tokens": 32, "total_tokens": 32 + events, "completion_tokens": events}
    return event(chunk({}) | {"choices": [], "usage": counts})


def whole(body, kind="application/json", status="200 OK"):
    text = body if isinstance(body, bytes) else json.dumps(body).encode()
    head = f"HTTP/1.1 {status}\r\nserver: uvicorn\r\ncontent-type: {kind}\r\ncontent-length: {len(text)}\r\n\r\n"
    return head.encode() + text


class Engine:
    """What all connections share."""

    def __init__(self):
        self.running = 0

    def answer(self, path):
        if path == "/version":
            return whole({"version": "0.32.0"})
        if path in ("/health", "/ping"):
            return whole(b"")
        if path == "/v1/models":
            model = {"id": MODEL, "object": "model", "created": int(time.time()), "owned_by": "vllm", "root": MODEL,
                     "parent": None, "max_model_len": 32768, "permission": []}
            return whole({"object": "list", "data": [model]})
        if path == "/metrics":
            text = METRICS.format(running=self.running, usage=self.running * 4 / BLOCKS)
            return whole(text.encode(), "text/plain; version=0.0.4; charset=utf-8")
        if path == "/load":
            return whole({"server_load": self.running})
        if path == "/tokenize":
            return whole({"count": 32, "max_model_len": 32768, "tokens": [7042] * 32, "token_strs": None})
        return whole({"detail": "Not Found"}, status="404 Not Found")


class Connection(asyncio.Protocol):
    """One connection, kept open, one request at a time."""

    def __init__(self, engine):
        self.engine, self.buffer, self.timer, self.streaming = engine, b"", None, False

    def connection_made(self, transport):
        self.transport = transport
        self.loop = asyncio.get_running_loop()

    def connection_lost(self, _):
        if self.streaming:
            self.end()

    def end(self):
        self.streaming = False
        self.engine.running -= 1
        if self.timer is not None:
            self.timer.cancel()

    def data_received(self, data):
        self.buffer += data
        while not self.streaming:
            head, found, rest = self.buffer.partition(b"\r\n\r\n")
            if not found:
                return
            length = LENGTH.search(head)
            size = int(length[1]) if length else 0
            if len(rest) < size:
                return
            self.buffer = rest[size:]
            self.take(head.split(b" ", 2)[1].decode().partition("?")[0], rest[:size])

    def take(self, path, body):
        if not path.endswith("/completions"):
            self.transport.write(self.engine.answer(path))
            return
        tokens, every = TOKENS_EACH.search(body), EVERY_MS.search(body)
        events = int(tokens[1]) if tokens else 16
        step = int(every[1]) / 1e3 if every else 0
        self.streaming = True
        self.engine.running += 1
        self.usage = usage(events) if b'"include_usage":true' in body.replace(b" ", b"") else b""
        # The empty first piece comes with the first token, as vLLM's does.
        self.transport.write(STREAM_HEAD + FIRST)
        self.due = self.loop.time()
        self.next(events, step)

    def next(self, left, step):
        while left > 1:
            self.transport.write(MIDDLE)
            left -= 1
            if step:
                self.due += step
                self.timer = self.loop.call_at(self.due, self.next, left, step)
                return
        self.finish()

    def finish(self):
        self.transport.write(LAST + self.usage + DONE)
        self.end()
        # What was asked meanwhile.
        self.data_received(b"")


async def serve(port):
    engine = Engine()
    server = await asyncio.get_running_loop().create_server(lambda: Connection(engine), "127.0.0.1", port, backlog=1024)
    await server.serve_forever()


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--port", required=True, type=int)
    asyncio.run(serve(parser.parse_args().port))


if __name__ == "__main__":
    main()
