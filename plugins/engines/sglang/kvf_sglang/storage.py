"""`KvFrameworkStorage`, the class that SGLang's option `--hicache-storage-backend dynamic` names. Thin: it translates
between SGLang's classes and `PageCache`. No method raises, the constructor included."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from sglang.srt.mem_cache.hicache_storage import HiCacheStorage, PoolName, PoolTransferResult

import sglang
from kvf_sglang.cache import KV, NOTHING, PageCache, Worker, engine_name, name_of
from kvf_sglang.facts import identify, kv_heads, model_facts
from kvf_sglang.options import check_version, interface_of, parse_options
from kvf_sglang.weight_updates import watch
from kvframework.client import ErrorNotes, harmless

if TYPE_CHECKING:
    import torch

log = logging.getLogger(__name__)


def _all_failed(_storage: object, keys: Sequence[str], *_args: object, **_kwargs: object) -> list[bool]:
    return [False] * len(keys)


def _all_pools_failed(
    _storage: object, transfers: Sequence[Any], *_args: object, **_kwargs: object
) -> dict[Any, list[bool]]:
    return {transfer.name: [False] * len(transfer.keys or ()) for transfer in transfers}


class KvFrameworkStorage(HiCacheStorage):  # type: ignore[misc]
    """SGLang's host pools, page by page, in the server. `cache` is None if the backend cannot serve this engine: the
    log says why, and everything is a miss."""

    def __init__(self, storage_config: Any, kwargs: Any = None) -> None:
        self.errors = ErrorNotes()
        self.cache: PageCache | None = None
        self._metrics = False
        self._open(storage_config)

    @harmless()
    def _open(self, config: Any) -> None:
        extra = config.extra_config if isinstance(config.extra_config, dict) else {}
        # SGLang asks for it after the constructor: pages go straight between pool and arena.
        extra["interface_v1"] = 1
        tried = check_version(sglang.__version__, interface_of(HiCacheStorage))
        options = parse_options(extra)
        worker = Worker(
            tp_rank=config.tp_rank,
            tp_size=config.tp_size,
            pp_rank=config.pp_rank,
            pp_size=config.pp_size,
            cp_rank=config.attn_cp_rank,
            cp_size=config.attn_cp_size,
            replicated=config.is_mla_model,
            kv_heads=kv_heads(),
        )
        # Read now, in the engine's thread; the files are read later.
        facts = model_facts(engine_name())
        from sglang.srt.model_executor.model_runner_components.weight_updater import WeightUpdater

        cache = PageCache(
            options, worker, lambda: identify(facts, model=options.model, weights=options.weights), release=tried
        )
        watch(cache, WeightUpdater)
        self._metrics = bool(config.enable_storage_metrics)
        self.cache = cache

    @harmless()
    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        self.mem_pool_host = mem_pool_host
        if self.cache is not None:
            self.cache.add_pool(KV, mem_pool_host)

    @harmless()
    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: Any) -> None:
        name = str(getattr(host_pool_name, "value", host_pool_name))
        if self.cache is not None and name != KV:
            self.cache.add_pool(name, host_pool)

    @harmless(int)
    def batch_exists(self, keys: list[str], extra_info: Any = None) -> int:
        return self.cache.find(keys).pages if self.cache is not None else 0

    @harmless(PoolTransferResult.empty)
    def batch_exists_v2(
        self, keys: list[str], pool_transfers: list[Any] | None = None, extra_info: Any = None
    ) -> PoolTransferResult:
        found = self.cache.find(keys, pool_transfers or ()) if self.cache is not None else NOTHING
        # SGLang looks its names up as they are: an equal text has another hash.
        by_pool = {PoolName(name): pages for name, pages in found.by_pool.items()}
        return PoolTransferResult(found.pages, by_pool, found.restorable)

    @harmless(then=_all_failed)
    def batch_get_v1(self, keys: list[str], host_indices: torch.Tensor, extra_info: Any = None) -> list[bool]:
        if self.cache is None:
            return [False] * len(keys)
        return self.cache.load(KV, keys, host_indices.tolist())

    @harmless(then=_all_failed)
    def batch_set_v1(self, keys: list[str], host_indices: torch.Tensor, extra_info: Any = None) -> list[bool]:
        if self.cache is None:
            return [False] * len(keys)
        return self.cache.store(KV, keys, host_indices.tolist())

    @harmless(then=_all_pools_failed)
    def batch_get_v2(self, transfers: list[Any], extra_info: Any = None) -> dict[Any, list[bool]]:
        return self._moved(transfers, storing=False)

    @harmless(then=_all_pools_failed)
    def batch_set_v2(self, transfers: list[Any], extra_info: Any = None) -> dict[Any, list[bool]]:
        return self._moved(transfers, storing=True)

    def _moved(self, transfers: list[Any], *, storing: bool) -> dict[Any, list[bool]]:
        results = _all_pools_failed(self, transfers)
        if self.cache is None:
            return results
        move = self.cache.store if storing else self.cache.load
        for transfer in transfers:
            if transfer.keys and transfer.host_indices is not None:
                results[transfer.name] = move(name_of(transfer), transfer.keys, transfer.host_indices.tolist())
        return results

    # The calls that copy pages through separate tensors are not used: `interface_v1` is on.

    @harmless()
    def get(self, key: str, target_location: Any = None, target_sizes: Any = None) -> None:
        return None

    def batch_get(self, keys: list[str], target_locations: Any = None, target_sizes: Any = None) -> list[None]:
        return [None] * len(keys)

    def set(self, key: str, value: Any = None, target_location: Any = None, target_sizes: Any = None) -> bool:
        return False

    def batch_set(
        self, keys: list[str], values: Any = None, target_locations: Any = None, target_sizes: Any = None
    ) -> bool:
        return False

    @harmless(bool)
    def exists(self, key: str) -> bool:
        return self.batch_exists([key]) == 1

    @harmless()
    def clear(self) -> None:
        """This engine finds nothing of what is stored any more; the server keeps it, since other engines use it."""
        if self.cache is not None:
            self.cache.forget()

    @harmless()
    def get_stats(self) -> Any:
        """The transfers since the last call, as SGLang's storage metrics; None if these are off."""
        if self.cache is None or not self._metrics:
            return None
        from sglang.srt.observability.metrics_collector import StorageMetrics

        pages, gb_per_s = self.cache.tally.take()
        return StorageMetrics(pages["prefetch"], pages["backup"], gb_per_s["prefetch"], gb_per_s["backup"])

    @harmless()
    def close(self) -> None:
        cache, self.cache = self.cache, None
        if cache is not None:
            cache.close()
