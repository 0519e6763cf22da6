"""The declaration of SGLang's device pools to the framework, for loads and stores without a host pool between. Their
objects are those of the host pools. Pure: pools are duck-typed, nothing imports SGLang."""

from __future__ import annotations

from typing import Any

from kvf_sglang.pools import TURNED, PoolForm, lie_as_shaped, release_of, state_form
from kvframework.errors import BadLayout

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
