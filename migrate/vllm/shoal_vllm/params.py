"""The request parameter `kv_transfer_params = {"shoal": {"id", "prompt"?, "import"?: {"key", "first", "blocks", "tokens"}}}`."""

from dataclasses import dataclass
from typing import Any

from . import fields
from .fields import Refused


@dataclass(frozen=True)
class Import:
    """KV that the node staged at the worker for one request."""

    key: str
    """The name it is staged under."""
    first: int
    """The entry of the request's block table that the first staged block belongs to."""
    blocks: int
    """How many blocks are staged."""
    tokens: int
    """The staged blocks hold KV of the request's tokens up to this many, counted from the start of the request."""

    def end(self, num_tokens: int, block_size: int) -> int:
        """How many tokens have KV after the load. The last token is always computed here: the next one is drawn from it."""
        return min(self.tokens, num_tokens - 1, (self.first + self.blocks) * block_size)


@dataclass(frozen=True)
class Params:
    """What a node says about one request."""

    id: str
    """The node's name for it. vLLM's own request ids cannot be chosen from outside."""
    prompt: int | None
    """Length of the original prompt, when tokens drawn elsewhere follow it in this request's prompt."""
    wanted: Import | None


def parse(kv_transfer_params: Any, num_prompt_tokens: int) -> Params | None:
    """The node's parameter, or None for a request that is none of ours. Raises `Refused` if it makes no sense."""
    if not isinstance(kv_transfer_params, dict) or "shoal" not in kv_transfer_params:
        return None
    shoal = _object(kv_transfer_params, "shoal")
    prompt = fields.integer(shoal, "prompt", low=1) if shoal.get("prompt") is not None else None
    if prompt is not None and prompt > num_prompt_tokens:
        raise Refused("bad", f"prompt is {prompt}, and the request has only {num_prompt_tokens} prompt tokens")
    wanted = _import(_object(shoal, "import")) if shoal.get("import") is not None else None
    return Params(id=fields.name(shoal, "id"), prompt=prompt, wanted=wanted)


def _import(wanted: dict[str, Any]) -> Import:
    return Import(
        key=fields.name(wanted, "key"),
        first=fields.integer(wanted, "first"),
        blocks=fields.integer(wanted, "blocks", low=1),
        tokens=fields.integer(wanted, "tokens", low=1),
    )


def _object(parent: dict[str, Any], key: str) -> dict[str, Any]:
    value = parent.get(key)
    if not isinstance(value, dict):
        raise Refused("bad", f"{key} must be an object")
    return value
