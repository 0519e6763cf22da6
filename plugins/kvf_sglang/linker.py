"""`KvFrameworkLinker`, the class that SGLang's option `--unified-cache-external-linker-backend dynamic` names: its
device pools straight to the server, without a host pool between. Thin; no method raises, the constructor included.

A load is complete before SGLang hears of it: SGLang aborts the requests of a load that fails later, and an exception
ends its scheduler. So a failure of any rank is a refusal by all ranks, and the tokens are computed.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

import sglang
import torch
from sglang.srt.mem_cache.hicache_storage import PoolName
from sglang.srt.mem_cache.unified_cache.unified_cache_linker import LayerWiseLoadCounter, UnifiedCacheLinker

from kvf_sglang.cache import KV, PageCache, Worker, engine_name, name_of
from kvf_sglang.facts import kv_heads, model_facts
from kvf_sglang.harmless import harmless
from kvf_sglang.identity import identify
from kvf_sglang.offloads import Offloads
from kvf_sglang.options import LINKER, parse_options
from kvf_sglang.pools import TURNED, PoolForm, lie_as_shaped, release_of, state_form
from kvf_sglang.supported import check_linker_version
from kvf_sglang.weight_updates import watch
from kvframework.errors import BadLayout

# How long the scheduler waits for an answer.
LOOKUP_S = 0.1
MISS_HOLDS_S = 0.5
# Well before the pins of a hit end.
HIT_HOLDS_S = 10.0
MOST_REQUESTS = 4096


class RecentLookups:
    """Answers by request. For one thread."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._known: dict[str, tuple[float, tuple[str, str, int], list[int]]] = {}

    def get(self, request: str, keys: Sequence[str], ask: Callable[[], list[int]]) -> list[int]:
        """The answer for these keys: a recent one, or that of `ask`."""
        now, asked = self._clock(), (keys[0], keys[-1], len(keys))
        until, known, answer = self._known.get(request, (now, None, []))
        if known != asked or until <= now:
            answer = ask()
            self.forget(request)
            if len(self._known) >= MOST_REQUESTS:
                del self._known[next(iter(self._known))]
            self._known[request] = (now + (HIT_HOLDS_S if answer else MISS_HOLDS_S), asked, answer)
        return answer

    def forget(self, request: str) -> None:
        self._known.pop(request, None)


# Exact classes: their subclasses hold other things in the same attributes.
_MHA, _MLA, _MAMBA = "MHATokenToKVPool", "MLATokenToKVPool", "MambaPool"


def device_form_of(pool: Any, page_tokens: int) -> PoolForm:
    """The form of a device pool whose engine hashes pages of `page_tokens` tokens. Raises `BadLayout` for a pool that
    is not known to convert exactly."""
    kind = type(pool).__name__
    if kind == _MAMBA:
        cache = pool.mamba_cache
        beside = [getattr(cache, "replayssm_d", None), *getattr(pool, "_slot_siblings", [])]
        if any(each is not None for each in beside):
            raise _refused(pool, "its states have parts beside them")
        if not lie_as_shaped([cache.temporal, *cache.conv]):
            raise _refused(pool, TURNED)
        order = ("layer", "block", "dim")
        return state_form(cache.temporal, cache.conv, order, page_tokens, release=release_of(pool))
    if kind not in (_MHA, _MLA):
        raise _refused(pool, "its kind is not known to convert exactly")
    if pool.page_size != page_tokens:
        raise _refused(pool, f"its pages have {pool.page_size} tokens, those of the page hashes {page_tokens}")
    if getattr(pool, "kv_cache_layout", "nhd") != "nhd":
        raise _refused(pool, f"its layout is {pool.kv_cache_layout!r}")
    axes = ["token", "head", "dim"]
    if kind == _MLA:
        layers = {f"layer.{index}": buffer for index, buffer in enumerate(pool.kv_buffer)}
        return PoolForm(layers, {"axes": axes, "chunk_tokens": page_tokens}, slots=page_tokens, per_head=False)
    pairs = {f"layer.{at}": (k, v) for at, (k, v) in enumerate(zip(pool.k_buffer, pool.v_buffer, strict=True))}
    if any(k.shape != v.shape for k, v in pairs.values()):
        raise _refused(pool, "keys and values differ in size")
    return PoolForm(pairs, {"axes": axes, "chunk_tokens": page_tokens}, slots=page_tokens)


def _refused(pool: Any, why: str) -> BadLayout:
    return BadLayout(
        f"a device pool of kind {type(pool).__name__} cannot be kept: {why}",
        where="kvf_sglang",
        available=f"{_MHA}, {_MLA} and {_MAMBA}, as SGLang makes them by default",
        hint="use the storage backend of the hierarchical cache, or run this model without the linker",
    )


log = logging.getLogger(__name__)

MAMBA = "mamba"


def _always(answer: Any) -> Callable[..., Any]:
    return lambda *_args, **_kwargs: answer


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
        self.errors: dict[str, int] = {}
        self.cache: PageCache | None = None
        self.forward_stream = forward_stream
        self.pools: dict[Any, Any] = {}
        self.layer_done_counter = LayerWiseLoadCounter(1)
        self._offloads = Offloads()
        self._recent = RecentLookups(time.monotonic)
        self._group: Any = None
        self._open(params, components, extra_config or {})

    @harmless(_always(None))
    def _open(self, params: Any, components: Any, extra: dict[str, Any]) -> None:
        kv = params.token_to_kv_pool_allocator.get_kvcache()
        self.pools = {PoolName.KV: kv}
        check_linker_version(sglang.__version__)
        options = parse_options(extra, LINKER)
        names = {str(getattr(each, "name", each)) for each in components}
        if params.pp_size > 1 or not names <= {"FULL", "MAMBA"}:
            what = "pipeline parallelism" if params.pp_size > 1 else f"a cache of {', '.join(sorted(names))}"
            log.warning("nothing is cached: the linker does not serve %s", what)
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

    @harmless(_always([]))
    def lookup(self, rid: str, transfers: list[Any]) -> list[int]:
        cache = self.cache
        if cache is None or not transfers or not cache.attached(KV):
            return []
        full, *rest = transfers
        return self._recent.get(rid, full.keys, lambda: cache.find(full.keys, rest, LOOKUP_S).restorable)

    def load(self, rid: str, transfers: list[Any]) -> bool:
        """Loads at once. Every rank gets the same answer."""
        self._recent.forget(rid)
        return self._agreed(self._load(transfers))

    @harmless(_always(False))
    def _load(self, transfers: list[Any]) -> bool:
        if self.cache is None:
            return False
        # The slots may be in use by a forward that has not ended.
        self._written()
        return all(all(self.cache.load(name_of(each), each.keys, each.device_indices.tolist())) for each in transfers)

    @harmless(_always(False))
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

    @harmless(_always(False))
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

    @harmless(_always(None))
    def reset(self) -> None:
        self._offloads.quiesce()
        self.layer_done_counter.reset()

    @harmless(_always(None))
    def close(self) -> None:
        self._offloads.close()
        cache, self.cache = self.cache, None
        if cache is not None:
            cache.close()

    def _written(self) -> None:
        """Waits for the forward that may write the device pools."""
        for event in self.record_offload_ready() if self.forward_stream is not None else ():
            event.synchronize()
