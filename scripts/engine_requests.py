"""Requests to engines, direct or through nodes, with the official OpenAI client; for the check scripts."""

import asyncio
import time

import httpx2
import openai
from openai import AsyncOpenAI

from prompts import MORE_TOPICS, SENTENCE

# No answer here takes as long; beyond it something hangs.
ANSWER_WITHIN = 240

TOOL = {
    "type": "function",
    "function": {
        "name": "forecast",
        "description": "The weather of a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
SHAPE = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 12}},
    "required": ["city"],
    "additionalProperties": False,
}
# What no engine knows, and each must be given nevertheless.
UNKNOWN = {"shoal_check_unknown": {"deep": [1, "two"]}, "user": "check"}


class Case:
    """One request: where it goes, its body beyond the model, and what kind of request it is."""

    def __init__(self, kind, path, body, stream=False):
        self.kind, self.path, self.body, self.stream = kind, path, body, stream

    @property
    def chat(self):
        return self.path == "/v1/chat/completions"

    @property
    def generates(self):
        return self.chat or self.path == "/v1/completions"


def chat(kind, text, tokens, stream, **more):
    body = {"messages": [{"role": "user", "content": text}], "max_tokens": tokens, "temperature": 0} | more
    return Case(kind, "/v1/chat/completions", body, stream)


def completion(kind, text, tokens, stream, **more):
    return Case(kind, "/v1/completions", {"prompt": text, "max_tokens": tokens, "temperature": 0} | more, stream)


def mixed(count, tool_choice, tokenize):
    """So many requests of all kinds. `tool_choice` and `tokenize` (the body for a text) are the engine's own."""

    def one(number):
        topic = MORE_TOPICS[number % len(MORE_TOPICS)]
        question = f"Tell me {number + 2} things about {topic}."
        tokens = (8, 16, 24, 48)[number // 10 % 4]
        stream = number // 10 % 2 == 0
        seeded = {"temperature": 0.8, "top_p": 0.95, "seed": 1000 + number}
        shape = {"type": "json_schema", "json_schema": {"name": "place", "schema": SHAPE}}
        return (
            lambda: chat("chat", question, tokens, True),
            lambda: chat("chat", question, tokens, False),
            lambda: completion("completion", f"The first thing to know about {topic} is", tokens, True),
            lambda: completion("completion", f"The first thing to know about {topic} is", tokens, False),
            lambda: chat("long", f"{SENTENCE * 12}What has this to do with {topic}?", 2 * tokens, True),
            lambda: chat("tools", question, tokens, stream, tools=[TOOL], tool_choice=tool_choice),
            lambda: chat("schema", f"A city with {topic}?", 40, stream, response_format=shape),
            lambda: chat("unknown", question, tokens, stream, **UNKNOWN, **seeded),
            lambda: Case("tokenize", "/tokenize", tokenize(question)),
            lambda: Case("embeddings", "/v1/embeddings", {"input": question}),
        )[number % 10]()

    return [one(number) for number in range(count)]


class Answer:
    """What came back. `ended` is one of finished, refused (an error instead of an answer), error (an error event in
    the stream), cut (the stream just ended) and closed (by us)."""

    def __init__(self):
        self.ended = None
        self.why = ""
        self.status = None
        self.host = None
        self.body = None
        self.text = ""
        self.ids = []
        # Of each token: text, log-probability, how many alternatives, and where it begins if that is told.
        self.logprobs = []
        self.finish = None
        self.tokens = None
        self.moments = []
        self.names = set()

    @property
    def outcome(self):
        """What must not depend on where the request ran. Ids only where the engine gives them."""
        return (self.text, self.ids, self.finish, self.tokens)

    def longest_gap(self):
        """Seconds between the two pieces that lie furthest apart."""
        return max((late - early for early, late in zip(self.moments, self.moments[1:])), default=0.0)

    def __repr__(self):
        return f"{self.ended} {self.why} {self.text!r} ({self.finish}, {self.tokens} tokens, host {self.host})"


class Client:
    """Requests for one model at one address, of an engine or a node."""

    def __init__(self, url, model_id):
        self.url, self.model_id = url, model_id
        self.api = AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=ANSWER_WITHIN)

    async def __aenter__(self):
        return self

    async def __aexit__(self, *_):
        await self.api.close()

    async def ask(self, case, answer=None, progress=None):
        """One request to its end. `progress(answer)` is called at each piece, and hangs up by giving true."""
        answer = answer or Answer()
        try:
            await asyncio.wait_for(self._ask(case, answer, progress), ANSWER_WITHIN)
        except openai.APIStatusError as error:
            answer.ended, answer.status, answer.why = "refused", error.status_code, str(error)[:300]
        except (openai.APIConnectionError, httpx2.TransportError, OSError, asyncio.TimeoutError) as error:
            answer.ended, answer.why = "cut", f"{type(error).__name__} {error}"
        except openai.APIError as error:
            answer.ended, answer.why = "error", str(error)[:300]
        return answer

    async def _ask(self, case, answer, progress):
        if not case.generates:
            # A whole address, since not all of these paths are under /v1.
            body = {"model": self.model_id} | case.body
            response = await self.api.post(f"{self.url}{case.path}", cast_to=httpx2.Response, body=body)
            self._begun(answer, response)
            answer.body = response.json()
            answer.ended = "finished"
            return
        create = (self.api.chat.completions if case.chat else self.api.completions).with_raw_response.create
        usual = {key: case.body[key] for key in ("messages", "prompt", "max_tokens") if key in case.body}
        rest = {key: value for key, value in case.body.items() if key not in usual}
        if case.stream:
            rest["stream_options"] = {"include_usage": True}
        raw = await create(model=self.model_id, stream=case.stream, extra_body=rest, **usual)
        self._begun(answer, raw)
        if case.stream:
            await self._follow(raw.parse(), case, answer, progress)
        else:
            self._take(raw.parse(), case, answer)
            answer.ended = "finished"

    @staticmethod
    def _begun(answer, response):
        answer.status, answer.host = response.status_code, response.headers.get("x-shoal-host")

    async def _follow(self, events, case, answer, progress):
        async for chunk in events:
            self._take(chunk, case, answer)
            if progress is not None and progress(answer):
                await events.close()
                answer.ended = "closed"
                return
        # The client library takes an end of the body for an end of the stream.
        answer.ended = "finished" if answer.finish else "cut"
        answer.why = "" if answer.finish else "the stream ended without an end"

    @staticmethod
    def _take(piece, case, answer):
        """An answer, or a piece of one."""
        answer.names.add((piece.id, piece.model))
        if piece.usage is not None:
            answer.tokens = piece.usage.completion_tokens
        for choice in piece.choices:
            said = (getattr(choice, "delta", None) or choice.message) if case.chat else choice
            text = (said.content if case.chat else said.text) or ""
            for call in (getattr(said, "tool_calls", None) or []) if case.chat else []:
                text += (call.function.arguments if call.function else None) or ""
            answer.text += text
            answer.ids += getattr(choice, "token_ids", None) or []
            answer.logprobs += logprobs_of(choice, case)
            answer.finish = choice.finish_reason or answer.finish
            if text:
                answer.moments.append(time.monotonic())


def logprobs_of(choice, case):
    told = choice.logprobs
    if told is None:
        return []
    if case.chat:
        return [(one.token, one.logprob, len(one.top_logprobs), None) for one in told.content or []]
    counts = map(len, told.top_logprobs or [])
    return list(zip(told.tokens, told.token_logprobs, counts, told.text_offset))


def same_logprobs(one, other):
    """Whether these are log-probabilities of the same tokens, equal up to the numerics of batches."""
    near = (here[0] == there[0] and here[2:] == there[2:] and abs(here[1] - there[1]) < 0.05 for here, there in zip(one, other))
    return len(one) == len(other) and all(near)


def faults(case, answer):
    """What is wrong with an answer to a request that must succeed, as far as it can be seen without the engine."""
    if answer.ended != "finished":
        return [f"{case.kind} ended as {answer!r}"]
    if not case.generates:
        return []
    found = []
    if answer.finish not in ("stop", "length", "tool_calls"):
        found.append(f"{case.kind} finished with {answer.finish!r}")
    if not answer.tokens:
        found.append(f"{case.kind} gave no usage")
    elif answer.tokens > case.body["max_tokens"]:
        found.append(f"{case.kind} has {answer.tokens} tokens, {case.body['max_tokens']} were asked for")
    if len(answer.names) != 1:
        found.append(f"{case.kind} was named {sorted(answer.names)} in one answer")
    return found


def kept_on(text, tokens, **more):
    """A greedy chat stream of exactly so many tokens."""
    return chat("stream", text, tokens, True, ignore_eos=True, **more)
