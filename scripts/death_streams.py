"""The streams of check_deaths.py: requests that differ, answers that are held against an unbroken run."""

import asyncio
import time

from http_stream import HttpError, Stream
from mesh_nodes import Failure, note
from prompts import SENTENCE, TOPICS

MODEL_ID = "smollm2-135m"
# Output of a stream. 64 of them together take two cores the better part of a minute.
OUTPUT = 64
# Requests at once in the unbroken run.
QUIET_AT_ONCE = 12
# Seconds until all streams of a wave must have ended: ten times what they take.
ENDED_WITHIN = 300
READY_WITHIN = 120


def body(number):
    """The request with this number: chat and completion, greedy and seeded."""
    text = f"{SENTENCE * (number % 4 // 2)}Tell me {number + 2} things about {TOPICS[number % len(TOPICS)]}."
    if number % 8 == 7:
        # Characters of several tokens: the death of a host may part them.
        text = f"The word for {TOPICS[number % len(TOPICS)]} in Chinese, Japanese, Korean, Hindi and Russian:"
    sampling = {"temperature": 0.8, "top_p": 0.95, "seed": 1000 + number} if number % 2 else {"temperature": 0}
    request = {"model": MODEL_ID, "max_tokens": OUTPUT, "ignore_eos": True} | sampling
    # Log-probabilities tell the tokens one by one; every fifth stream does without, as most clients do.
    counts = number % 5 != 4
    if number % 3 == 2:
        return "/v1/completions", request | {"prompt": text} | ({"logprobs": 0} if counts else {})
    return "/v1/chat/completions", request | {"messages": [{"role": "user", "content": text}], "logprobs": counts}


class Told(Stream):
    """A stream that knows its tokens one by one, and whether it was turned away before it began."""

    def __init__(self, port, number):
        super().__init__(port, *body(number))
        self.number = number
        # Text of each token, as its log-probability names it.
        self.drawn = []
        # When tokens came, with or without text to show for them.
        self.moments = []
        self.turned_away = False

    async def _read(self):
        try:
            await super()._read()
        except ConnectionRefusedError:
            self.turned_away = True
            raise
        except HttpError as error:
            self.turned_away = error.status == 503
            raise

    async def _take(self, chunk):
        for choice in chunk.get("choices", []):
            shown = choice.get("logprobs") or {}
            tokens = shown["tokens"] if "tokens" in shown else [token["token"] for token in shown.get("content", [])]
            self.drawn += tokens
            if tokens or choice.get("text") or choice.get("delta", {}).get("content"):
                self.moments.append(time.monotonic())
        await super()._take(chunk)

    def longest_gap(self, since):
        """The longest pause between two tokens that ended after this moment."""
        pairs = zip(self.moments, self.moments[1:])
        return max((late - early for early, late in pairs if late > since), default=0.0)

    def same_as(self, unbroken):
        return (self.text, self.drawn) == (unbroken.text, unbroken.drawn)

    def begins_as(self, unbroken, tokens, characters):
        """Whether what was delivered when that many had come is what the unbroken run begins with."""
        return self.drawn[:tokens] == unbroken.drawn[:tokens] and unbroken.text.startswith(self.text[:characters])

    def faults(self, unbroken):
        """What is wrong with it, whoever ran it: an error, or a token lost or doubled."""
        if not self.done.is_set():
            return [f"did not end, {len(self.moments)} pieces came"]
        if self.failed:
            return [f"failed after {len(self.moments)} pieces: {self.failed}"]
        found = []
        if self.finish != "length" or self.tokens != OUTPUT or self.usage != unbroken.usage:
            found.append(f"ended with {self.finish} and {self.usage}, the unbroken run with {unbroken.usage}")
        if unbroken.drawn:
            if len(self.drawn) != OUTPUT:
                found.append(f"told {len(self.drawn)} tokens of {OUTPUT}")
            joined = "".join(self.drawn)
            # A token that is part of a character does not show which.
            if "\ufffd" not in joined and joined != self.text:
                found.append(f"its text {self.text!r} is not that of its tokens {joined!r}")
        return found


async def unbroken_run(nodes, count):
    """Every distinct request on a node of its own that nobody disturbs."""
    solo = nodes.start("solo", seeds=[])
    await nodes.wait_until_ready([solo], READY_WITHIN)
    gate = asyncio.Semaphore(QUIET_AT_ONCE)
    streams = [Told(solo.http, number) for number in range(count)]

    async def one(stream):
        async with gate:
            await stream.run()

    began = time.monotonic()
    await asyncio.gather(*(one(stream) for stream in streams))
    for stream in streams:
        if faults := stream.faults(stream):
            raise Failure(f"the unbroken run of request {stream.number}: {faults[0]}")
    await nodes.stop(solo)
    note(f"an unbroken run of {count} requests on a node of their own: {time.monotonic() - began:.0f} s")
    return streams


async def all_ended(tasks):
    """Waits for streams, and cancels what does not end."""
    _, late = await asyncio.wait(tasks, timeout=ENDED_WITHIN)
    for task in late:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
