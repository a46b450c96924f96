"""A stand-in for `nixl_agent`: reads are copies by address in this process, and only of memory that is registered."""

import ctypes
import json
from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass
class Handle:
    """A transfer."""

    into: Any
    out_of: Any
    agent: bytes
    released: bool = False


class Network:
    """All agents of a test."""

    def __init__(self) -> None:
        self.agents: dict[str, Agent] = {}

    def start(self, name: str) -> "Agent":
        self.agents[name] = Agent(name, self)
        return self.agents[name]


class Agent:
    """One engine's. `looks` is how often a transfer is still on its way when it is looked at; None is for ever."""

    def __init__(self, name: str, network: Network) -> None:
        self.name = name
        self.network = network
        self.regions: list[tuple[int, int]] = []
        self.remote: list[bytes] = []
        self.removed: list[bytes] = []
        self.handles: list[Handle] = []
        self.looks: int | None = 1
        self.looked = 0
        self.ends_as = "DONE"
        self.error: tuple[str, Exception] | None = None

    def open_handles(self) -> list[Handle]:
        return [handle for handle in self.handles if not handle.released]

    def register_memory(self, regions: list[tuple[int, int, int, str]], memory: str) -> None:
        assert memory == "DRAM"
        self.regions += [(address, address + size) for address, size, device, _ in regions]

    def get_agent_metadata(self) -> bytes:
        return json.dumps({"name": self.name, "regions": self.regions}).encode()

    def add_remote_agent(self, metadata: bytes) -> bytes:
        name = json.loads(metadata)["name"].encode()
        self.remote.append(name)
        return name

    def remove_remote_agent(self, agent: bytes) -> None:
        self.remote.remove(agent)
        self.removed.append(agent)

    def get_xfer_descs(self, pieces: Any, memory: str) -> list[tuple[int, int]]:
        assert pieces.dtype == np.uint64 and pieces.shape[1] == 3
        return [(int(address), int(size)) for address, size, device in pieces]

    def initialize_xfer(self, operation: str, into: Any, out_of: Any, agent: bytes) -> Handle:
        self._fail("initialize_xfer")
        assert operation == "READ" and agent in self.remote
        theirs = self.network.agents[agent.decode()].regions
        for pieces, regions in ((into, self.regions), (out_of, theirs)):
            for address, size in pieces:
                if not any(start <= address and address + size <= end for start, end in regions):
                    raise LookupError("NIXL_ERR_NOT_FOUND")
        assert [size for _, size in into] == [size for _, size in out_of]
        self.handles.append(Handle(into, out_of, agent))
        return self.handles[-1]

    def transfer(self, handle: Handle) -> str:
        self._fail("transfer")
        self.looked = 0
        return "PROC"

    def check_xfer_state(self, handle: Handle) -> str:
        self._fail("check_xfer_state")
        self.looked += 1
        if self.looks is None or self.looked < self.looks:
            return "PROC"
        if self.ends_as == "DONE":
            for (target, size), (source, _) in zip(handle.into, handle.out_of, strict=True):
                ctypes.memmove(target, source, size)
        return self.ends_as

    def release_xfer_handle(self, handle: Handle) -> None:
        assert not handle.released
        handle.released = True

    def _fail(self, call: str) -> None:
        if self.error is not None and self.error[0] == call:
            raise self.error[1]

