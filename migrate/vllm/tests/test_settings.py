"""What is refused at load, and what only makes an engine one whose KV cannot be moved."""

import os
import stat
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheGroupSpec, SlidingWindowSpec

from shoal_vllm import settings
from shoal_vllm.settings import BadSettings, Settings
from shoal_vllm.versions import UntestedVersion, check_version, public_version

FULL = FullAttentionSpec(block_size=16, num_kv_heads=2, head_size=8, dtype=torch.float32)
SLIDING = SlidingWindowSpec(block_size=16, num_kv_heads=2, head_size=8, dtype=torch.float32, sliding_window=64)


def config(**changed: Any) -> Any:
    """An engine's configuration whose KV can be moved, with changes: `part__field=value`."""
    extra = {"dir": "/tmp/shoal"}
    parts = {
        "kv_transfer_config": SimpleNamespace(
            kv_load_failure_policy="recompute", kv_role="kv_both", kv_connector_extra_config=extra
        ),
        "parallel_config": SimpleNamespace(world_size=1, data_parallel_size=1, data_parallel_index=0, rank=0),
        "cache_config": SimpleNamespace(block_size=32, enable_prefix_caching=True),
        "structured_outputs_config": SimpleNamespace(reasoning_parser="", enable_in_reasoning=False),
        "speculative_config": None,
    }
    for name, value in changed.items():
        part, _, field = name.partition("__")
        if field:
            setattr(parts[part], field, value)
        else:
            parts[part] = value
    return SimpleNamespace(**parts)


def groups(*specs: Any, enable_kv_transfer: bool = True) -> Any:
    found = [KVCacheGroupSpec([f"layer.{n}"], spec, enable_kv_transfer=enable_kv_transfer) for n, spec in enumerate(specs)]
    return SimpleNamespace(kv_cache_groups=found)


def test_settings_are_read() -> None:
    found = settings.read_settings(config())
    assert found == Settings(directory=Path("/tmp/shoal"), any_version=False, nixl=False)
    wished = config(kv_transfer_config__kv_connector_extra_config={"dir": "/x", "any_version": True, "nixl": True})
    assert settings.read_settings(wished) == Settings(directory=Path("/x"), any_version=True, nixl=True)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"kv_transfer_config__kv_load_failure_policy": "fail"}, '"kv_load_failure_policy": "recompute"'),
        ({"kv_transfer_config__kv_role": "kv_consumer"}, '"kv_role": "kv_both"'),
        ({"kv_transfer_config__kv_connector_extra_config": {}}, '"dir": "/path"'),
        ({"kv_transfer_config__kv_connector_extra_config": {"dir": 5}}, '"dir": "/path"'),
        ({"kv_transfer_config__kv_connector_extra_config": {"dir": ""}}, '"dir": "/path"'),
        ({"kv_transfer_config__kv_connector_extra_config": {"dir": "/x", "any_version": 1}}, "any_version"),
        ({"kv_transfer_config__kv_connector_extra_config": {"dir": "/x", "nixl": "true"}}, "nixl"),
    ],
)
def test_settings_that_cannot_work_are_refused(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(BadSettings, match=message):
        settings.read_settings(config(**changed))


def test_a_missing_directory_is_created_for_this_user_only(directory: Path) -> None:
    settings.prepare_directory(directory / "a" / "b")
    assert stat.S_IMODE((directory / "a" / "b").stat().st_mode) == 0o700
    settings.prepare_directory(directory / "a" / "b")


@pytest.mark.parametrize("mode", [0o770, 0o702, 0o1777])
def test_a_directory_that_others_can_write_to_is_refused(directory: Path, mode: int) -> None:
    directory.chmod(mode)
    with pytest.raises(BadSettings, match="others can write"):
        settings.prepare_directory(directory)


def test_a_directory_of_somebody_else_is_refused(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: directory.stat().st_uid + 1)
    with pytest.raises(BadSettings, match="belongs to user"):
        settings.prepare_directory(directory)


def test_a_file_in_place_of_the_directory_is_refused(directory: Path) -> None:
    (directory / "file").touch()
    with pytest.raises(BadSettings, match="cannot use the directory"):
        settings.prepare_directory(directory / "file")


@pytest.mark.parametrize(
    ("changed", "found", "why_not"),
    [
        ({}, groups(FULL), None),
        ({"cache_config__enable_prefix_caching": False}, groups(FULL), None),
        ({"parallel_config__world_size": 2}, groups(FULL), "several workers"),
        ({"parallel_config__data_parallel_size": 2}, groups(FULL), "data-parallel"),
        ({"parallel_config__data_parallel_index": 1}, groups(FULL), "data-parallel"),
        ({"speculative_config": object()}, groups(FULL), "speculative decoding"),
        ({}, groups(FULL, SLIDING), "2 KV cache groups"),
        ({}, groups(), "0 KV cache groups"),
        ({}, groups(SLIDING), "SlidingWindowSpec"),
        ({}, groups(FULL, enable_kv_transfer=False), "does not let"),
    ],
)
def test_which_kv_can_be_moved(changed: dict[str, Any], found: Any, why_not: str | None) -> None:
    answer = settings.why_not_movable(config(**changed), found)
    assert answer == why_not if why_not is None else why_not in answer


def test_the_block_size_is_that_of_the_table() -> None:
    assert settings.block_size(config(), groups(FULL)) == 16
    assert settings.block_size(config(), groups(FULL, SLIDING)) == 32


def test_a_grammar_behind_reasoning_cannot_be_fed() -> None:
    assert settings.feeds_grammars(config())
    assert not settings.feeds_grammars(config(structured_outputs_config__reasoning_parser="deepseek_r1"))
    assert settings.feeds_grammars(
        config(structured_outputs_config__reasoning_parser="deepseek_r1", structured_outputs_config__enable_in_reasoning=True)
    )


@pytest.mark.parametrize("version", ["0.30.0", "0.31.1", "0.32.0", "0.32.7", "0.32.0+cpu", "0.32.0rc1", "0.32"])
def test_tested_versions_are_taken(version: str) -> None:
    check_version(version, any_version=False)


@pytest.mark.parametrize("version", ["0.29.9", "0.33.0", "0.320.0", "1.32.0", "dev", "", "0.3"])
def test_other_versions_are_refused_unless_asked_for(version: str) -> None:
    with pytest.raises(UntestedVersion, match=r"tested with vLLM 0\.30\.x, 0\.31\.x, 0\.32\.x, and this is"):
        check_version(version, any_version=False)
    check_version(version, any_version=True)


def test_the_name_of_a_build_is_no_part_of_the_version() -> None:
    assert public_version("0.32.0+cpu") == public_version("0.32.0") == "0.32.0"
