"""The direct path over the real NIXL, where it is installed: the other engine is a process of its own."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import memfd
from test_direct import exported
from test_worker import caches, kv_blocks

from shoal_vllm.direct import Direct, start_agent
from shoal_vllm.fields import Refused

pytest.importorskip("nixl", reason="the package nixl is not installed", exc_type=ImportError)

READY_WITHIN = 120.0
OTHER = """
import json, os, sys, time
from test_worker import caches, kv_blocks
from shoal_vllm.direct import Direct
direct = Direct(str(os.getpid()), kv_blocks(caches(1)))
print("address", json.dumps(direct.address), flush=True)
sys.stdin.read()
"""


@pytest.fixture
def other(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[subprocess.Popen[str], dict[str, Any]]]:
    """Another engine's process, and its address."""
    monkeypatch.setenv("UCX_TLS", "tcp,self")
    here = Path(__file__).parent
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(here), str(here.parent), *sys.path])}
    process = subprocess.Popen(
        [sys.executable, "-c", OTHER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    )
    lines = iter(process.stdout.readline, "")
    yield process, json.loads(next(line for line in lines if line.startswith("address ")).removeprefix("address "))
    process.kill()
    process.wait()


def test_blocks_of_another_process_are_fetched_until_it_dies(other: tuple[subprocess.Popen[str], dict[str, Any]]) -> None:
    process, address = other
    target = Direct("target", kv_blocks(caches(2)), start_agent)
    source = kv_blocks(caches(1))
    size = 4 * source.layout.block_bytes
    fd = memfd(size=size)
    for ids in ([3, 1, 11, 0], [4, 5, 6, 7]):
        target.fetch(target.source({"address": address, "ids": ids}, 4), fd, 20.0)
        assert os.pread(fd, size, 0) == exported(source, ids)
    process.kill()
    process.wait()
    for _ in range(2):
        began = time.monotonic()
        with pytest.raises(Refused) as refused:
            target.fetch(target.source({"address": address, "ids": [1, 2, 3, 4]}, 4), fd, 20.0)
        assert refused.value.why == "unfit"
        assert time.monotonic() - began < 10
    os.close(fd)
    target.close()
