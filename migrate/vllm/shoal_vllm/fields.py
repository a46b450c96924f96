"""Reading fields of a JSON object that somebody else wrote. Nothing is taken on trust."""

from typing import Any, Literal, TypeGuard

MAX_NAME = 128
"""Longest request id or key, in characters."""

Why = Literal["gone", "unfit", "busy", "bad"]


class Refused(Exception):
    """A request that gets an answer with `"ok": false`.

    - `gone`: there is no such thing (any more);
    - `unfit`: this engine, or this request, cannot do it;
    - `busy`: not now;
    - `bad`: the input makes no sense. The connection is closed after this answer.
    """

    def __init__(self, why: Why, message: str) -> None:
        super().__init__(message)
        self.why: Why = why
        self.message = message


def name(fields: dict[str, Any], key: str) -> str:
    """A string of 1 to `MAX_NAME` characters."""
    value = fields.get(key)
    if not isinstance(value, str) or not 0 < len(value) <= MAX_NAME:
        raise Refused("bad", f"{key} must be a string of 1 to {MAX_NAME} characters")
    return value


def integer(fields: dict[str, Any], key: str, low: int = 0) -> int:
    """An integer that is at least `low`."""
    value = fields.get(key)
    if not is_integer(value) or value < low:
        raise Refused("bad", f"{key} must be an integer of at least {low}")
    return value


def integers(fields: dict[str, Any], key: str, below: int) -> list[int]:
    """A list of integers, each in `0..below`."""
    values = fields.get(key)
    if not isinstance(values, list) or not all(is_integer(value) and 0 <= value < below for value in values):
        raise Refused("bad", f"{key} must be a list of integers from 0 to {below - 1}")
    return values


def seconds(fields: dict[str, Any], key: str, most: float) -> float:
    """A number of milliseconds as seconds, cut at `most` seconds."""
    return min(integer(fields, key) / 1000, most)


def is_integer(value: Any) -> TypeGuard[int]:
    """Whether it is an integer. JSON's true and false are integers in Python; here they are not."""
    return isinstance(value, int) and not isinstance(value, bool)
