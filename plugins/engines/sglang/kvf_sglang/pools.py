"""The declaration of SGLang's host and device pools to the framework: the axes of each pool's memory, by the names that
SGLang gives to pool classes and layouts. Nothing is guessed from shapes. Pure: pools are duck-typed, nothing imports
SGLang.

Keys and values become canonical objects, `[planes, layers, tokens, hidden]`, so pools of different layouts, and engines
of other kinds, share them. Objects of device pools, for loads and stores without a host pool between, are those of the
host pools.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvframework.api.layout import LayerTensors
from kvframework.errors import BadLayout

if TYPE_CHECKING:
    import torch


# By the pool's `layout`.
_KEYS_AND_VALUES = {
    "layer_first": ("plane", "layer", "token", "head", "dim"),
    "page_first": ("plane", "token", "layer", "head", "dim"),
    "page_first_direct": ("plane", "block", "layer", "token", "head", "dim"),
    "page_head": ("plane", "block", "head", "token", "layer", "dim"),
}
_LATENT = {
    "layer_first": ("layer", "token", "head", "dim"),
    "page_first": ("token", "layer", "head", "dim"),
    "page_first_direct": ("block", "layer", "token", "head", "dim"),
}
_STATE_LAYOUTS = ("page_first", "page_first_direct")
TURNED = "its states are not laid out in the order of their shape"
# Exact classes: their subclasses hold other things in the same attributes.
_MHA, _MLA, _MAMBA = "MHATokenToKVPoolHost", "MLATokenToKVPoolHost", "MambaPoolHost"


@dataclass(frozen=True)
class PoolForm:
    """One pool as a layout plugin takes it: views of its memory, and the options of `layout.paged`.

    `slots` is the number of the pool's indices in one page. `per_head` is True if ranks of one tensor-parallel group
    hold different heads of it, or different parts of a state. `state`: an entry is the state after a page's last token,
    and `packing` names what the order of its elements depends on.
    """

    tensors: Mapping[str, LayerTensors]
    options: Mapping[str, object]
    slots: int
    per_head: bool = True
    state: bool = False
    packing: str = ""


def form_of(pool: Any, page_tokens: int) -> PoolForm:
    """The form of a host pool whose engine hashes pages of `page_tokens` tokens. Raises `BadLayout` for a pool that is
    not known to convert exactly."""
    kind = type(pool).__name__
    if getattr(pool, "dcp_size", 1) != 1:
        raise _refused(pool, "decode context parallelism splits its pages")
    if kind == _MAMBA:
        return _states(pool, page_tokens)
    if kind not in (_MHA, _MLA):
        raise _refused(pool, "its kind has no exact conversion")
    if pool.page_size != page_tokens:
        raise _refused(pool, f"its pages have {pool.page_size} tokens, those of the page hashes {page_tokens}")
    axes = (_KEYS_AND_VALUES if kind == _MHA else _LATENT).get(pool.layout)
    buffer = pool.kv_buffer
    if axes is None or buffer is None:
        raise _refused(pool, f"its layout is {pool.layout!r}")
    if kind == _MHA and pool.v_head_dim != pool.head_dim:
        raise _refused(pool, f"keys have {pool.head_dim} elements a head, values {pool.v_head_dim}")
    return PoolForm(
        {"kv": buffer}, {"axes": list(axes), "chunk_tokens": page_tokens}, slots=page_tokens, per_head=kind == _MHA
    )


def _states(pool: Any, page_tokens: int) -> PoolForm:
    if pool.layout not in _STATE_LAYOUTS or pool.page_size != 1:
        raise _refused(pool, f"its layout is {pool.layout!r}, its slots hold {pool.page_size} states")
    on_device = getattr(pool, "buffer_info", None)
    if on_device is not None and not lie_as_shaped([on_device.temporal, *on_device.conv]):
        raise _refused(pool, TURNED)
    more = getattr(pool, "slot_state_buffers", ())
    axes = ("block", "layer", "dim")
    return state_form(pool.temporal_buffer, pool.conv_buffer, axes, page_tokens, more, release=release_of(pool))


def state_form(
    temporal: torch.Tensor,
    convolutions: Sequence[torch.Tensor],
    axes: tuple[str, ...],
    page_tokens: int,
    more: Sequence[torch.Tensor] = (),
    *,
    release: str,
) -> PoolForm:
    """The form of recurrent states, one slot a state. Their parts differ in dtype, and each is a layer group: `axes`
    are those of the first two kinds, whose further axes are the state itself, `more` have slots first.

    Only the code of SGLang's `release` knows how the numbers of a state lie, whose shape may stay the same when they
    are turned round."""
    tensors: dict[str, LayerTensors] = {}
    groups = []
    shapes: dict[str, list[int]] = {}

    def add(name: str, buffer: torch.Tensor, axes: tuple[str, ...]) -> None:
        if buffer.numel():
            tensors[name] = buffer.flatten(len(axes) - 1)
            # Host pools have an axis of one more.
            shapes[name] = [size for size in buffer.shape[len(axes) - 1 :] if size > 1]
            groups.append({"layers": [name], "state": True, "axes": list(axes)})

    add("temporal", temporal, axes)
    for index, buffer in enumerate(convolutions):
        add(f"conv_{index}", buffer, axes)
    for index, buffer in enumerate(more):
        add(f"slot_{index}", buffer, ("block", "dim"))
    text = json.dumps([release, shapes], sort_keys=True)
    packing = "states:" + hashlib.blake2b(text.encode(), digest_size=8, person=b"kvf-sgl-states").hexdigest()
    return PoolForm(tensors, {"groups": groups, "chunk_tokens": page_tokens}, slots=1, state=True, packing=packing)


def lie_as_shaped(states: Sequence[torch.Tensor]) -> bool:
    """True if the numbers of each state lie in the order of its shape, behind the axes of layers and slots. Those of
    convolutions do not on CPUs with AMX; on NPUs their shape is another one."""
    return all(each[:1, :1].is_contiguous() for each in states)


def release_of(pool: Any) -> str:
    """The release of the package that a pool's class is from, "" if it says none."""
    return str(getattr(sys.modules.get(type(pool).__module__.partition(".")[0]), "__version__", ""))


def _refused(pool: Any, why: str) -> BadLayout:
    return BadLayout(
        f"a host pool of kind {type(pool).__name__} cannot be cached: {why}",
        where="kvf_sglang",
        available=f"{_MHA}: {', '.join(_KEYS_AND_VALUES)}; {_MLA}: {', '.join(_LATENT)}; "
        f"{_MAMBA}: {', '.join(_STATE_LAYOUTS)}",
        hint="choose one of these with --hicache-mem-layout, or run this model without the backend",
    )


# Exact classes: their subclasses hold other things in the same attributes.
_DEVICE_MHA, _DEVICE_MLA, _DEVICE_MAMBA = "MHATokenToKVPool", "MLATokenToKVPool", "MambaPool"


def device_form_of(pool: Any, page_tokens: int) -> PoolForm:
    """The form of a device pool whose engine hashes pages of `page_tokens` tokens. Raises `BadLayout` for a pool that
    is not known to convert exactly."""
    kind = type(pool).__name__
    if kind == _DEVICE_MAMBA:
        cache = pool.mamba_cache
        beside = [getattr(cache, "replayssm_d", None), *getattr(pool, "_slot_siblings", [])]
        if any(each is not None for each in beside):
            raise _device_refused(pool, "its states have further tensors")
        if not lie_as_shaped([cache.temporal, *cache.conv]):
            raise _device_refused(pool, TURNED)
        order = ("layer", "block", "dim")
        return state_form(cache.temporal, cache.conv, order, page_tokens, release=release_of(pool))
    if kind not in (_DEVICE_MHA, _DEVICE_MLA):
        raise _device_refused(pool, "its kind has no exact conversion")
    if pool.page_size != page_tokens:
        raise _device_refused(pool, f"its pages have {pool.page_size} tokens, those of the page hashes {page_tokens}")
    if getattr(pool, "kv_cache_layout", "nhd") != "nhd":
        raise _device_refused(pool, f"its layout is {pool.kv_cache_layout!r}")
    axes = ["token", "head", "dim"]
    if kind == _DEVICE_MLA:
        layers = {f"layer.{index}": buffer for index, buffer in enumerate(pool.kv_buffer)}
        return PoolForm(layers, {"axes": axes, "chunk_tokens": page_tokens}, slots=page_tokens, per_head=False)
    pairs = {f"layer.{at}": (k, v) for at, (k, v) in enumerate(zip(pool.k_buffer, pool.v_buffer, strict=True))}
    if any(k.shape != v.shape for k, v in pairs.values()):
        raise _device_refused(pool, "keys and values differ in size")
    return PoolForm(pairs, {"axes": axes, "chunk_tokens": page_tokens}, slots=page_tokens)


def _device_refused(pool: Any, why: str) -> BadLayout:
    return BadLayout(
        f"a device pool of kind {type(pool).__name__} cannot be cached: {why}",
        where="kvf_sglang",
        available=f"{_DEVICE_MHA}, {_DEVICE_MLA} and {_DEVICE_MAMBA}, as SGLang makes them by default",
        hint="use the storage backend of the hierarchical cache, or run this model without the linker",
    )
