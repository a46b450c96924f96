"""The load of soak.py: clients of all manners, good and bad, and what each may be answered."""

import asyncio
import json
import random
import time
from collections import Counter

from mesh_clients import Attempt, Case, Clients, TurnedAway, answer

MODEL_ID = "soak"
ANSWER_WITHIN = 120

# Tokens of streams.
SHORT, LONG = (8, 16, 32), (250, 500, 900)
CASES = 24
# A prompt as ids, of which this many fill most of what one node may hold.
BIG_PROMPT, BIG_OUTPUT = 3000, 4
# What a node takes as a body, and what is beyond.
BODY_BYTES = 256 * 1024
# Seconds between two of a kind.
BAD_EVERY, CANCEL_EVERY, BIG_EVERY = 0.2, 0.2, 1.5

# Clients that always have a stream open. All together they leave room: only a burst fills the mesh.
SHORT_CLIENTS, LONG_CLIENTS = 6, 4


def bad_requests():
    """(method, path, body, the status that is right): what clients should not send."""
    prompt = {"model": MODEL_ID, "prompt": "Who is there?"}
    yield "POST", "/v1/completions", b"{", 400
    yield "POST", "/v1/completions", json.dumps(prompt | {"max_tokens": -1}).encode(), 400
    yield "POST", "/v1/completions", json.dumps(prompt | {"model": "nobody"}).encode(), 404
    yield "POST", "/v1/completions", json.dumps(prompt | {"prompt": [300] * 30_000}).encode(), 400
    yield "POST", "/v1/chat/completions", b'{"model":"soak","messages":[]}', 400
    yield "POST", "/v1/completions", b'{"model":"soak","prompt":"' + b"x" * BODY_BYTES + b'"}', 413
    yield "POST", "/v1/completions", b"\xff\x00" * 2000, 400
    yield "GET", "/v1/completions", b"", 405
    yield "POST", "/nowhere", b"{}", 404


def cases():
    """Short and long streams."""
    return ([Case(number, MODEL_ID, SHORT[number % len(SHORT)]) for number in range(CASES)],
            [Case(number, MODEL_ID, LONG[number % len(LONG)]) for number in range(CASES)])


class Mixture:
    """Everything at once. `faults` says what was done to which node, so what its clients may meet."""

    def __init__(self, mesh, short, long, faults, seed):
        self.mesh, self.faults, self.seed = mesh, faults, seed
        self.clients = {"short": Clients(short, self.entries, self.excuse, seed, ANSWER_WITHIN),
                        "long": Clients(long, self.entries, self.excuse, seed + 1, ANSWER_WITHIN)}
        self.short = short
        self.statuses, self.counts, self.errors = Counter(), Counter(), []
        self.running = set()
        self.over = asyncio.Event()

    def entries(self, number, dice):
        first = dice.randrange(len(self.mesh))
        return self.mesh[first:] + self.mesh[:first]

    def hit(self, node, since):
        return self.faults.hit(node.id, since, time.monotonic(), ("kill",))

    def excuse(self, attempt):
        """A full mesh says so, and when to come again; a dead node says nothing."""
        if attempt.ended == "turned away" and attempt.status == 429 and told_when(attempt.retry_after):
            return "refused"
        if self.hit(attempt.node, attempt.asked):
            return {"turned away": "next", "cut": "lost"}.get(attempt.ended)
        return None

    async def run(self):
        """Until `over` is set; then all that runs ends."""
        forever = [self.clients["short"].run(SHORT_CLIENTS), self.clients["long"].run(LONG_CLIENTS),
                   self.every(BAD_EVERY, self.bad), self.every(CANCEL_EVERY, self.cancelled), self.every(BIG_EVERY, self.big)]
        tasks = [asyncio.create_task(one) for one in forever]
        try:
            await self.over.wait()
            for clients in self.clients.values():
                clients.over.set()
            await asyncio.gather(*tasks)
            await asyncio.gather(*self.running)
        finally:
            for task in [*tasks, *self.running]:
                task.cancel()
            await asyncio.gather(*tasks, *self.running, return_exceptions=True)

    async def every(self, seconds, act):
        """Does something again and again, whether or not the one before has ended."""
        dice = random.Random(f"{self.seed} {act.__name__}")
        while not self.over.is_set():
            self.start(act(self.counts[act.__name__], dice))
            self.counts[act.__name__] += 1
            await asyncio.sleep(seconds)

    def start(self, act):
        task = asyncio.create_task(act)
        self.running.add(task)
        task.add_done_callback(self.running.discard)

    async def bad(self, number, dice):
        """A bad request, which gets the answer it deserves."""
        kinds = list(bad_requests())
        method, path, body, right = kinds[number % len(kinds)]
        await self.whole(dice.choice(self.mesh), (method, path, body), right)

    async def big(self, number, dice):
        """A prompt that takes most of a node's KV."""
        body = {"model": MODEL_ID, "prompt": [300 + dice.randrange(20) for _ in range(BIG_PROMPT)], "max_tokens": BIG_OUTPUT,
                "ignore_eos": True}
        await self.whole(dice.choice(self.mesh), ("POST", "/v1/completions", json.dumps(body).encode()), 200)

    async def whole(self, node, question, right):
        """A question whose answer comes as a whole."""
        method, path, body = question
        asked = time.monotonic()
        try:
            status, headers, text = await answer(node, path, body, method, ANSWER_WITHIN)
        except (TurnedAway, OSError, EOFError, asyncio.TimeoutError) as error:
            self.statuses["no answer"] += 1
            if not self.hit(node, asked):
                self.errors.append(f"{method} {path} at {node.name}, expected {right}: {type(error).__name__} {error}")
            return
        self.statuses[status] += 1
        full = status == 429 and told_when(headers.get("retry-after"))
        if status != right and not full and not self.hit(node, asked):
            self.errors.append(f"{method} {path} at {node.name}, expected {right}: {status} {text[:200]!r}")

    async def cancelled(self, number, dice):
        """A client that hangs up: before the answer, or somewhere in it."""
        node, case = dice.choice(self.mesh), dice.choice(self.short)
        pieces = dice.randrange(case.tokens)
        attempt = Attempt(node, case, ANSWER_WITHIN)
        reading = asyncio.create_task(attempt.run())
        await attempt.until(lambda stream: len(stream.pieces) >= pieces)
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)
        if attempt.failed and self.excuse(attempt) is None:
            self.errors.append(f"before it was cancelled: {attempt.said()}")

    async def burst(self, count):
        """So many short streams at the same moment; how many were served and refused."""
        ended = Counter()
        dice = random.Random(f"{self.seed} {self.counts['burst']}")
        self.counts["burst"] += 1

        await asyncio.gather(*(self.among_many(number, dice, ended) for number in range(count)))
        return ended

    async def overload(self, count, until):
        """So many clients, each of which asks anew when it was served, or when it was told to; how often they were served and
        refused."""
        ended = Counter()

        async def one(number):
            dice = random.Random(f"{self.seed} overload {number}")
            while time.monotonic() < until:
                attempt = await self.among_many(number, dice, ended)
                await asyncio.sleep(int(attempt.retry_after) if told_when(attempt.retry_after) else 0)

        await asyncio.gather(*(one(number) for number in range(count)))
        return ended

    async def among_many(self, number, dice, ended):
        """One short stream where there are more than fit."""
        attempt = Attempt(self.mesh[number % len(self.mesh)], dice.choice(self.short), ANSWER_WITHIN)
        await attempt.run()
        self.statuses[attempt.status or "no answer"] += 1
        if attempt.ended == "finished":
            ended["served"] += 1
            if wrong := attempt.wrong():
                self.errors.append(f"wrong answer among many at {attempt.node.name}: {wrong}")
        elif excuse := self.excuse(attempt):
            ended[excuse] += 1
        else:
            self.errors.append(f"among many: {attempt.said()}")
        return attempt

    def all_errors(self):
        return self.errors + [error for clients in self.clients.values() for error in clients.tally.errors]

    def figures(self):
        tallies = [clients.tally for clients in self.clients.values()]
        statuses = sum((tally.statuses for tally in tallies), Counter(self.statuses))
        by_status = ", ".join(f"{count} {status}" for status, count in sorted(statuses.items(), key=str))
        return (
            f"{sum(statuses.values())} requests ({by_status}): {sum(tally.finished for tally in tallies)} checked streams with "
            f"{sum(tally.tokens for tally in tallies)} tokens, {self.counts['cancelled']} cancelled, {self.counts['big']} with "
            f"big prompts, {self.counts['bad']} bad, {sum(tally.lost for tally in tallies)} home lost, "
            f"{len(self.all_errors())} errors"
        )


def told_when(retry_after):
    """Whether an answer says when to come again."""
    return retry_after is not None and retry_after.isdigit() and int(retry_after) >= 1
