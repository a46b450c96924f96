"""Holds a mesh of three nodes against a single idle node, then kills one of the three.

Run by check-mesh.sh, which gets the binary, the model and the client ready. What must hold:

1. Mixed requests (chat and completion, streamed and whole, short and long) over all three nodes, some cancelled
   half-way: every finished answer is the one a single idle node gives, and afterwards no node holds any KV block.
2. One node killed while idle: the others' views lose it within the bound, and requests sent to the others at the
   very moment of the kill succeed. Started again under its identity, it is back in every view.
3. One node killed while it runs requests of the others: views as before; those requests end, with the right answer.

The last line is `PASS mesh: figures` or `FAIL mesh: figures`.
"""

import argparse
import asyncio
import random
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path

import openai
from openai import AsyncOpenAI

from mesh_nodes import Failure, Nodes
from prompts import MORE_TOPICS

MODEL_ID = "smollm2-135m"

# Seconds. Loading the model takes about one second alone; the rest is room for a slow, shared machine.
READY_WITHIN = 120
# What the state plane promises for a node that dies.
GONE_WITHIN_IDLE = 3.0
# The same while engines keep every core busy: the promise plus what the scheduler of the machine may take.
GONE_WITHIN_BUSY = 10.0
DRAINED_WITHIN = 30
# No single answer takes this long even with 32 at once on two cores; beyond it something hangs.
ANSWER_WITHIN = 240

LONG = (
    "A shoal has no leader. Each fish watches a few of its neighbours and keeps its distance from them, and so the "
    "whole shoal turns as one, splits around a rock and closes again behind it. Nobody gives an order, and nobody "
    "has to know where all the others are. "
)


class Case:
    """One distinct request, and later the answer that a single idle node gives to it."""

    def __init__(self, number):
        topic = MORE_TOPICS[number % len(MORE_TOPICS)]
        self.chat = number % 4 != 3
        self.max_tokens = (8, 16, 24, 32, 48)[number % 5]
        if number % 4 == 3:
            self.prompt = f"The most important thing to know about {topic} is"
        elif number % 4 == 2:
            self.prompt = f"{LONG}What does this have to do with {topic}? Answer in a few words. ({number})"
        else:
            self.prompt = f"Tell me {number + 2} things about {topic}."
        self.expected = None


class Answer:
    """What came back: compared as a whole."""

    def __init__(self):
        self.text = ""
        self.finish = None
        self.tokens = None
        self.host = None
        self.cancelled = False

    def same_as(self, other):
        return (self.text, self.finish, self.tokens) == (other.text, other.finish, other.tokens)

    def __repr__(self):
        return f"{self.text!r} ({self.finish}, {self.tokens} tokens, host {self.host})"


def client(node):
    return AsyncOpenAI(base_url=f"{node.url}/v1", api_key="none", max_retries=0, timeout=ANSWER_WITHIN)


async def ask(api, case, stream, cancel_after=None):
    """One request through the official client; with `cancel_after`, hangs up after so many pieces."""
    common = dict(model=MODEL_ID, max_tokens=case.max_tokens, temperature=0, stream=stream)
    if stream:
        common["stream_options"] = {"include_usage": True}
    if case.chat:
        create = api.chat.completions.with_raw_response.create
        common["messages"] = [{"role": "user", "content": case.prompt}]
    else:
        create = api.completions.with_raw_response.create
        common["prompt"] = case.prompt
    raw = await create(**common)
    answer = Answer()
    answer.host = raw.headers.get("x-shoal-host")
    parsed = raw.parse()
    if not stream:
        choice = parsed.choices[0]
        answer.text = (choice.message.content or "") if case.chat else choice.text
        answer.finish = choice.finish_reason
        answer.tokens = parsed.usage.completion_tokens
        return answer
    pieces = 0
    async for chunk in parsed:
        if chunk.usage is not None:
            answer.tokens = chunk.usage.completion_tokens
        for choice in chunk.choices:
            answer.text += (choice.delta.content or "") if case.chat else (choice.text or "")
            answer.finish = choice.finish_reason or answer.finish
        pieces += 1
        if cancel_after is not None and pieces >= cancel_after:
            await parsed.close()
            answer.cancelled = True
            return answer
    return answer


class Tally:
    """How many requests ended in which way."""

    def __init__(self):
        self.same = self.cancelled = 0
        self.wrong = []
        self.failed = []
        self.hosts = {}

    def ended(self):
        return self.same + self.cancelled + len(self.wrong) + len(self.failed)

    def add(self, case, answer):
        if answer.cancelled:
            self.cancelled += 1
        elif answer.same_as(case.expected):
            self.same += 1
        else:
            self.wrong.append(f"{case.prompt!r}: got {answer}, a single node gives {case.expected}")
        self.hosts[answer.host] = self.hosts.get(answer.host, 0) + 1

    async def run(self, api, case, stream, cancel_after=None):
        try:
            answer = await asyncio.wait_for(ask(api, case, stream, cancel_after), ANSWER_WITHIN)
        except (openai.OpenAIError, asyncio.TimeoutError, OSError) as error:
            self.failed.append(f"{case.prompt!r} at {api.base_url}: {type(error).__name__} {error}")
            return
        self.add(case, answer)

    def complaints(self):
        return [f"wrong answer: {text}" for text in self.wrong] + [f"no answer: {text}" for text in self.failed]


def note(text):
    print(f"    {text}", flush=True)


async def references(nodes, cases):
    """Asks a single idle node, one request after the other."""
    solo = nodes.start("solo", seeds=[])
    await nodes.wait_until_ready([solo], READY_WITHIN)
    note(f"a single node answers {len(cases)} distinct requests, one at a time")
    async with client(solo) as api:
        for case in cases:
            case.expected = await ask(api, case, stream=False)
    await nodes.stop(solo)


async def many(nodes, cases, options, dice):
    """Part 1: the mixed requests."""
    mesh = nodes.all()
    apis = [client(node) for node in mesh]
    gate = asyncio.Semaphore(options.at_once)
    tally = Tally()

    async def one(number):
        case = cases[number % len(cases)]
        # Every tenth is cancelled, at a piece that lies between the first and the last.
        cancel = dice.randint(1, max(1, case.max_tokens // 2)) if number % 10 == 9 else None
        stream = cancel is not None or dice.random() < 0.5
        async with gate:
            await tally.run(apis[number % len(apis)], case, stream, cancel)

    async def progress():
        while True:
            await asyncio.sleep(10)
            note(f"{tally.ended()} of {options.requests} requests have ended")

    teller = asyncio.create_task(progress())
    started = time.monotonic()
    order = list(range(options.requests))
    dice.shuffle(order)
    await asyncio.gather(*(one(number) for number in order))
    teller.cancel()
    took = time.monotonic() - started
    for api in apis:
        await api.close()
    drained = await nodes.wait_until_drained(mesh, DRAINED_WITHIN)
    note(f"hosts: {', '.join(f'{nodes.name_of(host)} {count}' for host, count in sorted(tally.hosts.items(), key=str))}")
    figures = (
        f"{options.requests} requests {options.at_once} at a time in {took:.0f} s: {tally.same} finished as on a single node, "
        f"{len(tally.wrong)} did not, {tally.cancelled} cancelled, {len(tally.failed)} failed, no block held {drained:.1f} s later"
    )
    complaints = tally.complaints()
    if len(tally.hosts) < len(mesh):
        complaints.append(f"only {len(tally.hosts)} of {len(mesh)} nodes ran any request")
    return figures, complaints


async def kill_idle(nodes, cases):
    """Part 2: one idle node dies, and requests go to the others at that moment."""
    one, two, victim = nodes.all()
    tally = Tally()
    async with client(one) as first, client(two) as second:
        killed = nodes.kill(victim)
        asked = [tally.run(api, case, True) for case in cases[:3] for api in (first, second)]
        gone, *_ = await asyncio.gather(nodes.wait_until_seen([one, two], 2, 3 * GONE_WITHIN_IDLE, killed), *asked)
        answered = time.monotonic() - killed
    complaints = tally.complaints()
    if gone > GONE_WITHIN_IDLE:
        complaints.append(f"the dead node stayed in a view for {gone:.1f} s, {GONE_WITHIN_IDLE} s are promised")
    nodes.restart(victim)
    again = time.monotonic()
    await nodes.wait_until_ready(nodes.all(), READY_WITHIN)
    figures = (
        f"killed idle: out of all views after {gone:.1f} s, {tally.same} of {len(asked)} requests sent at that moment "
        f"answered within {answered:.1f} s, back {time.monotonic() - again:.1f} s after its restart"
    )
    return figures, complaints


async def kill_busy(nodes, cases):
    """Part 3: a node dies that runs requests of the others."""
    one, two, victim = nodes.all()
    tally = Tally()
    busy = sorted(cases, key=lambda case: -case.max_tokens)[:16]
    async with client(one) as first, client(two) as second:
        asked = [asyncio.create_task(tally.run((first, second)[n % 2], case, True)) for n, case in enumerate(busy)]
        lost = await nodes.wait_until_running(victim, 2, 20)
        killed = nodes.kill(victim)
        gone = await nodes.wait_until_seen([one, two], 2, 3 * GONE_WITHIN_BUSY, killed)
        await asyncio.gather(*asked)
        fresh = Tally()
        await asyncio.gather(*(fresh.run(api, cases[0], True) for api in (first, second)))
    drained = await nodes.wait_until_drained([one, two], DRAINED_WITHIN)
    complaints = tally.complaints() + fresh.complaints()
    if gone > GONE_WITHIN_BUSY:
        complaints.append(f"the dead node stayed in a view for {gone:.1f} s under load")
    figures = (
        f"killed with {lost} requests of others: out of all views after {gone:.1f} s, {tally.same} of {len(busy)} requests "
        f"of the others ended as on a single node, no block held {drained:.1f} s later"
    )
    return figures, complaints


async def check(options, folder):
    dice = random.Random(options.seed)
    cases = [Case(number) for number in range(40)]
    nodes = Nodes(options.binary, options.model, MODEL_ID, folder)
    figures, complaints = [], []
    try:
        await references(nodes, cases)
        note("starting three nodes")
        nodes.start_mesh(3)
        await nodes.wait_until_ready(nodes.all(), READY_WITHIN)
        for part in (lambda: many(nodes, cases, options, dice), lambda: kill_idle(nodes, cases), lambda: kill_busy(nodes, cases)):
            said, wrong = await part()
            note(said)
            figures.append(said)
            complaints += wrong
    except Failure as failure:
        complaints.append(str(failure))
    finally:
        await nodes.stop_all()
    return figures, complaints


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--binary", required=True, help="the shoal binary")
    parser.add_argument("--model", required=True, help="the GGUF file")
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--at-once", type=int, default=32)
    parser.add_argument("--seed", type=int, default=1, help="decides order, streaming and cancelling")
    parser.add_argument("--keep-logs", action="store_true", help="keep the nodes' folders even if all is well")
    options = parser.parse_args()
    # Ends like Ctrl-C: the nodes are stopped on the way out.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    folder = Path(tempfile.mkdtemp(prefix="shoal-check."))
    try:
        figures, complaints = asyncio.run(check(options, folder))
    except KeyboardInterrupt:
        sys.exit(130)
    for complaint in complaints[:20]:
        note(complaint)
    if complaints or options.keep_logs:
        note(f"logs and data of the nodes: {folder}")
    else:
        shutil.rmtree(folder, ignore_errors=True)
    verdict = "FAIL" if complaints else "PASS"
    trouble = [f"complaints: {len(complaints)}, the first: {complaints[0]}"] if complaints else []
    print(f"{verdict} mesh: {'; '.join(trouble + figures)}".replace("\n", " "), flush=True)
    sys.exit(1 if complaints else 0)


if __name__ == "__main__":
    main()
