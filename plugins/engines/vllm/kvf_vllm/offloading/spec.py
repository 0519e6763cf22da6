"""The specification of the offload for vLLM: the groups, the chunks, and how a chunk's object is laid out.

An object is one chunk of one group, of all workers: a slot for each, one behind the other, and in a slot the blocks of
each of the worker's tensors. So a hit is a hit of all workers, and vLLM's own address arithmetic fits. In vLLM's
canonical layout an object has no slots, and engines with another number of tensor-parallel workers load it.
"""

from __future__ import annotations

import copy
import math
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.config import build_offloading_config
from vllm.v1.kv_offload.base import OffloadingManager, OffloadingSpec, OffloadingWorker

from kvf_vllm.offloading.checks import check_hashes, refusals
from kvf_vllm.offloading.kinds import check_kinds
from kvframework.api.layout import MAX_OBJECT_BYTES
from kvframework.api.plugin import ByteSize
from kvframework.errors import BadLayout, ConfigFieldError, TransportMismatch

if TYPE_CHECKING:
    from collections.abc import Callable

    from vllm.v1.kv_offload.base import CanonicalKVCaches

# Smaller objects cost more than their bytes, see docs/benchmarks; and the longest chunk to get there.
OBJECT_BYTES, MOST_TOKENS = 256 << 10, 256


class ArenaSpec(OffloadingSpec):  # type: ignore[misc]
    """See `OffloadingSpec`. `manager` and `worker` make this process's half. Raises `ConfigFieldError`, `BadLayout` and
    `TransportMismatch` for an engine that cannot be served."""

    def __init__(
        self,
        vllm_config: Any,
        kv_cache_config: Any,
        *,
        manager: Callable[[ArenaSpec], OffloadingManager],
        worker: Callable[[ArenaSpec, CanonicalKVCaches], OffloadingWorker],
    ) -> None:
        if getattr(vllm_config.parallel_config, "nnodes_within_dp", 1) > 1:
            raise TransportMismatch(
                "the workers of this engine are on several nodes",
                where="kvf_vllm",
                available="all workers of an engine on one node",
            )
        check_hashes(vllm_config.cache_config)
        prompts_only = check_kinds(kv_cache_config)
        with refusals():
            config = build_offloading_config(vllm_config, kv_cache_config)
        self.is_canonical = bool(config.canonical_layout)
        parallel = config.parallel
        if self.is_canonical and not (parallel.is_parallelism_agnostic and parallel.world_size == parallel.tp_size):
            raise BadLayout(
                "canonical_layout is set, but this engine's blocks depend on the number of workers",
                where="kv_connector_extra_config",
                available="attention with whole heads or latent, split by tensor parallelism alone",
                hint="leave canonical_layout out",
            )
        if config.worker_kv_bytes_per_block <= 0:
            raise BadLayout("vLLM does not report the block size of this model", where="kvf_vllm")
        # The parts of an object. In vLLM's canonical layout they are a page's heads, whichever worker has them.
        self.slots = 1 if config.replicated_layout else parallel.world_size
        if self.is_canonical and not config.replicated_layout:
            self.slots = min(self.slots, vllm_config.model_config.get_total_num_kv_heads())
        extra = config.extra_config
        if extra.get("sync_load_budget_bytes"):
            raise ConfigFieldError(
                "sync_load_budget_bytes is set, but vLLM does not compute tokens that such a load fails to load",
                where="kv_connector_extra_config",
                hint='leave sync_load_budget_bytes out; "kvframework.load" chooses the loads within a step',
            )
        if not ("blocks_per_chunk" in extra or "block_size" in extra):
            # vLLM 0.33 counts a window's chunks by the option.
            chosen, transfer = copy.copy(vllm_config), copy.copy(vllm_config.kv_transfer_config)
            blocks = _blocks_per_chunk(config, kv_cache_config, self.slots)
            transfer.kv_connector_extra_config = {**extra, "blocks_per_chunk": blocks}
            chosen.kv_transfer_config = transfer
            config = build_offloading_config(chosen, kv_cache_config)
        super().__init__(config)
        self.replicated_layout = config.replicated_layout
        # vLLM's default leaves out what was decoded, which the next turn of a conversation begins with.
        self.offload_prompt_only = prompts_only or bool(extra.get("offload_prompt_only", False))
        self.slot_bytes = config.worker_kv_bytes_per_block * self.blocks_per_chunk
        object_bytes = self.slot_bytes * self.slots
        if object_bytes > MAX_OBJECT_BYTES:
            raise BadLayout(
                f"a chunk of {self.blocks_per_chunk} blocks makes an object of {ByteSize(object_bytes)}",
                where="kv_connector_extra_config",
                available=f"at most {ByteSize(MAX_OBJECT_BYTES)}",
                hint="lower blocks_per_chunk, or leave it out",
            )
        self.tokens_per_chunk = tuple(tokens * self.blocks_per_chunk for tokens in self.tokens_per_block)
        # The tokens of which every group's chunk is a multiple.
        self.unit_tokens = math.gcd(*self.tokens_per_chunk)
        self._make_manager, self._make_worker = manager, worker

    def get_manager(self) -> OffloadingManager:
        return self._make_manager(self)

    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        return self._make_worker(self, kv_caches)


def _blocks_per_chunk(config: Any, kv_cache_config: Any, slots: int) -> int:
    """Return how many blocks make an object of at least `OBJECT_BYTES`; 1 where states are kept, whose last blocks vLLM
    shares only then."""
    if any(hasattr(group.kv_cache_spec, "mamba_cache_mode") for group in kv_cache_config.kv_cache_groups):
        return 1
    wanted = -(-OBJECT_BYTES // (config.worker_kv_bytes_per_block * slots))
    return int(max(min(wanted, MOST_TOKENS // max(group.tokens_per_block for group in config.groups)), 1))
