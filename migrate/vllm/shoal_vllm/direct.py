"""The direct path: NIXL reads blocks out of another engine's KV memory, and no node is in between.

The engine that wants the blocks reads them. The other one only gives its *address* away: how NIXL finds it, and where in its memory
which block lies. What arrives is written to a file, byte for byte as `KvBlocks.export` of the other engine would have written it.
"""

import base64
import importlib
import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np
import torch

from .address import Descriptors, Source, descriptors, parse
from .blocks import KvBlocks, write
from .fields import Refused

logger = logging.getLogger("vllm.shoal")

MAX_FETCH_SECONDS = 60.0
"""Longest time for one fetch: enough for some gigabytes over a network of one gigabit a second."""
MAX_AGENTS = 32
"""Other engines known at once. One more, and the one that was asked for longest ago is forgotten."""
MAX_LATE = 3
"""Transfers that were given up and go on nevertheless. Each keeps a buffer, so no more begins when there are this many."""
POLL_SECONDS = 0.0005
"""Between two looks at a transfer: little beside the milliseconds that a chunk takes."""
PROGRESS_MICROSECONDS = 5000
"""How often NIXL's thread looks for work that it was not woken for. Its Python side says 0, with which the thread never sleeps."""


class NoNixl(Exception):
    """NIXL cannot be used here."""


@dataclass(frozen=True)
class _Late:
    """A transfer that was given up. NIXL cannot stop it, so what it writes to is kept until it is over."""

    handle: Any
    agent: Any
    buffer: torch.Tensor


def start_agent(name: str) -> Any:
    """A `nixl_agent` over UCX. Raises `NoNixl`, or what NIXL raises."""
    # vLLM's way to NIXL knows which package this platform takes, and about a leak in UCX.
    from vllm.distributed import nixl_utils

    if nixl_utils.NixlWrapper is None:
        raise NoNixl("the package nixl is not installed")
    agent = nixl_utils.NixlWrapper(name, nixl_utils.nixl_agent_config(backends=[]))
    if "UCX" not in agent.get_plugin_list():
        raise NoNixl("this nixl has no UCX")
    bindings = importlib.import_module(f"{nixl_utils.NixlWrapper.__module__.rpartition('.')[0]}._bindings")
    config = bindings.nixlAgentConfig()
    config.useProgThread = True
    config.pthrDelay = PROGRESS_MICROSECONDS
    agent.agent = bindings.nixlAgent(name, config)
    agent.create_backend("UCX")
    return agent


class Direct:
    """This engine's end of the direct path. `fetch` may be called in any thread; its chunks take turns."""

    def __init__(self, name: str, blocks: KvBlocks, start: Callable[[str], Any] = start_agent) -> None:
        """`name` is one that no other engine has or had. Raises `Unmovable`, or what NIXL raises."""
        self._blocks = blocks
        self._planes = blocks.planes()
        self._agent = start(name)
        memory, device = ("VRAM", blocks.device.index or 0) if blocks.device.type == "cuda" else ("DRAM", 0)
        self._agent.register_memory([(address, size, device, "") for address, size in blocks.memory()], memory)
        self.address: dict[str, Any] = {
            "kind": "nixl",
            # Before there is a buffer: others can reach the KV and nothing else.
            "agent": base64.b64encode(self._agent.get_agent_metadata()).decode(),
            "memory": memory,
            "device": device,
            "num_blocks": blocks.num_blocks,
            "planes": [[[plane.base, plane.stride, plane.length] for plane in planes] for planes in self._planes],
        }
        """What another engine must know to read blocks here, as it is sent."""
        self._stopped = False
        # Guards the rest, and NIXL, which is not safe to use by several threads.
        self._lock = threading.Lock()
        self._agents: dict[bytes, Any] = {}
        self._late: list[_Late] = []
        self._free = [self._new_buffer()]

    def source(self, wanted: Any, count: int) -> Source:
        """Checks where a node says that `count` blocks can be read. Raises `Refused`."""
        return parse(wanted, count, self._planes)

    def fetch(self, source: Source, fd: int, seconds: float) -> None:
        """Writes the blocks to the start of the file. Raises `Refused`, or `OSError` if the file does not take them.

        After a failure the file holds anything.
        """
        deadline = time.monotonic() + min(seconds, MAX_FETCH_SECONDS)
        offset = 0
        for remote in source.batches(self._size):
            if not self._lock.acquire(timeout=max(0.0, deadline - time.monotonic())):
                raise Refused("busy", "other fetches took all the time")
            try:
                buffer = self._take_buffer()
                size = self._read(source, remote, buffer, deadline)
                write(fd, memoryview(buffer[:size].numpy()), offset)
            finally:
                self._lock.release()
            offset += size

    def close(self) -> None:
        """Ends fetches, and lets go of NIXL."""
        self._stopped = True
        with self._lock:
            self._agents.clear()
            self._agent = None

    # Under the lock.

    def _read(self, source: Source, remote: Descriptors, buffer: torch.Tensor, deadline: float) -> int:
        """Reads the pieces into the buffer, one behind the other, and answers how many bytes they are."""
        ends = np.cumsum(remote[:, 1])
        local = descriptors(np.uint64(buffer.data_ptr()) + ends - remote[:, 1], remote[:, 1], 0)
        try:
            agent = self._agent_of(source.metadata)
            into, out_of = self._agent.get_xfer_descs(local, "DRAM"), self._agent.get_xfer_descs(remote, source.memory)
            handle = self._agent.initialize_xfer("READ", into, out_of, agent)
        except Exception as error:
            self._failed(source, buffer, error)
        try:
            state = self._agent.transfer(handle)
            while state == "PROC" and time.monotonic() < deadline and not self._stopped:
                time.sleep(POLL_SECONDS)
                state = self._agent.check_xfer_state(handle)
        except Exception as error:
            self._release(handle)
            self._failed(source, buffer, error)
        if state == "PROC":
            self._late.append(_Late(handle, agent, buffer))
            raise Refused("unfit", "the blocks did not arrive in time")
        self._release(handle)
        if state != "DONE":
            self._failed(source, buffer, RuntimeError(f"a transfer ended as {state}"))
        self._free.append(buffer)
        return int(ends[-1])

    def _failed(self, source: Source, buffer: torch.Tensor, error: Exception) -> NoReturn:
        """Nothing is on its way any more. The next fetch connects anew, because the other engine may have."""
        self._free.append(buffer)
        self._forget(source.metadata)
        raise Refused("unfit", f"NIXL failed: {error!r}") from error

    def _agent_of(self, metadata: bytes) -> Any:
        """NIXL's name of the engine."""
        agent = self._agents.pop(metadata, None)
        if agent is None:
            while len(self._agents) >= MAX_AGENTS:
                self._forget(next(iter(self._agents)))
            agent = self._agent.add_remote_agent(metadata)
        self._agents[metadata] = agent
        return agent

    def _forget(self, metadata: bytes) -> None:
        agent = self._agents.pop(metadata, None)
        # NIXL may not lose an agent under a transfer. It has few of these.
        if agent is None or any(late.agent == agent for late in self._late):
            return
        try:
            self._agent.remove_remote_agent(agent)
        except Exception as error:
            logger.debug("shoal: NIXL had forgotten %r already: %r", agent, error)

    def _take_buffer(self) -> torch.Tensor:
        """A buffer that nothing writes to. It goes back to `_free` unless a late transfer keeps it."""
        if self._stopped:
            raise Refused("unfit", "the engine stops")
        self._late = [late for late in self._late if not self._is_over(late)]
        if self._free:
            return self._free.pop()
        if len(self._late) >= MAX_LATE:
            raise Refused("busy", f"{MAX_LATE} transfers that were given up still go on")
        return self._new_buffer()

    def _is_over(self, late: _Late) -> bool:
        try:
            if self._agent.check_xfer_state(late.handle) == "PROC":
                return False
        except Exception as error:
            logger.debug("shoal: a late transfer failed: %r", error)
        self._release(late.handle)
        self._free.append(late.buffer)
        return True

    def _release(self, handle: Any) -> None:
        """Lets go of a transfer that is over."""
        try:
            self._agent.release_xfer_handle(handle)
        except Exception as error:
            logger.warning("shoal: NIXL does not let go of a transfer: %r", error)

    def _new_buffer(self) -> torch.Tensor:
        buffer = self._blocks.new_buffer()
        self._agent.register_memory([(buffer.data_ptr(), buffer.numel(), 0, "")], "DRAM")
        self._size = buffer.numel()
        return buffer
