"""`KvFrameworkLinker`, the class that SGLang's option `--unified-cache-external-linker-backend dynamic` names: its
device pools straight to the server, without a host pool between. Thin; no method raises, the constructor included.

A load is complete before SGLang hears of it: SGLang aborts the requests of a load that fails later, and an exception
ends its scheduler. So a failure of any rank is a refusal by all ranks, and the tokens are computed.
"""

from __future__ import annotations

import logging
import time
from typing import Any

import torch
from sglang.srt.mem_cache.hicache_storage import PoolName
from sglang.srt.mem_cache.unified_cache.unified_cache_linker import LayerWiseLoadCounter, UnifiedCacheLinker

import sglang
from kvf_sglang.cache import KV, PageCache, Worker, engine_name, name_of
from kvf_sglang.facts import identify, kv_heads, model_facts
from kvf_sglang.options import LINKER, check_linker_version, parse_options
from kvf_sglang.pools import device_form_of
from kvf_sglang.waiting import LOOKUP_S, Offloads, RecentLookups
from kvf_sglang.weight_updates import watch
from kvframework.client import ErrorNotes, harmless

log = logging.getLogger(__name__)

MAMBA = "mamba"


class KvFrameworkLinker(UnifiedCacheLinker):  # type: ignore[misc]
    """`cache` is None if the linker cannot serve this engine: the log says why, and everything is a miss."""

    def __init__(
        self,
        server_args: Any,
        params: Any,
        *,
        components: Any = (),
        extra_config: Any = None,
        forward_stream: Any = None,
    ) -> None:
        self.errors = ErrorNotes()
        self.cache: PageCache | None = None
        self.forward_stream = forward_stream
        self.pools: dict[Any, Any] = {}
        self.layer_done_counter = LayerWiseLoadCounter(1)
        self._offloads = Offloads()
        self._recent = RecentLookups(time.monotonic)
        self._group: Any = None
        self._open(params, components, extra_config or {})

    @harmless()
    def _open(self, params: Any, components: Any, extra: dict[str, Any]) -> None:
        kv = params.token_to_kv_pool_allocator.get_kvcache()
        self.pools = {PoolName.KV: kv}
        check_linker_version(sglang.__version__)
        options = parse_options(extra, LINKER)
        names = {str(getattr(each, "name", each)) for each in components}
        if params.pp_size > 1 or not names <= {"FULL", "MAMBA"}:
            what = "pipeline parallelism" if params.pp_size > 1 else f"a cache of {', '.join(sorted(names))}"
            log.warning("SGLang's KV is not cached, because the linker does not support %s", what)
            return
        from sglang.srt.model_executor.model_runner_components.weight_updater import WeightUpdater
        from sglang.srt.runtime_context import get_parallel

        parallel = get_parallel()
        full = getattr(kv, "full_kv_pool", kv)
        worker = Worker(
            tp_rank=parallel.attn_tp_rank,
            tp_size=parallel.attn_tp_size,
            cp_rank=params.attn_cp_rank,
            cp_size=params.attn_cp_size,
            replicated=type(full).__name__ == "MLATokenToKVPool",
            kv_heads=kv_heads(),
        )
        self._group = params.tp_cache_group
        facts = model_facts(engine_name())
        cache = PageCache(options, worker, lambda: identify(facts, model=options.model, weights=options.weights))
        watch(cache, WeightUpdater)
        cache.add_pool(KV, full, device_form_of)
        if "MAMBA" in names:
            mamba = params.req_to_token_pool.mamba_pool
            self.pools[PoolName.MAMBA] = mamba
            cache.add_pool(MAMBA, mamba, device_form_of)
        self.cache = cache

    @harmless(list)
    def lookup(self, rid: str, transfers: list[Any]) -> list[int]:
        cache = self.cache
        if cache is None or not transfers or not cache.attached(KV):
            return []
        full, *rest = transfers
        return self._recent.get(rid, full.keys, lambda: cache.find(full.keys, rest, LOOKUP_S).restorable)

    def load(self, rid: str, transfers: list[Any]) -> bool:
        """Load at once. Every rank gets the same answer."""
        self._recent.forget(rid)
        return self._agreed(self._load(transfers))

    @harmless(bool)
    def _load(self, transfers: list[Any]) -> bool:
        if self.cache is None:
            return False
        # The slots may be in use by a forward that has not ended.
        for event in self.record_offload_ready() if self.forward_stream is not None else ():
            event.synchronize()
        return all(all(self.cache.load(name_of(each), each.keys, each.device_indices.tolist())) for each in transfers)

    @harmless(bool)
    def _agreed(self, loaded: bool) -> bool:
        group = self._group
        if group is None or torch.distributed.get_world_size(group=group) == 1:
            return loaded
        verdict = torch.tensor([int(loaded)], dtype=torch.int)
        torch.distributed.all_reduce(verdict, op=torch.distributed.ReduceOp.MIN, group=group)
        return bool(verdict.item())

    def start_layer_wise_loading(self) -> int:
        """-1: there is nothing to wait for, `load` has done it."""
        return -1

    def finish_layer_wise_loading(self, counter_index: int) -> bool:
        return True

    def cancel_queued_load(self, rid: str) -> bool:
        """True: nothing writes into the slots any more."""
        return True

    @harmless(bool)
    def offload(self, transfers: list[Any], session_id: str | None = None) -> bool:
        cache = self.cache
        if cache is None or not cache.attached(KV):
            return False
        ready = self.record_offload_ready()
        moves = [(name_of(each), list(each.keys), each.device_indices) for each in transfers]

        def store() -> bool:
            for event in ready:
                event.synchronize()
            return all(all(cache.store(name, keys, indices.tolist())) for name, keys, indices in moves)

        return self._offloads.submit(store)

    def num_completed_offloads(self) -> int:
        return self._offloads.ended

    def pop_completed_offload(self) -> bool:
        return self._offloads.pop()

    @harmless()
    def reset(self) -> None:
        self._offloads.quiesce()
        self.layer_done_counter.reset()

    @harmless()
    def close(self) -> None:
        self._offloads.close()
        cache, self.cache = self.cache, None
        if cache is not None:
            cache.close()
