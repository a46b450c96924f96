"""Parts of the checks of nodes beside real engines in which running requests move with their KV, whatever the engines are.

Each part gives a line of figures and a list of complaints, as those of engine_checks.py do. They have in common streams that
count on from prompts of different lengths, of which an unmoved run has shown what must come.
"""

import asyncio
import itertools
import time
from collections import Counter

from engine_checks import DRAINED_WITHIN, PATIENCE, counting, seen_as
from engine_requests import Answer, Client
from engine_servers import MESH_WITHIN
from http_stream import move, question
from mesh_clients import Clients
from mesh_nodes import Failure, counted, note, share

# What a node says when it has too much to do for one more move: a moment later it may have less.
BUSY = ("as many requests as may leave", "it takes in other requests", "it is being moved")
# What it says when the stream was over before its move.
LATE = ("the request ended", "no request")
# Moves of a stream: there and back.
MOVES_EACH = 2
# Moves under way, over all nodes. More than a node takes in at once, so that some are told so.
MOVES_AT_ONCE = 6
# Tokens of output between two moves of a stream.
AHEAD = 6
# Seconds between two looks at which streams can move.
LOOK_EVERY = 0.05
# Bytes that KV of a token has at least, whatever the model: what moves with less has left its KV behind.
LEAST_KV = 1024
# Streams of which each moves while an engine or a node dies.
STREAMS_AT_A_DEATH = 3
# Part of the moves that must come about, and part of these that must have their KV along: a request that has arrived and not
# begun has none of its own yet, and an engine that has more to do than it can may stop too late.
MOST = 0.9 if PATIENCE == 1 else 0.5
BROUGHT_WITHIN = 60
BEGUN_WITHIN = 120
ENDED_WITHIN = 120
# Seconds in which an engine lets go of what it held for a node that did not come back: 30, and a look.
LET_GO_WITHIN = 40
# --shutdown-deadline-ms of a node here: on two cores its clients' streams may take longer than it has by default.
LEAVING = ["--shutdown-deadline-ms", "90000"]
EXIT_WITHIN = 100
# Of a mesh beside vLLMs in which nothing moves by itself. They take all of a small machine, which then stalls for seconds: that is
# no death of a node.
QUIET = ["--reschedule-interval-ms", "0", "--phi", "32", *LEAVING]
# Seconds between two looks whether an engine holds something, which it does for some hundredths of a second.
GLANCE_EVERY = 0.002


def add_options(parser, **defaults):
    """What these parts can be told; the defaults are for the engines of the check."""
    parser.add_argument("--without-kv", action="store_true", help="engines and nodes that move no KV: requests move by recompute")
    parser.add_argument("--kv-streams", type=int, help="that move at once; no more than one engine has slots for")
    parser.add_argument("--kv-tokens", type=int, help="of output of each of these")
    parser.add_argument("--kv-clients", type=int, help="that have a stream open while nodes leave")
    parser.add_argument("--engine-kills", help="milliseconds from a wish to move to the end of the target's engine, each once")
    parser.add_argument("--node-kills", help="the same for the target's node")
    parser.add_argument("--held-kills", type=int, help="times the target's node ends just when the source's engine holds what moves")
    parser.set_defaults(**defaults)


def cases_of(nodes, tokens, count):
    """So many streams of so many tokens, each with its own prompt of some hundred tokens at most."""
    comparable = nodes.engines[0].COMPARABLE
    return [counting(11 + 10 * number, tokens, 16 + 12 * (number % 8), **comparable) for number in range(count)]


async def at_rest(nodes):
    """Waits until nothing runs, and has the engines forget what ran: no KV may be found where it was not brought."""
    await nodes.wait_until_drained(nodes.all(), DRAINED_WITHIN)
    await asyncio.gather(*(engine.forget() for engine in nodes.engines))


async def running(nodes):
    """The requests of all nodes' clients that have given tokens, each with its home."""
    answers = (question(home.http, "/mesh/requests") for home in nodes.all())
    listed = await asyncio.gather(*answers, return_exceptions=True)
    found = []
    for home, one in zip(nodes.all(), listed):
        # On a machine that is too busy a node may give no answer: the next look tells.
        if isinstance(one, BaseException) and not isinstance(one, (OSError, asyncio.TimeoutError)):
            raise one
        if isinstance(one, dict):
            found += [(home, row) for row in one["requests"] if row["home"] == home.id and row["output_tokens"] > 0]
    return found


async def unmoved_answers(nodes, cases):
    """What these streams give when nothing happens to them; asked for once."""
    new = [case for case in cases if key_of(case) not in nodes.unmoved]
    if new:
        await at_rest(nodes)
        wave = await Wave(nodes, new, 0).run()
        for case, answer in zip(new, wave.answers):
            if answer.ended != "finished" or not answer.tokens or ("return_token_ids" in case.body and not answer.ids):
                raise Failure(f"an unmoved stream: {answer!r}, ids {answer.ids}")
            nodes.unmoved[key_of(case)] = answer
        gaps = [1e3 * answer.longest_gap() for answer in wave.answers]
        note(f"{len(new)} streams, unmoved: longest gap of each p50/max {share(gaps, 0.5):.0f}/{max(gaps):.0f} ms")
    await at_rest(nodes)
    return [nodes.unmoved[key_of(case)] for case in cases]


def key_of(case):
    return case.body["prompt"], case.body["max_tokens"]


class Wave:
    """Streams that run at once, through all nodes in turn, each moved to and fro so many times while it runs."""

    def __init__(self, nodes, cases, moves, manner="staged"):
        self.nodes, self.cases, self.moves, self.manner = nodes, cases, moves, manner
        self.answers = [Answer() for _ in cases]
        self.reports, self.ways = [], Counter()
        self.late, self.busy, self.refused = 0, 0, []
        # By request: moves that were done, and the tokens it must have before the next.
        self._done, self._due = Counter(), Counter()
        self._moving = {}

    async def run(self):
        mesh = self.nodes.all()
        async with Client(mesh[0].url, self.nodes.model_id) as one, Client(mesh[-1].url, self.nodes.model_id) as other:
            asked = zip(itertools.cycle((one, other)), self.cases, self.answers)
            streams = [asyncio.create_task(client.ask(case, answer)) for client, case, answer in asked]
            mover = asyncio.create_task(self._keep_moving())
            try:
                await asyncio.gather(mover, *streams)
                await asyncio.gather(*self._moving.values())
            finally:
                for task in (mover, *streams, *self._moving.values()):
                    task.cancel()
        return self

    async def _keep_moving(self):
        while not all(answer.ended for answer in self.answers):
            for home, row in await running(self.nodes) if self.moves else []:
                due = self._done[row["id"]] < self.moves and row["output_tokens"] >= (self._due[row["id"]] or AHEAD)
                if due and row["id"] not in self._moving and len(self._moving) < MOVES_AT_ONCE:
                    self._moving[row["id"]] = asyncio.create_task(self._move(home, row))
            await asyncio.sleep(LOOK_EVERY)

    async def _move(self, home, row):
        host = next(node for node in self.nodes.all() if node.id == row["host"])
        to = next(node for node in self.nodes.all() if node is not host)
        said = await move(home, row["id"], to.id, self.manner)
        if isinstance(said, dict):
            self.reports.append(said)
            self.ways[f"{host.name} to {to.name}"] += 1
            self._done[row["id"]] += 1
            self._due[row["id"]] = row["output_tokens"] + 2 * AHEAD
        elif any(text in said for text in BUSY):
            self.busy += 1
        elif any(text in said for text in LATE):
            self.late += 1
        else:
            self.refused.append(f"{host.name} to {to.name}, {row['output_tokens']} tokens: {said}")
            self._due[row["id"]] = row["output_tokens"] + AHEAD
        del self._moving[row["id"]]

    def same(self, unmoved):
        return sum(one.ended == "finished" and one.outcome == other.outcome for one, other in zip(self.answers, unmoved))

    def with_kv(self):
        return sum(map(has_kv, self.reports))

    def complaints(self, unmoved):
        found = [f"a stream moved {self.manner}: {one!r}; unmoved: {other!r}"
                 for one, other in zip(self.answers, unmoved) if one.ended != "finished" or one.outcome != other.outcome]
        wished, done = len(self.cases) * self.moves, len(self.reports)
        # What the target must compute takes its time: the stream may be over before that is done.
        if self.manner != "staged" or not self.nodes.engines[0].kv:
            return found
        if done < MOST * wished:
            found.append(f"{done} of {wished} moves {self.manner} came about; refused: {self.refused[:1]}")
        if self.with_kv() < MOST * done:
            bare = next(report for report in self.reports if not has_kv(report))
            found.append(f"{done - self.with_kv()} of {done} moves went without KV, the first: {bare}")
        return found

    def tell(self, unmoved):
        ways = ", ".join(f"{many} {way}" for way, many in sorted(self.ways.items()))
        stages = Counter(report["stages"] for report in self.reports)
        note(f"{self.figures(unmoved)}")
        note(f"  {ways}; in {', '.join(f'{count} stages {many} times' for count, many in sorted(stages.items()))}; "
             f"{self.busy} times a node was busy, {self.late} moves came too late, {len(self.refused)} refused {self.refused[:2]}")

    def figures(self, unmoved):
        pauses = [report["pause_ms"] for report in self.reports]
        gaps = [1e3 * answer.longest_gap() for answer in self.answers]
        mib = sum(report["bytes"] for report in self.reports) / 2**20
        return (
            f"{self.manner}: {self.same(unmoved)} of {len(self.cases)} streams as unmoved after {len(self.reports)} moves, "
            f"{self.with_kv()} of them with KV, {mib:.1f} MiB in all; pause p50/p99 {share(pauses, 0.5):.0f}/{share(pauses, 0.99):.0f} ms, "
            f"longest gap of a stream p50/max {share(gaps, 0.5):.0f}/{max(gaps):.0f} ms"
        )


def has_kv(report):
    """Whether a move brought KV along."""
    return report["bytes"] >= LEAST_KV * report["tokens"] or report["direct_tokens"] > 0


async def moving(nodes, options):
    """Streams that move there and back, several at once: token for token what an unmoved run gives."""
    cases = cases_of(nodes, options.kv_tokens, options.kv_streams)
    unmoved = await unmoved_answers(nodes, cases)
    said, complaints = [], []
    others = max(1, len(cases) // 4)
    for manner, count, moves in (("staged", len(cases), MOVES_EACH), ("recompute", others, 1), ("restart", others, 1)):
        await at_rest(nodes)
        wave = await Wave(nodes, cases[:count], moves, manner).run()
        wave.tell(unmoved)
        complaints += wave.complaints(unmoved)
        said.append(wave.figures(unmoved))
    return "; ".join(said), complaints


async def begun(answers):
    """Whether all streams have given tokens; what all have given."""
    pieces = [len(answer.moments) for answer in answers]
    return all(answer.ended or count >= AHEAD for answer, count in zip(answers, pieces)), pieces


async def hosted_by(nodes, host):
    """Sees to it that all streams run at this node; the requests."""
    said, began = None, time.monotonic()
    while time.monotonic() - began < BROUGHT_WITHIN:
        rows = await running(nodes)
        elsewhere = [(home, row) for home, row in rows if row["host"] != host.id]
        if not elsewhere:
            return rows
        for home, row in elsewhere:
            said = await move(home, row["id"], host.id)
        await asyncio.sleep(LOOK_EVERY)
    raise Failure(f"the streams could not be brought to {host.name}: {said}")


class Death:
    """The target of moves dies while they are under way, or just after."""

    def __init__(self, nodes, cases, unmoved):
        self.nodes, self.cases, self.unmoved = nodes, cases, unmoved
        self.tries = self.moved = self.asked = 0
        self.same, self.gaps, self.complaints = 0, [], []

    async def run(self, what, kill, delay=None):
        """Moves all streams, and kills so many milliseconds after that was asked for, or else as soon as the source's engine holds
        one of them."""
        when = "as soon as one was held" if delay is None else f"{delay} ms"
        home, target = self.nodes.all()
        answers = [Answer() for _ in self.cases]
        async with Client(home.url, self.nodes.model_id) as client:
            tasks = [asyncio.create_task(client.ask(case, answer)) for case, answer in zip(self.cases, answers)]
            try:
                await self.nodes.until("every stream begun", BEGUN_WITHIN, time.monotonic(), lambda: begun(answers))
                rows = await hosted_by(self.nodes, home)
                moves = [asyncio.create_task(move(home, row["id"], target.id)) for _, row in rows]
                await (asyncio.sleep(delay / 1e3) if delay is not None else self._until_held(home, moves))
                early = sum(task.done() for task in moves)
                over = sum(task.done() for task in tasks)
                kill(target)
                await asyncio.gather(*tasks)
                said = await asyncio.gather(*moves)
            finally:
                for task in tasks:
                    task.cancel()
        self.take(f"{what} of {target.name} killed {when} after the wish to move", answers)
        moved = sum(isinstance(one, dict) for one in said)
        self.tries, self.asked, self.moved = self.tries + 1, self.asked + len(said), self.moved + moved
        stayed = Counter(one.rpartition("stays where it is: ")[2].partition('"')[0] for one in said if not isinstance(one, dict))
        note(f"{what} killed {when} after {len(said)} wishes to move: {early} had moved by then, {moved} in the end, {over} streams "
             f"were over; longest gap {1e3 * max(self.gaps[-len(answers):]):.0f} ms{f'; {dict(stayed)}' if stayed else ''}")

    async def _until_held(self, source, moves):
        engine = self.nodes.engine_of(source)
        while not await engine.holds():
            if all(one.done() for one in moves):
                raise Failure(f"{engine.name} was never seen to hold a request that moved: {[one.result() for one in moves]}")
            await asyncio.sleep(GLANCE_EVERY)

    def take(self, when, answers):
        for answer, unmoved in zip(answers, self.unmoved):
            if answer.ended == "finished" and answer.outcome == unmoved.outcome:
                self.same += 1
            else:
                self.complaints.append(f"{when}: {answer!r}; unmoved: {unmoved!r}")
            self.gaps.append(answer.longest_gap())

    def figures(self, what):
        gaps = f"{1e3 * share(self.gaps, 0.5):.0f}/{1e3 * max(self.gaps):.0f} ms" if self.gaps else "-"
        return (f"{what} killed {self.tries} times under {self.asked} moves to it ({self.moved} came about): {self.same} of "
                f"{len(self.gaps)} streams as unmoved, longest gap p50/max {gaps}")


async def target_killed(nodes, options):
    """A stream that moves outlives the engine and the node it moves to."""
    home, target = nodes.all()
    engine = nodes.engine_of(target)
    # Twice as long as the others: they must all run when it happens.
    cases = cases_of(nodes, 2 * options.kv_tokens, STREAMS_AT_A_DEATH)
    unmoved = await unmoved_answers(nodes, cases)
    engines, others, held = (Death(nodes, cases, unmoved) for _ in range(3))
    for delay in milliseconds(options.engine_kills):
        await at_rest(nodes)
        await engines.run("engine", lambda _: engine.kill(), delay)
        engine.start()
        await engine.wait_until_healthy()
        await seen_as(nodes, nodes.all(), target, "Ready", 30 * PATIENCE, time.monotonic())
    nodes_die = [(others, delay) for delay in milliseconds(options.node_kills)] + [(held, None)] * options.held_kills
    for deaths, delay in nodes_die:
        await at_rest(nodes)
        await deaths.run("node", nodes.kill, delay)
        nodes.restart(target)
        await nodes.wait_until_ready(nodes.all(), MESH_WITHIN)
    said = [engines.figures("engine"), others.figures("node"), *([held.figures("node, after hold,")] if held.tries else [])]
    return "; ".join(said), engines.complaints + others.complaints + held.complaints


def milliseconds(text):
    return [int(one) for one in text.split(",") if one]


class Known:
    """A stream whose text is known, in the form that the clients of mesh_clients.py ask for."""

    def __init__(self, case, model_id, unmoved):
        self.path, self.body, self.tokens = case.path, {"model": model_id} | case.body, case.body["max_tokens"]
        self.expected = unmoved.text


class RollingDrain:
    """Nodes that leave in order and come back, one after the other, under load."""

    def __init__(self, nodes, tokens):
        self.nodes, self.tokens = nodes, tokens
        self.exits, self.complaints = [], []
        self.moved = self.mib = self.replays = 0

    async def _hosts(self, node):
        """Whether it runs streams that have much to come."""
        hosted = [row["output_tokens"] for _, row in await running(self.nodes) if row["host"] == node.id]
        return sum(output < self.tokens / 2 for output in hosted) >= 2, hosted

    async def leave(self, node, by_wish):
        """The node goes, because an operator wished it or it was told to by a signal, and is started again."""
        nodes, others = self.nodes, [other for other in self.nodes.all() if other is not node]
        await nodes.until(f"streams at {node.name}", BEGUN_WITHIN, time.monotonic(), lambda: self._hosts(node))
        arrivals = ("shoal_move_arrivals_total", 'outcome="arrived"')
        arrived, replays = await nodes.added(others, *arrivals), await nodes.added(others, "shoal_replays_total")
        before = await nodes.counters(node) or {}
        began = time.monotonic()
        if by_wish:
            await question(node.http, "/mesh/drain", {})
        else:
            node.process.terminate()
        code, last, empty = await nodes.last_words(node, EXIT_WITHIN)
        self.exits.append(time.monotonic() - began)
        if code != 0:
            self.complaints.append(f"{node.name} ended with {code} when it was to leave; its log ends with:\n{node.last_lines()}")
        arrived = await nodes.added(others, *arrivals) - arrived
        # Of the node itself nobody knows more than its last page.
        mib, own = ((counted(last, name) - counted(before, name)) for name in ("shoal_move_bytes_total", "shoal_replays_total"))
        replays = await nodes.added(others, "shoal_replays_total") - replays + round(own)
        nodes.restart(node)
        await nodes.wait_until_ready(nodes.all(), MESH_WITHIN)
        self.moved, self.mib, self.replays = self.moved + arrived, self.mib + mib / 2**20, self.replays + replays
        note(f"{node.name}, {'by an operator' if by_wish else 'by SIGTERM'}: its engine empty {empty - began:.1f} s later, "
             f"ended with {code} after {self.exits[-1]:.1f} s; {arrived} moved with {mib / 2**20:.1f} MiB, {replays} gone on from the "
             f"ledger")


async def rolling_drain(nodes, options):
    """Each node leaves and comes back under load, and its engine's requests go on at the others: no client sees an error."""
    cases = cases_of(nodes, options.kv_tokens, options.kv_streams)
    unmoved = await unmoved_answers(nodes, cases)
    turns = itertools.count()

    def in_turn(number, dice):
        mesh = nodes.all()
        first = next(turns) % len(mesh)
        return mesh[first:] + mesh[:first]

    known = [Known(case, nodes.model_id, answer) for case, answer in zip(cases, unmoved)]
    clients = Clients(known, in_turn, lambda attempt: "next" if attempt.ended == "turned away" else None, within=ENDED_WITHIN)
    leaving, load = RollingDrain(nodes, options.kv_tokens), asyncio.create_task(clients.run(options.kv_clients))
    try:
        for number, node in enumerate(nodes.all()):
            await leaving.leave(node, by_wish=number % 2 == 0)
        clients.over.set()
        await load
    finally:
        load.cancel()
    tally, gaps = clients.tally, [1e3 * ended.gap for ended in clients.tally.ended]
    complaints = leaving.complaints + tally.errors
    if not leaving.moved:
        complaints.append("no request moved when its node left")
    elif nodes.engines[0].kv and leaving.mib < 0.1:
        complaints.append(f"{leaving.moved} requests moved when their nodes left, with {leaving.mib:.3f} MiB")
    return (
        f"{len(leaving.exits)} nodes left and came back under {options.kv_clients} clients: {tally.finished} of {tally.begun} streams as "
        f"unmoved, {len(tally.errors)} errors, {tally.turned} times a client went on to the next node; {leaving.moved} requests moved with "
        f"{leaving.mib:.1f} MiB, {leaving.replays} gone on from the ledger; exit after {max(leaving.exits):.1f} s at most, longest gap of "
        f"a stream p50/max {share(gaps, 0.5):.0f}/{max(gaps, default=0):.0f} ms"
    ), complaints


async def nothing_held(nodes, options):
    """After all of it nobody holds anything."""
    began = time.monotonic()
    await nodes.wait_until_drained(nodes.all(), DRAINED_WITHIN)

    async def condition():
        found = [text for one in await asyncio.gather(*(engine.held() for engine in nodes.engines)) for text in one]
        return not found, found

    took = await nodes.until("nothing held by any engine", LET_GO_WITHIN * PATIENCE, began, condition)
    return f"nothing held {took:.1f} s later", []
