"""The copies between device and host pools, which SGLang has for accelerators only: what `--hicache-io-backend direct`
calls. Imports SGLang."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def install() -> None:
    from sglang.srt.mem_cache.pool_host import base, common, mamba, mha, mla

    base.HICACHE_HOST_MEMORY_RESERVE_BYTES = 0  # 10 GiB of free memory otherwise
    common._cuda_host_register = lambda _buffer, _granularity=None: None
    for module in (mha, mla, mamba):
        module.transfer_kv_direct = _by_token
        module.transfer_kv_all_layer_direct_lf_pf = _to_pages
        module.transfer_kv_per_layer_direct_pf_lf = _from_pages


def _by_token(
    src_layers: Sequence[Any], dst_layers: Sequence[Any], src_indices: Any, dst_indices: Any, page_size: int
) -> None:
    for source, target in zip(src_layers, dst_layers, strict=True):
        target[dst_indices] = source[src_indices]


def _pages(indices: Any, page_size: int) -> Any:
    return indices.reshape(-1, page_size)[:, 0] // page_size


def _to_pages(
    src_ptrs: Sequence[Any], dst_ptrs: Sequence[Any], src_indices: Any, dst_indices: Any, page_size: int
) -> None:
    """All layers of a device pool into pages of `[page, layer, token, ...]`; `src_ptrs` are plane by plane."""
    layers = len(src_ptrs) // len(dst_ptrs)
    for number, source in enumerate(src_ptrs):
        plane, layer = divmod(number, layers)
        target = dst_ptrs[plane]
        pages = source[src_indices].reshape(-1, page_size, *source.shape[1:])
        shape = target[0:1, layer].expand(len(pages), *target.shape[2:]).shape
        target[_pages(dst_indices, page_size), layer] = pages.reshape(shape)


def _from_pages(
    src_ptrs: Sequence[Any], dst_ptrs: Sequence[Any], src_indices: Any, dst_indices: Any, layer_id: int, page_size: int
) -> None:
    for source, target in zip(src_ptrs, dst_ptrs, strict=True):
        target[dst_indices] = source[_pages(src_indices, page_size), layer_id].reshape(-1, *target.shape[1:])
