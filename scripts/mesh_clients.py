"""Clients of a mesh whose nodes come and go.

They ask for streams whose whole text is known beforehand, at one node after the other until one takes them, and hold what
comes against it. What may happen to them, and what may not, the check decides that uses them.
"""

import asyncio
import json
import random
import time
from collections import Counter, deque
from typing import NamedTuple

from http_stream import HttpError, Stream, exchange
from mesh_nodes import Failure, note, share
from prompts import SENTENCE, TOPICS

READY_WITHIN = 120
# Seconds for a connection; a node without a cable never answers.
CONNECT_WITHIN = 5
# Times that a client goes through all nodes before it gives up.
ROUNDS = 4
# Seconds between two nodes that do not take a request.
PAUSE = 0.1
# Figures of streams that are kept: the newest. A long run has more than memory should hold.
KEPT = 100_000


class TurnedAway(Exception):
    """No connection: nothing has happened to the request."""


async def ask(node, path, body, method="POST"):
    """As `http_stream.exchange`, at wherever the node is, and told apart from a node that cannot be reached."""
    try:
        opening = asyncio.open_connection(node.address, node.http, limit=1 << 20)
        reader, writer = await asyncio.wait_for(opening, CONNECT_WITHIN)
    except (OSError, asyncio.TimeoutError) as error:
        raise TurnedAway(f"no connection: {error or 'timeout'}") from error
    return await exchange(reader, writer, (method, path, node.address), body)


async def answer(node, path, body, method="POST", within=60):
    """Status, headers and body of an answer that is not streamed."""

    async def whole():
        reader, writer, status, headers = await ask(node, path, body, method)
        try:
            return status, headers, await reader.read()
        finally:
            writer.close()

    return await asyncio.wait_for(whole(), within)


async def requests_of(nodes):
    """The requests that these nodes are home of and that have begun to give tokens, as (id, home, host); and all that each
    hosts, in the same form."""
    answers = await asyncio.gather(*(answer(node, "/mesh/requests", b"", "GET") for node in nodes))
    placed, hosted = set(), set()
    for _, _, body in answers:
        told = json.loads(body)
        for row in told["requests"]:
            key = (row["id"], row["home"], row["host"])
            if row["home"] == told["this"] and row["output_tokens"] > 0:
                placed.add(key)
            if row["phase"] is not None:
                hosted.add((row["id"], row["home"], told["this"]))
    return placed, hosted


class Case:
    """A request that nothing but its number decides, and the text that an idle node gives. Every second one is seeded."""

    def __init__(self, number, model, tokens):
        text = f"{SENTENCE * (number % 4)}Tell me {number + 2} things about {TOPICS[number % len(TOPICS)]}."
        sampling = {"temperature": 0.8, "top_p": 0.95, "seed": 1000 + number} if number % 2 else {"temperature": 0}
        self.tokens = tokens
        self.body = {"model": model, "max_tokens": tokens, "ignore_eos": True} | sampling
        if number % 3 == 2:
            self.path = "/v1/completions"
            self.body["prompt"] = text
        else:
            self.path = "/v1/chat/completions"
            self.body["messages"] = [{"role": "user", "content": text}]
        self.expected = None


class Attempt(Stream):
    """One request at one node. `ended` says how: `finished`, `turned away` before anything began, `cut` in the middle by the
    end of its connection, `failed` by an error, or `hung`."""

    def __init__(self, node, case, within):
        super().__init__(node.http, case.path, case.body)
        self.node, self.case, self.within = node, case, within
        self.host = self.status = self.retry_after = self.ended = self.over = None

    async def run(self):
        self.asked = time.monotonic()
        try:
            await asyncio.wait_for(self._read(), self.within)
            self.ended = "failed" if self.failed else "finished"
        except asyncio.TimeoutError:
            self._end("hung", f"no end within {self.within} s")
        except TurnedAway as error:
            self._end("turned away", str(error))
        except HttpError as error:
            self._end("turned away" if error.status in (429, 503) else "failed", str(error))
        # A chunk that ends in the middle has no length, or is too short.
        except (OSError, EOFError, ValueError) as error:
            self._end("cut", f"{type(error).__name__} {error}")
        self.over = time.monotonic()
        self.done.set()
        await self._tell()

    def _end(self, how, why):
        self.ended, self.failed = how, why

    async def _read(self):
        reader, writer, self.status, headers = await ask(self.node, self.path, self.body)
        try:
            self.host = headers.get("x-shoal-host")
            self.retry_after = headers.get("retry-after")
            if self.status != 200:
                raise HttpError(self.status, (await reader.read()).decode(errors="replace"))
            await self._follow(reader)
        finally:
            writer.close()
        if self.finish is None and self.failed is None:
            self.failed = "the stream ended without an end"

    def wrong(self):
        """What is wrong with what came so far; nothing may be lost, doubled or changed."""
        expected = self.case.expected
        if self.ended == "finished":
            good = (self.text, self.finish, self.tokens) == (expected, "length", self.case.tokens)
        else:
            good = expected.startswith(self.text)
        if good:
            return None
        same = next((at for at, (one, other) in enumerate(zip(self.text, expected)) if one != other),
                    min(len(self.text), len(expected)))
        return (f"{self.finish}, {self.tokens} tokens of {self.case.tokens}; from character {same} on "
                f"{self.text[same:same + 60]!r}, expected {expected[same:same + 60]!r}")

    def said(self):
        return f"{self.ended} at {self.node.name} (host {self.host}) after {len(self.pieces)} pieces: {self.failed}"


async def learn(nodes, cases, flags=(), at_once=8):
    """Asks a single idle node for the answer to every case."""
    before, nodes.options = nodes.options, [*nodes.options, *flags]
    solo = nodes.start("solo", seeds=[])
    nodes.options = before
    await nodes.wait_until_ready([solo], READY_WITHIN)
    gate = asyncio.Semaphore(at_once)

    async def one(case):
        async with gate:
            attempt = Attempt(solo, case, within=READY_WITHIN)
            await attempt.run()
            if attempt.ended != "finished" or attempt.tokens != case.tokens:
                raise Failure(f"the idle node: {attempt.said()}, {attempt.tokens} tokens")
            case.expected = attempt.text

    await asyncio.gather(*(one(case) for case in cases))
    await nodes.stop(solo)
    note(f"an idle node has told the answers to {len(cases)} requests")


class Fault(NamedTuple):
    """What was done to a node, and when; `until` is when all was well again."""

    node: str
    kind: str
    since: float
    until: float


class Faults:
    """All that was done."""

    def __init__(self):
        self.rows = []

    def begin(self, node, kind):
        self.rows.append(Fault(node.id, kind, time.monotonic(), float("inf")))
        return len(self.rows) - 1

    def end(self, number):
        self.rows[number] = self.rows[number]._replace(until=time.monotonic())

    def hit(self, id, since, until, kinds):
        """Whether one of these was done to the node of this id in that time."""
        return any(row.node == id and row.kind in kinds and row.since <= until and since <= row.until for row in self.rows)


class Ended(NamedTuple):
    """A stream that finished."""

    id: str
    home: str
    host: str
    since: float
    until: float
    gap: float


class Tally:
    """What became of the requests."""

    def __init__(self):
        self.begun = self.finished = self.tokens = self.lost = self.turned = self.refused = 0
        self.statuses = Counter()
        self.errors = []
        self.ended = deque(maxlen=KEPT)

    def finish(self, attempt):
        if wrong := attempt.wrong():
            self.errors.append(f"wrong answer of {attempt.node.name} (host {attempt.host}, id {attempt.id}): {wrong}")
            return
        self.finished += 1
        self.tokens += attempt.tokens
        gap = max(attempt.gaps(), default=0.0)
        self.ended.append(Ended(attempt.id, attempt.node.id, attempt.host, attempt.asked, attempt.over, gap))


class Clients:
    """Clients that ask one request after the other, until they are told to stop.

    `entries(number, dice)` gives the nodes that the client of this number asks, in its order. `excuse(attempt)` says of one that
    did not finish what follows: `next` node, connection `lost` with its home, request `refused`, or None: it is an error.
    """

    def __init__(self, cases, entries, excuse, seed=1, within=120):
        self.cases, self.entries, self.excuse, self.seed, self.within = cases, entries, excuse, seed, within
        self.tally = Tally()
        self.over = asyncio.Event()

    async def run(self, count):
        await asyncio.gather(*(self._client(number) for number in range(count)))

    async def _client(self, number):
        dice = random.Random(f"{self.seed} {number}")
        while not self.over.is_set():
            await self.request(number, dice)

    async def request(self, number, dice):
        """One request, until somebody takes it and it ends."""
        self.tally.begun += 1
        case = dice.choice(self.cases)
        attempt = None
        for _ in range(ROUNDS):
            for node in self.entries(number, dice):
                attempt = Attempt(node, case, self.within)
                await attempt.run()
                if self._ended(attempt):
                    return
                await asyncio.sleep(PAUSE)
        self.tally.errors.append(f"no node took a request: {attempt.said()}")

    def _ended(self, attempt):
        """Whether the request is over, one way or the other."""
        tally = self.tally
        tally.statuses[attempt.status or "no connection"] += 1
        if attempt.ended == "finished":
            tally.finish(attempt)
            return True
        if wrong := attempt.wrong():
            tally.errors.append(f"wrong beginning at {attempt.node.name}: {wrong}")
            return True
        excuse = self.excuse(attempt)
        if excuse == "next":
            tally.turned += 1
            return False
        if excuse == "lost":
            tally.lost += 1
        elif excuse == "refused":
            tally.refused += 1
        else:
            tally.errors.append(attempt.said())
        return True


def middle_and_worst(values):
    """P50 and P99 in seconds."""
    return f"{share(values, 0.5):.2f}/{share(values, 0.99):.2f} s"
