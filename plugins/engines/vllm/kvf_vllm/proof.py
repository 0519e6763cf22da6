"""The proof that keys and values lie where form `canonical` expects them: vLLM writes a pattern by its own code, into
the block that it never hands out, and the views must show it. Runs in the worker, once, before the engine serves."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from kvf_vllm.layouts import NULL_BLOCK
from kvframework.errors import BadLayout


def prove_planes(
    layers: Mapping[str, Any],
    kv_caches: Mapping[str, torch.Tensor],
    planes: Mapping[str, tuple[torch.Tensor, torch.Tensor]],
) -> None:
    """`layers` are vLLM's attention layers, `planes` the views of each, `[blocks, tokens, heads, dim]`. The null block
    must be unused meanwhile; its former contents are restored. Raises `BadLayout` naming the layer."""
    with torch.inference_mode():
        for name, (keys, values) in planes.items():
            update = getattr(layers[name].impl, "do_kv_cache_update", None)
            if update is None:
                raise _unproven(name, "vLLM has no write of its own to compare with")
            tensor = kv_caches[name]
            before = tensor[NULL_BLOCK].clone()
            written = [_pattern(plane[NULL_BLOCK], seed) for seed, plane in enumerate((keys, values))]
            tokens = keys.shape[1]
            slots = torch.arange(tokens, device=tensor.device) + NULL_BLOCK * tokens
            try:
                update(layers[name], *written, tensor, slots)
                if not (torch.equal(keys[NULL_BLOCK], written[0]) and torch.equal(values[NULL_BLOCK], written[1])):
                    raise _unproven(name, "vLLM's own write puts keys and values elsewhere")
            finally:
                tensor[NULL_BLOCK].copy_(before)


def _pattern(like: torch.Tensor, seed: int) -> torch.Tensor:
    values = torch.randn(like.shape, generator=torch.Generator().manual_seed(seed))
    return values.to(device=like.device, dtype=like.dtype)


def _unproven(layer: str, fact: str) -> BadLayout:
    return BadLayout(
        f'kvframework.layout is "canonical", but {fact}',
        where=f"kvf_vllm, layer {layer}",
        available="the order of elements that this release of vLLM is known to have",
        hint='leave kvframework.layout at "opaque", and report this',
    )
