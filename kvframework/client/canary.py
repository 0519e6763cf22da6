"""The canary of a declared layout: at registration the engine writes a pattern through its own view, the transport
gathers it, and both are compared, so that swapped planes, layers, heads or tokens are caught before a wrong byte is
stored. Engine side; imported only where an engine gives its view, since it needs torch."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence

import torch

from kvframework.api.layout import EngineView, KVLayout, LayerGroup
from kvframework.errors import BadLayout, KVFrameworkError

# One block of each layer group as the transport gathers it, see `TransferContext.gather_block`.
GatherBlocks = Callable[[Sequence[int]], Sequence[bytes]]
# `[plane][layer]`, each `[slots, heads, head_dim]`.
Values = Sequence[Sequence[torch.Tensor]]

_SEED = 0x6B7666


def check_by_writing(gather: GatherBlocks, layout: KVLayout, view: EngineView) -> None:
    """Write a pattern into the spare blocks, compare it with the bytes that the transport gathers, and restore the
    blocks. Blocking; nothing else may use the spare blocks meanwhile. Raises `BadLayout` with both values."""
    if len(view.spare_blocks) != len(layout.groups):
        raise BadLayout(
            f"the engine's view has {len(view.spare_blocks)} spare blocks",
            available=f"{len(layout.groups)}, one per layer group",
        )
    with torch.inference_mode():
        before = [_read(view, index, group) for index, group in enumerate(layout.groups)]
        try:
            for index, group in enumerate(layout.groups):
                written = pattern(index, group, before[index][0][0].device)
                _write(view, index, written)
                if not torch.equal(_as_bytes(_read(view, index, group)), _as_bytes(written)):
                    raise BadLayout("the engine's view reads values that were not written", where=_at(view, index))
            _compare(gather, layout, view)
        finally:
            for index, values in enumerate(before):
                _write(view, index, values)


def pattern(group_index: int, group: LayerGroup, device: torch.device | None = None) -> Values:
    """Return pseudo-random finite values of one block: no two places look alike."""
    generator = torch.Generator().manual_seed(_SEED + group_index)
    dtype = getattr(torch, group.dtype)
    shape = (group.planes, group.num_layers, group.slots, group.heads, group.head_dim)
    raw = torch.randint(0, 256, (*shape, dtype.itemsize), dtype=torch.uint8, generator=generator)
    if dtype.is_floating_point:
        # Without its second highest bit no float format here can be an infinity or a NaN.
        raw[..., -1] &= 0xBF
    return [list(plane) for plane in raw.view(dtype).squeeze(-1).to(device=device)]


def _compare(gather: GatherBlocks, layout: KVLayout, view: EngineView) -> None:
    for index, (group, raw) in enumerate(zip(layout.groups, gather(view.spare_blocks), strict=True)):
        expected = _as_bytes(_read(view, index, group))
        if len(raw) != expected.numel():
            raise BadLayout(f"a gathered block has {len(raw)} bytes", available=f"{expected.numel()} bytes")
        found = torch.frombuffer(bytearray(raw), dtype=torch.uint8).view(expected.shape)
        if not torch.equal(found, expected):
            raise BadLayout(
                f"the declared layout differs from the engine's: {_difference(found, expected)}",
                where=_at(view, index),
                available="axes in the order in which the engine's attention uses them",
                hint="correct the axes (or strides) in the layout's options",
            )


def _difference(found: torch.Tensor, expected: torch.Tensor) -> str:
    """Return the first difference; both are bytes `[planes, layers, slots, heads, dim * size]`."""
    places = (found != expected).any(dim=-1).nonzero()
    plane, layer, slot, head = at = tuple(places[0].tolist())
    want, got = (bytes(each[at][:8].tolist()).hex() for each in (expected, found))
    where = f"plane {plane}, layer {layer}, token {slot}, head {head}"
    return f"at {where} expected {want}, found {got} ({len(places)} of {expected[..., 0].numel()} places differ)"


def _at(view: EngineView, index: int) -> str:
    return f"layer group {index}, block {view.spare_blocks[index]}"


def _as_bytes(values: Values) -> torch.Tensor:
    """Return the values as bytes in host memory, `[planes, layers, slots, heads, dim * dtype]`."""
    return torch.stack([torch.stack(list(plane)) for plane in values]).cpu().contiguous().view(torch.uint8)


def _read(view: EngineView, index: int, group: LayerGroup) -> Values:
    """Raise `BadLayout` for an error of the view, another shape or another dtype."""
    block, layers = view.spare_blocks[index], range(group.num_layers)
    with _named(view, index):
        found = [[view.read(index, layer, plane, block) for layer in layers] for plane in range(group.planes)]
    wanted = ([group.slots, group.heads, group.head_dim], f"torch.{group.dtype}")
    for values in (each for plane in found for each in plane):
        if (list(values.shape), str(values.dtype)) != wanted:
            fact = f"the engine's view reads {list(values.shape)} of {values.dtype}"
            available = f"{wanted[0]} (slots per block, heads, head_dim) of {wanted[1]}"
            raise BadLayout(fact, where=_at(view, index), available=available)
    return found


def _write(view: EngineView, index: int, values: Values) -> None:
    with _named(view, index):
        for plane, layers in enumerate(values):
            for layer, each in enumerate(layers):
                view.write(index, layer, plane, view.spare_blocks[index], each)


@contextlib.contextmanager
def _named(view: EngineView, index: int) -> Iterator[None]:
    """Raise `BadLayout` for any error of the engine's own code."""
    try:
        yield
    except KVFrameworkError:
        raise
    except Exception as error:
        fact = f"the engine's view failed: {type(error).__name__}: {error}"
        raise BadLayout(fact, where=_at(view, index), hint="correct the read or write of the EngineView") from error
