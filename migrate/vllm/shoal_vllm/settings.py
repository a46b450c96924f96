"""What the operator configured, and what this engine can do with it."""

import os
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheSpec, MLAAttentionSpec, UniformTypeKVCacheSpecs

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

MOVABLE_SPECS = (FullAttentionSpec, MLAAttentionSpec)
"""Caches in which a block, once full, never changes, and a table entry never goes. Exact types: subclasses differ in this."""


class BadSettings(ValueError):
    """The engine must not start like this. The message says what to change."""


@dataclass(frozen=True)
class Settings:
    """The part of `--kv-transfer-config` that is ours."""

    directory: Path
    """Holds both sockets. Only this user can write to it."""
    any_version: bool
    """Start with a vLLM version that was not tested."""
    nixl: bool
    """Let other engines read KV here, and read theirs. Off unless asked for: NIXL's connections have no keys and are not encrypted."""


def read_settings(vllm_config: "VllmConfig") -> Settings:
    """Checks the configuration without touching anything. Raises `BadSettings`."""
    config = vllm_config.kv_transfer_config
    if config.kv_load_failure_policy != "recompute":
        raise BadSettings(
            'shoal-vllm needs "kv_load_failure_policy": "recompute" in --kv-transfer-config: '
            "without it, a request whose KV does not arrive ends with an error."
        )
    if config.kv_role != "kv_both":
        raise BadSettings('shoal-vllm needs "kv_role": "kv_both" in --kv-transfer-config.')
    extra: dict[str, Any] = config.kv_connector_extra_config
    directory = extra.get("dir")
    if not isinstance(directory, str) or not directory:
        raise BadSettings('shoal-vllm needs "kv_connector_extra_config": {"dir": "/path"}: the directory of its sockets.')
    return Settings(
        directory=Path(directory).absolute(), any_version=_switch(extra, "any_version"), nixl=_switch(extra, "nixl")
    )


def _switch(extra: dict[str, Any], key: str) -> bool:
    """One that is off unless it is named."""
    value = extra.get(key, False)
    if not isinstance(value, bool):
        raise BadSettings(f"{key} in kv_connector_extra_config must be true or false.")
    return value


def prepare_directory(directory: Path) -> None:
    """Creates the directory, or checks that an existing one is safe to put sockets into. Raises `BadSettings`."""
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = directory.stat()
    except OSError as error:
        raise BadSettings(f"cannot use the directory {directory}: {error}") from error
    if found.st_uid != os.geteuid():
        raise BadSettings(f"the directory {directory} belongs to user {found.st_uid}, and this engine runs as user {os.geteuid()}.")
    if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise BadSettings(f"others can write to the directory {directory}; chmod 700 it.")


def why_not_movable(vllm_config: "VllmConfig", kv_cache_config: "KVCacheConfig") -> str | None:
    """Why KV cannot be moved to and from this engine, or None if it can. Such an engine still serves its requests."""
    parallel = vllm_config.parallel_config
    groups = kv_cache_config.kv_cache_groups
    if parallel.world_size > 1:
        return "the engine is spread over several workers (tensor or pipeline parallelism)"
    if parallel.data_parallel_size > 1 or parallel.data_parallel_index > 0:
        return "the engine is one of several data-parallel ranks"
    if vllm_config.speculative_config is not None:
        return "speculative decoding is on"
    if len(groups) != 1:
        return f"the model has {len(groups)} KV cache groups"
    if not groups[0].enable_kv_transfer:
        return "vLLM does not let this KV cache be transferred"
    for spec in layer_specs(kv_cache_config).values():
        if type(spec) not in MOVABLE_SPECS:
            return f"the model has a KV cache of kind {type(spec).__name__}"
    return None


def layer_specs(kv_cache_config: "KVCacheConfig") -> dict[str, KVCacheSpec]:
    """The cache of each layer."""
    specs: dict[str, KVCacheSpec] = {}
    for group in kv_cache_config.kv_cache_groups:
        spec = group.kv_cache_spec
        if isinstance(spec, UniformTypeKVCacheSpecs):
            specs.update(spec.kv_cache_specs)
        else:
            specs.update(dict.fromkeys(group.layer_names, spec))
    return specs


def block_size(vllm_config: "VllmConfig", kv_cache_config: "KVCacheConfig") -> int:
    """Tokens in a block of the block tables."""
    groups = kv_cache_config.kv_cache_groups
    size: int = groups[0].kv_cache_spec.block_size if len(groups) == 1 else vllm_config.cache_config.block_size
    return size


def feeds_grammars(vllm_config: "VllmConfig") -> bool:
    """Whether a grammar can be brought up to date for a moved request.

    With a reasoning parser it cannot: the grammar starts behind the reasoning, and only vLLM's own parser knows where that ended.
    """
    structured = vllm_config.structured_outputs_config
    return not structured.reasoning_parser or structured.enable_in_reasoning
