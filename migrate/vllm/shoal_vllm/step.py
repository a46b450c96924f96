"""What the scheduler's side tells the worker's side. It travels with every engine step, mostly empty."""

from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata


@dataclass(frozen=True)
class Load:
    """Put staged KV into blocks of this engine."""

    request_id: str
    """vLLM's id of the request that waits for it."""
    key: str
    """The name the KV is staged under."""
    skip: int
    """Staged blocks to leave out at the front: this engine had them already."""
    block_ids: list[int]
    """Where the rest goes."""


@dataclass
class StepWork(KVConnectorMetadata):
    """Work of one engine step."""

    loads: list[Load] = field(default_factory=list)
    drops: list[str] = field(default_factory=list)
    """Keys of staged KV that nobody will load."""
    released: list[str] = field(default_factory=list)
    """vLLM's ids of finished requests whose KV is held no longer. The worker reports them as sent, which frees the blocks."""

    def is_empty(self) -> bool:
        """Whether there is nothing to do, as in nearly every step."""
        return not (self.loads or self.drops or self.released)


NOTHING = StepWork()
"""The step with no work. Nobody changes it, so one object serves every step."""
