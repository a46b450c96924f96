"""Which vLLM versions this package was tested with. vLLM calls its connector API experimental, and it does change."""

import re

TESTED = ("0.32",)
"""Minor versions; every patch release of one counts as tested."""


class UntestedVersion(RuntimeError):
    """This vLLM may call the connector in other ways than it was written for."""


def check_version(version: str, any_version: bool) -> None:
    """Raises `UntestedVersion` unless `version` is a tested one or the operator asked for `any_version`."""
    minor = re.match(r"\d+\.\d+(?=\.|$)", version)
    if any_version or (minor is not None and minor.group() in TESTED):
        return
    tested = ", ".join(f"{minor}.x" for minor in TESTED)
    raise UntestedVersion(
        f"shoal-vllm was tested with vLLM {tested}, and this is vLLM {version}. "
        'Set "any_version": true in kv_connector_extra_config to try it nevertheless.'
    )


def public_version(version: str) -> str:
    """The version without the suffix that only names a build (`0.32.0+cpu` is `0.32.0`)."""
    return version.split("+", 1)[0]
