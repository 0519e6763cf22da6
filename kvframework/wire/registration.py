"""The meaning of a registration, for both sides: the layout, desc and namespace of eight fields, and the order of
layers' names. Pure."""

from __future__ import annotations

import re

from kvframework.api.keys import compute_namespace
from kvframework.api.layout import KVLayout, LayerGroup, MemoryLayoutDesc, canonical_desc
from kvframework.wire.messages import RegisterNonGpuContextPayload

# The meaning of the eight-field registration: its layout, its desc and its namespace.
#
# Engine and server both compute the namespace here, so that neither has to receive it from the other.


def non_gpu_layout(payload: RegisterNonGpuContextPayload) -> KVLayout:
    """One layer group in canonical form; the number of blocks is not declared."""
    group = LayerGroup(
        num_layers=payload.num_layers,
        block_size=payload.block_size,
        heads=1,
        head_dim=payload.hidden_dim_size,
        dtype=payload.dtype_str,
        planes=1 if payload.use_mla else 2,
    )
    return KVLayout("canonical", (group,))


def non_gpu_desc(payload: RegisterNonGpuContextPayload, chunk_size: int) -> MemoryLayoutDesc:
    """The memory layout of objects. Raises `BadLayout` / `BadDtype`."""
    return canonical_desc(non_gpu_layout(payload), chunk_size)


def non_gpu_namespace(payload: RegisterNonGpuContextPayload, hasher_fingerprint: str, chunk_size: int) -> bytes:
    """The 16-byte namespace. `chunk_size` is the server's configured one, as in HELLO's reply."""
    return compute_namespace(
        model=payload.model_name,
        desc=non_gpu_desc(payload, chunk_size),
        hasher_fingerprint=hasher_fingerprint,
        world_size=payload.world_size,
    )


# The natural order of the names of layers, in which numbers in a text compare as numbers. Pure.


def natural(name: str) -> tuple[list[tuple[str, int, str]], str]:
    """Alternate texts and numbers, numbers without leading zeros; then the name itself, since "1" and "01" differ."""
    parts = re.split(r"([0-9]+)", name)
    numbers = [number.lstrip("0") for number in (*parts[1::2], "")]
    return [(text, len(number), number) for text, number in zip(parts[::2], numbers, strict=True)], name
