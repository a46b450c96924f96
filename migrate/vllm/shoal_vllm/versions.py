"""Which vLLM versions this package was tested with. vLLM calls its connector API experimental, and it does change."""

import re
from typing import Any

CACHE_HIT_SOURCE: Any
"""What vLLM's metrics are to call KV that was imported. Before 0.32 they have no names for that, and nothing reads it."""
try:
    from vllm.v1.metrics.cache_hit_source import CacheHitSource
except ModuleNotFoundError:
    CACHE_HIT_SOURCE = None
else:
    CACHE_HIT_SOURCE = CacheHitSource.P2P

TESTED = ("0.30", "0.31", "0.32")
"""Minor versions; every patch release of one counts as tested."""
TESTED_DIRECT = ("0.32",)
"""Those in which blocks were pinned. Where vLLM takes the number of a block's references for that of the requests that share it, a pin
would be wrong."""


class UntestedVersion(RuntimeError):
    """This vLLM may call the connector in other ways than it was written for."""


def check_version(version: str, any_version: bool, tested: tuple[str, ...] = TESTED, what: str = "shoal-vllm") -> None:
    """Raises `UntestedVersion` unless `version` is a `tested` one or the operator asked for `any_version`."""
    minor = re.match(r"\d+\.\d+(?=\.|$)", version)
    if any_version or (minor is not None and minor.group() in tested):
        return
    known = ", ".join(f"{minor}.x" for minor in tested)
    raise UntestedVersion(
        f"{what} was tested with vLLM {known}, and this is vLLM {version}. "
        'Set "any_version": true in kv_connector_extra_config to try it nevertheless.'
    )


def public_version(version: str) -> str:
    """The version without the suffix that only names a build (`0.32.0+cpu` is `0.32.0`)."""
    return version.split("+", 1)[0]
