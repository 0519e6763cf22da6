"""The form `canonical`: the vLLM KV layouts, by vLLM's own names, that hold each element of keys and values unchanged,
and the views that show it. Such objects are read by engines of other layouts, so layouts not named here are refused.
Engine side, pure."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from kvf_vllm.layouts import NULL_BLOCK, GroupFacts, OpaqueBlocks, block_tensors, group_rules
from kvframework.api.layout import LayerTensors
from kvframework.errors import BadLayout

if TYPE_CHECKING:
    import torch

    # Keys and values of one layer, each [blocks, tokens, heads, dim].
    Planes = tuple[torch.Tensor, torch.Tensor]

AXES = ("block", "token", "head", "dim")
# All of them have the same axes, in another order of memory, which the tensors' strides express.
_ANY_ORDER = frozenset({"LBHNC", "LBNHC", "LHBNC", "BLHNC", "BLNHC", "BHLNC"})


@dataclass(frozen=True)
class LayerForm:
    """One layer's cache in vLLM's own words. `dtype` is that of the cache, `model_dtype` that of the model's
    computation; `spec` is the class of its cache's description, `packed` is True if the description names an order of
    its own."""

    backend: str
    isa: str
    cache_layout: str
    spec: str
    dtype: str
    model_dtype: str
    kv_dtype: str
    heads: int
    head_size: int
    head_size_v: int
    block_size: int
    packed: bool = False

    def __str__(self) -> str:
        names = (self.backend, self.isa, self.cache_layout, self.spec, self.dtype, self.kv_dtype)
        return "/".join(name for name in names if name)


def _side_by_side(tensor: torch.Tensor, dim: int) -> Planes:
    """Views of `[blocks, heads, tokens, 2 * dim]`: a token's key, then its value."""
    keys, values = tensor[..., :dim], tensor[..., dim:]
    return keys.transpose(1, 2), values.transpose(1, 2)


def _keys_transposed(tensor: torch.Tensor, dim: int) -> Planes:
    """Views of blocks that hold for each head first all keys, as `[dim, tokens]`, then all values, as `[tokens,
    dim]`."""
    blocks, heads, tokens, _ = tensor.shape
    halves = tensor.view(blocks, heads, 2, tokens * dim)
    keys = halves[:, :, 0].view(blocks, heads, dim, tokens)
    values = halves[:, :, 1].view(blocks, heads, tokens, dim)
    return keys.permute(0, 3, 1, 2), values.transpose(1, 2)


class _Exact(NamedTuple):
    cache_layouts: frozenset[str]
    planes: Callable[[torch.Tensor, int], Planes]


# By attention backend and instruction set. Blocks packed for `amx` have more axes than a view of a block may have; the
# others have not been examined yet.
_EXACT = {
    ("FLASH_ATTN", ""): _Exact(_ANY_ORDER, _side_by_side),
    ("FLASHINFER", ""): _Exact(_ANY_ORDER, _side_by_side),
    ("TRITON_ATTN", ""): _Exact(_ANY_ORDER, _side_by_side),
    ("FLEX_ATTENTION", ""): _Exact(_ANY_ORDER, _side_by_side),
    ("CPU_ATTN", "vec"): _Exact(frozenset({"LBHNC"}), _keys_transposed),
    ("CPU_ATTN", "vec16"): _Exact(frozenset({"LBHNC"}), _keys_transposed),
}
_SPECS = frozenset({"FullAttentionSpec", "SlidingWindowSpec"})
_FLOATS = frozenset({"float16", "bfloat16", "float32"})


class CanonicalBlocks:
    """Blocks whose elements become objects `[planes, layers, slots, hidden]`. Raises `BadLayout` for a layer whose
    layout is not known to convert exactly."""

    layout = "paged"
    packing = ""

    def __init__(self, forms: Mapping[str, LayerForm]) -> None:
        for name, form in forms.items():
            _check(name, form)
        self._forms = dict(forms)

    def options(self, groups: Sequence[GroupFacts]) -> dict[str, object]:
        return {"axes": list(AXES), "groups": group_rules(groups)}

    def tensors(
        self, groups: Sequence[GroupFacts], kv_caches: Mapping[str, torch.Tensor], num_blocks: int
    ) -> dict[str, LayerTensors]:
        return dict(self.planes(groups, kv_caches, num_blocks))

    def planes(
        self, groups: Sequence[GroupFacts], kv_caches: Mapping[str, torch.Tensor], num_blocks: int
    ) -> dict[str, Planes]:
        """The keys and values of each layer, as views of the engine's memory. Raises `BadLayout`."""
        for group in groups:
            _check_order(group.layers)
        found = {}
        for name in block_tensors(groups, kv_caches, num_blocks):
            form, tensor = self._forms[name], kv_caches[name]
            shape = (num_blocks, form.heads, form.block_size, form.head_size + form.head_size_v)
            if tuple(tensor.shape) != shape:
                raise _refused(f"the layer's tensor has the shape {tuple(tensor.shape)}, not {shape}", name)
            found[name] = _EXACT[form.backend, form.isa].planes(tensor, form.head_size)
        return found


BlockForm = OpaqueBlocks | CanonicalBlocks


def _check(name: str, form: LayerForm) -> None:
    exact = _EXACT.get((form.backend, form.isa))
    if exact is None or form.cache_layout not in exact.cache_layouts:
        raise _refused(f"the layer's cache is {form}, whose order of elements has no exact conversion", name)
    if form.spec not in _SPECS or form.packed or form.head_size != form.head_size_v:
        raise _refused(f"the layer's cache is {form}, which does not hold keys and values of one size", name)
    if form.dtype not in _FLOATS or form.dtype != form.model_dtype or form.kv_dtype not in ("auto", form.dtype):
        raise _refused(f"the layer's cache is {form}, but the model computes KV in {form.model_dtype}", name)


def _check_order(names: Sequence[str]) -> None:
    """Check the order of the layers: objects hold them in the model's order, which vLLM gives only by numbers in their
    names."""
    places = layer_numbers(names)
    if len(places) != len(names) or places != sorted(set(places)):
        raise _refused(f"the order of the layers cannot be derived from their names: {', '.join(names[:4])}", names[0])


def layer_numbers(names: Sequence[str]) -> list[int]:
    """The number of each layer whose name has one."""
    numbers = [re.findall(r"(?<![^.])\d+(?![^.])", name) for name in names]
    return [int(found[0]) for found in numbers if len(found) == 1]


def _refused(fact: str, layer: str) -> BadLayout:
    known = "; ".join(sorted("/".join(filter(None, each)) for each in _EXACT))
    return BadLayout(
        f'kvframework.layout is "canonical", but {fact}',
        where=f"kvf_vllm, layer {layer}",
        available=f"{known}; with --kv-cache-dtype auto",
        hint='leave kvframework.layout at "opaque"',
    )


def prove_planes(
    layers: Mapping[str, Any],
    kv_caches: Mapping[str, torch.Tensor],
    planes: Mapping[str, tuple[torch.Tensor, torch.Tensor]],
) -> None:
    """Prove that keys and values lie where form `canonical` expects them: vLLM writes a pattern by its own code, into
    the block that it never hands out, and the views must show it. Runs in the worker, once, before the engine serves.

    `layers` are vLLM's attention layers, `planes` the views of each, `[blocks, tokens, heads, dim]`. The null block
    must be unused meanwhile; its former contents are restored. Raises `BadLayout` naming the layer."""
    import torch

    with torch.inference_mode():
        for name, (keys, values) in planes.items():
            update = getattr(layers[name].impl, "do_kv_cache_update", None)
            if update is None:
                raise _refused("vLLM has no function that writes KV to compare with", name)
            tensor = kv_caches[name]
            before = tensor[NULL_BLOCK].clone()
            written = [_pattern(plane[NULL_BLOCK], seed) for seed, plane in enumerate((keys, values))]
            tokens = keys.shape[1]
            slots = torch.arange(tokens, device=tensor.device) + NULL_BLOCK * tokens
            try:
                update(layers[name], *written, tensor, slots)
                if not (torch.equal(keys[NULL_BLOCK], written[0]) and torch.equal(values[NULL_BLOCK], written[1])):
                    raise _refused("vLLM writes keys and values to other places", name)
            finally:
                tensor[NULL_BLOCK].copy_(before)


def _pattern(like: torch.Tensor, seed: int) -> torch.Tensor:
    import torch

    values = torch.randn(like.shape, generator=torch.Generator().manual_seed(seed))
    return values.to(device=like.device, dtype=like.dtype)
