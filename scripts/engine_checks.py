"""The parts that checks of nodes beside real engines have in common, whatever the engines are.

Each part gives a line of figures and a list of complaints.
"""

import asyncio
import json
import os
import statistics
import threading
import time
from collections import Counter

from engine_requests import Answer, Client, chat, completion, faults, kept_on, mixed, same_logprobs
from http_stream import HttpError, question
from mesh_nodes import Failure, note
from prompts import MORE_TOPICS, SENTENCE

# Times that must be kept are so many times longer: for machines that others use as well, where the tests run.
PATIENCE = float(os.environ.get("CHECK_PATIENCE", "1"))
# Seconds a node's row may be behind what its engine says: one poll, and a stall of a busy machine.
BEHIND = 1.0
# Streams that are tried for one move, when a busy engine reads too slowly for the first.
CHANCES = 3
# Seconds between two samples of an engine or of a row.
SAMPLE_EVERY = 0.1
# Part of the rows that may lie outside of what the engine said: a machine that stalls for longer than BEHIND.
OUTSIDE = min(0.05 * PATIENCE, 0.5)
# What is promised for an engine that dies (docs/engines.md).
FAILED_WITHIN = 1.0 * PATIENCE
# Seconds an engine has to notice that a client hung up.
CLOSED_WITHIN = 2.0 * PATIENCE
DRAINED_WITHIN = 10 * PATIENCE


async def together(client_of, cases, at_once):
    """Asks all cases, so many at a time; pairs of case and answer. `client_of(number)` says whom to ask."""
    gate = asyncio.Semaphore(at_once)

    async def one(number, case):
        async with gate:
            return case, await client_of(number).ask(case)

    return await asyncio.gather(*(one(number, case) for number, case in enumerate(cases)))


async def differing_answers(engine, pairs):
    """Answers to requests that generate nothing: they must be those of the engine itself."""
    found = []
    async with Client(engine.url, engine.model_id) as direct:
        for case, answer in pairs:
            if not case.generates:
                own = await direct.ask(case)
                if (answer.ended, answer.status, answer.body) != (own.ended, own.status, own.body):
                    found.append(f"{case.kind} is answered with {answer.status} {answer.body or answer.why}, "
                                 f"by the engine with {own.status} {own.body or own.why}")
    return found


async def many(nodes, options):
    """Mixed requests through one node, on all engines."""
    front, engine = nodes.all()[0], nodes.engines[0]
    cases = mixed(options.requests, engine.TOOL_CHOICE, engine.tokenize_body)
    began = time.monotonic()
    async with Client(front.url, engine.model_id) as client:
        pairs = await together(lambda _: client, cases, options.at_once)
    took = time.monotonic() - began
    complaints = await differing_answers(engine, pairs)
    complaints += [fault for case, answer in pairs if case.generates for fault in faults(case, answer)]
    hosts = Counter(answer.host for case, answer in pairs if case.generates)
    note(f"hosts: {', '.join(f'{nodes.name_of(host)} {count}' for host, count in sorted(hosts.items(), key=str))}")
    note(f"kinds: {', '.join(f'{kind} {count}' for kind, count in Counter(case.kind for case in cases).items())}")
    if not {node.id for node in nodes.all()} <= set(hosts):
        complaints.append(f"generating requests through one node ran at {len(hosts)} of {len(nodes.all())} nodes")
    drained = await nodes.wait_until_drained(nodes.all(), DRAINED_WITHIN)
    good = len(cases) - len(complaints)
    return (
        f"{good} of {len(cases)} mixed requests through one node, {options.at_once} at a time, good in {took:.0f} s, "
        f"{min(hosts.values(), default=0)} of them at the less used node, nothing held {drained:.1f} s later"
    ), complaints


class Stalls:
    """How long this machine stood still meanwhile: a thread that only sleeps, and looks how late it wakes up.

    What must happen within a time cannot happen while nothing runs. Engines that take all of a machine, and the end of one
    with gigabytes of memory, make it stand still for seconds.
    """

    EVERY = 0.01
    # A wake-up that is less late than this is how any scheduler works.
    LATE = 0.05

    def __init__(self):
        self._late, self._over = [], threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def _watch(self):
        while not self._over.is_set():
            slept = time.monotonic()
            time.sleep(self.EVERY)
            woke = time.monotonic()
            if woke - slept > self.EVERY + self.LATE:
                self._late.append((slept, woke))

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *_):
        self._over.set()
        self._thread.join()

    def between(self, since, until):
        """Seconds of that time that were lost."""
        return sum(max(0.0, min(woke, until) - max(slept, since)) for slept, woke in list(self._late))


class Watch:
    """Samples of what the engines say and of what the nodes say of themselves, taken while streams run."""

    def __init__(self, nodes):
        self.nodes = nodes
        self.engines = {node.name: [] for node in nodes.all()}
        self.rows = {node.name: [] for node in nodes.all()}

    async def sample(self, node, taken, look):
        while True:
            asked = time.monotonic()
            seen = await look(node)
            if seen is not None:
                taken[node.name].append((asked, seen))
            await asyncio.sleep(SAMPLE_EVERY)

    async def __aenter__(self):
        def engine(node):
            return self.nodes.engine_of(node).usage()

        def row(node):
            return self.nodes.row(node, node)

        looks = ((self.engines, engine), (self.rows, row))
        samplers = (self.sample(node, taken, look) for node in self.nodes.all() for taken, look in looks)
        self.tasks = [asyncio.create_task(sampler) for sampler in samplers]
        return self

    async def __aexit__(self, *_):
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)

    def distances(self, node, since):
        """For each row from `since` on: how far its tokens and its requests are from what the engine said up to BEHIND
        before, and the basis of the row. A row that says what the engine said at any of these moments is 0 away."""
        for moment, row in self.rows[node.name]:
            early, late = moment - BEHIND, moment + 2 * SAMPLE_EVERY
            near = [usage for asked, usage in self.engines[node.name] if early <= asked <= late]
            if moment < since or not near:
                continue
            load, block = row["load"], row["facts"]["block_size_tokens"]
            # Each request's last block is counted whole.
            room = block * (max(usage.running for usage in near) + 1)
            tokens = away(load["used_blocks"] * block, [usage.tokens for usage in near])
            yield max(0, tokens - room), away(load["running"], [usage.running for usage in near]), load.get("basis")


def away(value, seen):
    return max(min(seen) - value, value - max(seen), 0)


async def freeness(nodes, options):
    """A node's row says what its engine says, while streams run and after."""
    idle = {node.name: (await nodes.own_load(node))["freeness_blocks"] or 0.0 for node in nodes.all()}
    texts = [f"{SENTENCE * (3 * number % 10)}Tell me about {MORE_TOPICS[number]}." for number in range(options.streams)]
    cases = [kept_on(text, options.tokens) for text in texts]
    answers = [Answer() for _ in cases]
    began = time.monotonic()
    async with Client(nodes.all()[0].url, nodes.model_id) as client, Watch(nodes) as watch:
        await asyncio.gather(*(client.ask(case, answer) for case, answer in zip(cases, answers)))
        ended = time.monotonic()
        drained = await nodes.wait_until_drained(nodes.all(), DRAINED_WITHIN)
    complaints = [fault for case, answer in zip(cases, answers) for fault in faults(case, answer)]
    # Until all have begun, the node rightly counts requests that its engine has not yet heard of.
    steady = max((answer.moments[0] for answer in answers if answer.moments), default=began) + BEHIND
    compared = outside = 0
    for node in nodes.all():
        distances = list(watch.distances(node, steady))
        compared += len(distances)
        outside += sum(tokens > 0 or running > 0 for tokens, running, _ in distances)
        bases = Counter(basis for _, _, basis in distances)
        most = max((usage for _, usage in watch.engines[node.name]), key=lambda usage: usage.tokens, default=None)
        seen = [row["load"]["freeness_blocks"] for _, row in watch.rows[node.name]]
        least = round(min((blocks for blocks in seen if blocks is not None), default=idle[node.name]), 1)
        worst = [max((distance[part] for distance in distances), default=0) for part in (0, 1)]
        note(f"{node.name}: engine at most {most}; {len(distances)} rows compared, furthest {worst[0]} tokens and "
             f"{worst[1]} requests off, basis {dict(bases)}; freeness {idle[node.name]} idle, {least} at the fullest")
        # An engine that a stalled machine makes late is estimated meanwhile, and the row says so.
        if bases["polled"] < 0.95 * len(distances):
            complaints.append(f"the basis of {node.name} while streams ran: {dict(bases)}")
        # All streams may run at one node, where a step takes less time.
        if most and most.tokens and least >= idle[node.name]:
            complaints.append(f"the freeness of {node.name} did not fall: {idle[node.name]} idle, {least} at the fullest")
    if not compared or outside > OUTSIDE * compared:
        complaints.append(f"{outside} of {compared} rows are not what the engine said in the {BEHIND} s before")
    return (
        f"{len(cases)} streams in {ended - began:.0f} s: {compared - outside} of {compared} rows say what the engine said, "
        f"back to nothing {drained:.1f} s after the last"
    ), complaints


async def names(nodes, options):
    """Models that are there and that are not."""
    complaints = []
    for node in nodes.all():
        async with Client(node.url, "no-such-model") as client:
            for case in (chat("chat", "Hello", 4, True), completion("completion", "Hello", 4, False)):
                answer = await client.ask(case)
                if answer.status != 404:
                    complaints.append(f"an unknown model at {node.name}: {answer!r}")
        listed = [row["id"] for row in (await question(node.http, "/v1/models"))["data"]]
        offered = set().union(*(await asyncio.gather(*(engine.models() for engine in nodes.engines))))
        if set(listed) != offered or len(listed) != len(set(listed)):
            complaints.append(f"{node.name} lists the models {listed}, the engines {sorted(offered)}")
    return f"an unknown model is a 404, {len(listed)} model listed", complaints


async def closing(nodes, options):
    """A client that hangs up frees its place in the engine, wherever that is."""
    took = []
    async with Client(nodes.all()[0].url, nodes.model_id) as client:
        for number in range(2):
            case = kept_on(f"Tell me everything about {MORE_TOPICS[number]}.", 700)
            answer = await client.ask(case, progress=lambda answer: len(answer.moments) >= 4)
            if answer.ended != "closed":
                return "", [f"a stream to be closed ended as {answer!r}"]
            closed = time.monotonic()
            what = "every engine idle after its client hung up"
            took.append(await nodes.until(what, 10 * CLOSED_WITHIN, closed, lambda: all_idle(nodes)))
    complaints = [f"a closed stream kept its place for {max(took):.1f} s"] if max(took) > CLOSED_WITHIN else []
    return f"idle {max(took):.1f} s after a client hung up", complaints


async def all_idle(nodes):
    usages = await asyncio.gather(*(engine.usage() for engine in nodes.engines))
    return all(usage and usage.running + usage.waiting == 0 for usage in usages), usages


async def seen_as(nodes, viewers, node, readiness, within, since):
    """Seconds since then until each of `viewers` says so of the node."""

    async def condition():
        rows = await asyncio.gather(*(nodes.row(viewer, node) for viewer in viewers))
        seen = [row and (row["load"] or {}).get("readiness") for row in rows]
        return all(one == readiness for one in seen), seen

    return await nodes.until(f"{node.name} {readiness}", within, since, condition)


def what_clients_saw(victim, pairs, expected):
    """Counts of ends by where a stream ran when its engine died, and complaints."""
    saw, complaints = Counter(), []
    for case, answer in pairs:
        hit = answer.host == victim.id
        whole = answer.ended == "finished" and answer.tokens == case.body["max_tokens"]
        if whole and hit:
            saw["went on elsewhere"] += 1
            saw["of these as in a quiet run"] += answer.text == expected[case.body["prompt"]]
        elif whole:
            saw["not hit, finished"] += 1
        else:
            saw[f"{'' if hit else 'not hit, '}{'short' if answer.ended == 'finished' else answer.ended}"] += 1
        # An error event is an honest end for a stream whose engine died; anything else is not.
        if not whole and not (hit and answer.ended == "error"):
            complaints.append(f"a stream {'at the killed engine' if hit else 'of another engine'} ended as {answer!r}")
        if whole and hit:
            note(f"a stream went on elsewhere with a gap of {1e3 * answer.longest_gap():.0f} ms")
        elif answer.ended == "error":
            note(f"a stream ended with an error event: {answer.why}")
    return saw, complaints


def counting(start, tokens, numbers=7, **more):
    """A greedy stream that counts on from so many numbers: there is hardly ever a doubt about the next token, and one that is
    lost or comes twice is seen."""
    text = ", ".join(str(number) for number in range(start, start + numbers))
    return completion("stream", f"{text},", tokens, True, ignore_eos=True, **more)


async def ask_anew(client):
    return await client.ask(chat("new", "Name a city.", 8, True))


async def kill(nodes, options):
    """One engine dies while streams run through all nodes, and comes back."""
    mesh = nodes.all()
    # As many as the engines that are left have slots for: what waits for a slot says nothing of what a stream loses.
    streams = min(options.streams, nodes.engines[0].SLOTS * (len(mesh) - 1))
    cases = [counting(20 * number + 1, options.tokens) for number in range(streams)]
    async with Client(mesh[0].url, nodes.model_id) as first, Client(mesh[-1].url, nodes.model_id) as second:
        clients = (first, second)
        quiet = await together(lambda _: first, cases, streams)
        expected = {case.body["prompt"]: answer.text for case, answer in quiet}
        answers = [Answer() for _ in cases]
        tasks = [asyncio.create_task(clients[n % 2].ask(case, answers[n])) for n, case in enumerate(cases)]
        try:
            await nodes.until("every stream begun", 120, time.monotonic(), lambda: all_begun(answers, tasks, 8))
            hosts = Counter(answer.host for answer in answers)
            victim = max(mesh, key=lambda node: hosts[node.id])
            engine = nodes.engine_of(victim)
            with Stalls() as stalls:
                killed = engine.kill()
                fresh = [asyncio.create_task(ask_anew(client)) for client in clients for _ in range(2)]
                tasks += fresh
                failed = await seen_as(nodes, mesh, victim, "Failed", 10 * FAILED_WITHIN, killed)
            stood = stalls.between(killed, killed + failed)
            again = [asyncio.create_task(ask_anew(client)) for client in clients for _ in range(2)]
            tasks += again
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
    fresh += again
    saw, complaints = what_clients_saw(victim, list(zip(cases, answers)), expected)
    if not any(answer.host == victim.id for answer in answers):
        complaints.append("no stream ran at the engine that was killed")
    lost = [task.result() for task in fresh if task.result().ended != "finished"]
    complaints += [f"a request sent after the kill ended as {answer!r}" for answer in lost]
    if failed - stood > FAILED_WITHIN:
        complaints.append(f"a dead engine was seen as such after {failed:.2f} s, {stood:.2f} s of it the machine stood still, "
                          f"{FAILED_WITHIN} s are promised")
    engine.start()
    await engine.wait_until_healthy()
    back = await seen_as(nodes, mesh, victim, "Ready", 30, time.monotonic())
    ends = ", ".join(f"{count} {how}" for how, count in saw.items())
    return (
        f"engine killed with {len(cases)} streams: {ends}; Failed in all views after {failed:.2f} s ({stood:.2f} s of it the "
        f"machine stood still), {len(fresh) - len(lost)} of "
        f"{len(fresh)} new requests good, Ready {back:.1f} s after the engine was back"
    ), complaints


async def all_begun(answers, tasks, pieces):
    if any(task.done() for task in tasks):
        raise Failure(f"a stream ended too soon: {[task.result() for task in tasks if task.done()][0]!r}")
    return all(len(answer.moments) >= pieces for answer in answers), [len(answer.moments) for answer in answers]


class TooLate(Failure):
    """A move that the request did not live to see: the target's engine took longer to read it than it had left to run."""


async def move_once(home, request, to, options):
    """Moves a request of `home` to another node; the figures of the move."""
    body = {"to": to.id} | ({"copy": options.copy} if options.copy else {})
    try:
        return await question(home.http, f"/mesh/requests/{request}/migrate", body)
    except HttpError as error:
        if "the request ended" in str(error):
            raise TooLate(f"a stream ended before it could move to {to.name}") from error
        raise Failure(f"a move to {to.name} was refused: {error}") from error


async def arrived(engine, task):
    """Whether the only stream there is runs at this engine, as the engine says; false if it ends first."""
    while not task.done():
        usage = await engine.usage()
        if usage and usage.running:
            return True
        await asyncio.sleep(SAMPLE_EVERY / 4)
    return False


async def moved(nodes, home, client, case, moves, options):
    """One request, moved so many times after some pieces each; its answer and what is said of each move."""
    answer, reports = Answer(), []
    task = asyncio.create_task(client.ask(case, answer))
    try:
        for number in range(moves):
            ahead = 16 * (number + 1)
            await nodes.until("a stream to move", 60, time.monotonic(), lambda: all_begun([answer], [task], ahead))
            running = (await question(home.http, "/mesh/requests"))["requests"]
            if not running:
                raise Failure("no request is listed while a stream runs")
            to = next(node for node in nodes.all() if node.id != running[0]["host"])
            report = await move_once(home, running[0]["id"], to, options)
            reports.append(report | {"arrived": await arrived(nodes.engine_of(to), task)})
            if task.done():
                break
        return await task, reports
    finally:
        task.cancel()


async def handover(nodes, options):
    """Greedy streams, moved between the engines: the output is that of an unmoved run.

    Prefill and decoding differ in their last bits, so an engine that is given its own output back as a prompt goes another
    way wherever two tokens are about as likely. These requests have no such place: they give the same output when they are
    cut and recomputed at any of a dozen places in one and the same llama-server.
    """
    home = nodes.all()[0]
    comparable = nodes.engines[0].COMPARABLE
    cases = [
        (counting(1, 80, **comparable), 1),
        (kept_on("Count from one to thirty, in words.", 80, **comparable), 1),
        (kept_on(f"{SENTENCE * 12}Repeat this text.", 80, **comparable), 2),
    ]
    if nodes.engines[0].LOGPROBS:
        cases.append((counting(21, 80, logprobs=2, **comparable), 1))
        # It draws control tokens, which are no part of the text; and what may become a stop string is held back.
        cases.append((kept_on("Count from three to thirty, in words.", 80, logprobs=True, top_logprobs=2, **comparable), 2))
        cases.append((kept_on("Count from three to thirty, in words.", 80, stop=["a zebra"], **comparable), 2))
    complaints, same, told, gaps, reports, too_late = [], 0, 0, [], [], 0
    async with Client(home.url, nodes.model_id) as client:
        for case, moves in cases:
            still = await client.ask(case)
            for chance in range(CHANCES, 0, -1):
                try:
                    answer, said = await moved(nodes, home, client, case, moves, options)
                    break
                except TooLate as late:
                    note(f"{late}: again")
                    too_late += 1
                    if chance == 1:
                        raise
            reports += said
            gaps.append(answer.longest_gap())
            if answer.ended == still.ended == "finished" and answer.outcome == still.outcome:
                same += 1
            else:
                complaints.append(f"moved {moves} times: {answer!r}; unmoved: {still!r}")
            told += bool(case.body.get("logprobs"))
            if not same_logprobs(answer.logprobs, still.logprobs) or bool(case.body.get("logprobs")) != bool(still.logprobs):
                complaints.append(f"log-probabilities of a moved stream: {answer.logprobs}; unmoved: {still.logprobs}")
            if "return_token_ids" in comparable and not answer.ids:
                complaints.append("a moved stream gave no token ids")
    for report in reports:
        note(f"moved: {json.dumps(report)}")
        if not report["arrived"]:
            complaints.append("a stream was said to have moved, and the engine there ran nothing")
    pause = statistics.median(report["pause_ms"] for report in reports)
    return (
        f"{same} of {len(cases)} greedy streams ({told} with log-probabilities) as unmoved after {len(reports)} moves, pause {pause:.0f} ms in the median, "
        f"longest gap {1e3 * max(gaps):.0f} ms, {too_late} moves came too late"
    ), complaints


async def run_parts(nodes, options, parts):
    """Runs the parts in turn; figures and complaints of all."""
    figures, complaints = [], []
    for name, part in parts:
        began = time.monotonic()
        try:
            said, wrong = await part(nodes, options)
        except (Failure, HttpError, OSError, asyncio.TimeoutError, LookupError) as error:
            complaints.append(f"{name}: {type(error).__name__} {error}")
            continue
        note(f"{name} ({time.monotonic() - began:.0f} s): {said}")
        figures.append(said)
        complaints += wrong
    return figures, complaints
