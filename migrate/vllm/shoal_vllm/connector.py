"""The class that vLLM loads. It only says which side each of vLLM's calls goes to.

vLLM builds it once in the scheduler's process and once in every worker, and calls only the methods of that side.
"""

from typing import TYPE_CHECKING, Any

import torch
import vllm
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    SupportsHMA,
)
from vllm.logger import init_logger

from .blocks import KvBlocks, Unmovable
from .direct import Direct
from .scheduler import Engine, SchedulerSide
from .settings import (
    block_size,
    feeds_grammars,
    layer_specs,
    prepare_directory,
    read_settings,
    why_not_movable,
)
from .step import StepWork
from .versions import CACHE_HIT_SOURCE, TESTED_DIRECT, check_version, public_version
from .worker import WorkerSide

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.forward_context import ForwardContext
    from vllm.v1.attention.backend import AttentionMetadata
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request

logger = init_logger("vllm.shoal")


class ShoalConnector(KVConnectorBase_V1, SupportsHMA):
    """Lets a Shoal node move running requests to and from this engine."""

    _cache_hit_source = CACHE_HIT_SOURCE

    # Only one of them is there: that of the connector's role.
    _scheduler: SchedulerSide
    _worker: WorkerSide

    def __init__(self, vllm_config: "VllmConfig", role: KVConnectorRole, kv_cache_config: "KVCacheConfig") -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        settings = read_settings(vllm_config)
        check_version(vllm.__version__, settings.any_version)
        prepare_directory(settings.directory)
        self._directory = settings.directory
        self._why_not = why_not_movable(vllm_config, kv_cache_config)
        # Further ranks would fight for the same sockets. What they cannot do, `why_not` says at the first.
        parallel = vllm_config.parallel_config
        self._speaks = parallel.data_parallel_index == 0 and (role == KVConnectorRole.SCHEDULER or parallel.rank == 0)
        self._side: SchedulerSide | WorkerSide
        if role == KVConnectorRole.WORKER:
            self._any_version = settings.any_version
            self._side = self._worker = WorkerSide(self._open_direct if settings.nixl and self._speaks else None)
            return
        self._side = self._scheduler = SchedulerSide(
            Engine(
                version=vllm.__version__,
                block_size=block_size(vllm_config, kv_cache_config),
                prefix_caching=bool(vllm_config.cache_config.enable_prefix_caching),
                why_not=self._why_not,
                feeds_grammars=feeds_grammars(vllm_config),
            )
        )
        if self._why_not is not None:
            logger.warning("shoal: KV of this engine cannot be moved: %s", self._why_not)
        if self._speaks:
            self._scheduler.listen(self._directory / "scheduler.sock")

    def _open_direct(self, name: str, blocks: KvBlocks) -> Direct:
        check_version(vllm.__version__, self._any_version, TESTED_DIRECT, "its direct path")
        return Direct(name, blocks)

    @property
    def requires_kv_delivery(self) -> bool:
        """False: a request that was not moved simply goes on here."""
        return False

    def shutdown(self) -> None:
        """Closes the sockets and removes them."""
        self._side.close()

    # The scheduler's side.

    def bind_kv_cache_manager(self, kv_cache_manager: "KVCacheManager") -> None:
        """The manager of block tables is there."""
        super().bind_kv_cache_manager(kv_cache_manager)
        self._scheduler.bind(kv_cache_manager)

    def on_new_request(self, request: "Request") -> None:
        """A request arrived."""
        self._scheduler.added(request)

    def get_num_new_matched_tokens(self, request: "Request", num_computed_tokens: int) -> tuple[int | None, bool]:
        """How many tokens can be loaded behind those that this engine has already."""
        return self._scheduler.matched(request, num_computed_tokens)

    def update_state_after_alloc(self, request: "Request", blocks: "KVCacheBlocks", num_external_tokens: int) -> None:
        """A request has its blocks."""
        self._scheduler.allocated(request, blocks, num_external_tokens)

    def build_connector_meta(self, scheduler_output: "SchedulerOutput") -> KVConnectorMetadata:
        """The worker's work of this step."""
        return self._scheduler.step(scheduler_output)

    def request_finished(self, request: "Request", block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """A request ended. True keeps its blocks."""
        return self._scheduler.finished(request, (block_ids,)), None

    def request_finished_all_groups(
        self, request: "Request", block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """A request ended. True keeps its blocks."""
        return self._scheduler.finished(request, block_ids), None

    # The worker's side.

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """The KV cache is there; from now on the node can be answered."""
        self._worker.set_blocks(*self._blocks_of(kv_caches))
        if self._speaks:
            self._worker.listen(self._directory / "worker.sock")

    def start_load_kv(self, forward_context: "ForwardContext", **kwargs: Any) -> None:
        """Starts this step's work."""
        metadata = self._connector_metadata
        if isinstance(metadata, StepWork):
            self._worker.start(metadata)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing: vLLM runs a request only after its load was reported."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: "AttentionMetadata", **kwargs: Any
    ) -> None:
        """Nothing: blocks are read where they lie, when the node asks."""

    def wait_for_save(self) -> None:
        """Nothing: blocks that are still to be read are held."""

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """Requests whose held blocks can be freed, and requests whose load is over."""
        return self._worker.finished()

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Blocks to compute, because their load failed."""
        return self._worker.failed_blocks()

    def _blocks_of(self, kv_caches: dict[str, torch.Tensor]) -> tuple[KvBlocks | None, str]:
        """The blocks in the caches, or why they are of no use."""
        if self._why_not is not None:
            return None, self._why_not
        specs = layer_specs(self._kv_cache_config)
        try:
            blocks = KvBlocks(
                kv_caches,
                num_blocks=self._kv_cache_config.num_blocks,
                block_size=block_size(self._vllm_config, self._kv_cache_config),
                page_bytes={name: spec.unpadded_page_size_bytes for name, spec in specs.items()},
                version=public_version(vllm.__version__),
            )
        except Unmovable as unmovable:
            logger.warning("shoal: KV of this engine cannot be moved: %s", unmovable)
            return None, str(unmovable)
        return blocks, ""
