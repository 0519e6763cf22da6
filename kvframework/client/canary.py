"""The canary of a declared layout: at registration the engine writes a pattern through its own view, the transport
gathers it, and both are compared, so that swapped planes, layers, heads or tokens are caught before a wrong byte is
stored. Engine side."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from kvframework.api.layout import EngineView, KVLayout, LayerGroup
from kvframework.errors import BadLayout, KVFrameworkError

if TYPE_CHECKING:
    import torch

# One block of each layer group as the transport gathers it, see `TransferContext.gather_block`.
GatherBlocks = Callable[[Sequence[int]], Sequence[bytes]]

_READS = 5
_SEED = 0x6B7666


def check_by_writing(gather: GatherBlocks, layout: KVLayout, view: EngineView) -> None:
    """Write a pattern into the spare blocks, compare it with the bytes that the transport gathers, and restore the
    blocks.

    Raises `BadLayout` with the expected and the found values. Blocking; nothing else may use the spare blocks
    meanwhile.
    """
    import torch

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
                _write(view, index, group, written)
                if not torch.equal(_as_bytes(_read(view, index, group)), _as_bytes(written)):
                    raise BadLayout("the engine's view does not read what it wrote", where=_at(view, index))
            _compare(gather, layout, view)
        finally:
            for index, group in enumerate(layout.groups):
                _write(view, index, group, before[index])


def check_by_reading(gather: GatherBlocks, layout: KVLayout, view: EngineView) -> None:
    """Compare the current content of the blocks instead, for an engine that is at work (after a reconnect). Raises and
    blocks as `check_by_writing` does."""
    import torch

    with torch.inference_mode():
        for attempt in range(_READS):
            try:
                _compare(gather, layout, view)
            except BadLayout:
                # The engine may have written in between; a wrong declaration is wrong every time.
                if attempt == _READS - 1:
                    raise
            else:
                return


def pattern(group_index: int, group: LayerGroup, device: torch.device | None = None) -> list[list[torch.Tensor]]:
    """Return pseudo-random finite values as `[plane][layer]`, each `[slots, heads, head_dim]`: no two places look
    alike."""
    import torch

    generator = torch.Generator().manual_seed(_SEED + group_index)
    dtype = getattr(torch, group.dtype)
    shape = (group.planes, group.num_layers, group.slots, group.heads, group.head_dim)
    raw = torch.randint(0, 256, (*shape, dtype.itemsize), dtype=torch.uint8, generator=generator)
    if dtype.is_floating_point:
        # Without its second highest bit no float format here can be an infinity or a NaN.
        raw[..., -1] &= 0xBF
    values = raw.view(dtype).squeeze(-1)
    return [list(plane.to(device) if device else plane) for plane in values]


def _compare(gather: GatherBlocks, layout: KVLayout, view: EngineView) -> None:
    import torch

    gathered = gather(view.spare_blocks)
    for index, (group, raw) in enumerate(zip(layout.groups, gathered, strict=True)):
        expected = _as_bytes(_read(view, index, group))
        if len(raw) != expected.numel():
            raise BadLayout(f"the transport gathered {len(raw)} bytes", available=f"{expected.numel()} bytes a block")
        found = torch.frombuffer(bytearray(raw), dtype=torch.uint8).view(expected.shape)
        if not torch.equal(found, expected):
            raise BadLayout(
                f"the declared layout is not the engine's: {_difference(found, expected)}",
                where=_at(view, index),
                available="axes in the order in which the engine's attention uses them",
                hint="correct the axes (or strides) in the layout's options",
            )


def _difference(found: torch.Tensor, expected: torch.Tensor) -> str:
    """Return the difference in the words of the declaration; both are bytes `[planes, layers, slots, heads, dim *
    size]`."""
    import torch

    planes, layers, slots, heads, _ = expected.shape
    if planes > 1 and torch.equal(found, expected.flip(0)):
        return "K and V are swapped"
    if layers > 1 and torch.equal(found, expected.flip(1)):
        return "the layers are in reverse order"
    swapped = expected.transpose(2, 3).reshape(expected.shape)
    if slots > 1 and heads > 1 and torch.equal(found, swapped):
        return "tokens and heads are swapped"
    places = (found != expected).any(dim=-1).nonzero()
    plane, layer, slot, head = (int(at) for at in places[0])
    want, got = expected[plane, layer, slot, head], found[plane, layer, slot, head]
    matches = (expected == got).all(dim=-1).nonzero()
    origin = f", which belongs to {_place(matches[0])}" if len(matches) else ""
    expected_hex, found_hex = bytes(want[:8].tolist()).hex(), bytes(got[:8].tolist()).hex()
    return (
        f"at {_place(places[0])} expected {expected_hex}, found {found_hex}{origin} "
        f"({len(places)} of {planes * layers * slots * heads} places differ)"
    )


def _place(index: torch.Tensor) -> str:
    plane, layer, slot, head = (int(at) for at in index)
    return f"plane {plane}, layer {layer}, token {slot}, head {head}"


def _at(view: EngineView, index: int) -> str:
    return f"layer group {index}, block {view.spare_blocks[index]}"


def _as_bytes(values: Sequence[Sequence[torch.Tensor]]) -> torch.Tensor:
    """Return `[plane][layer]` tensors as bytes in host memory, `[planes, layers, slots, heads, dim * dtype]`."""
    import torch

    return torch.stack([torch.stack(list(plane)) for plane in values]).cpu().contiguous().view(torch.uint8)


def _read(view: EngineView, index: int, group: LayerGroup) -> list[list[torch.Tensor]]:
    """Raises `BadLayout` for an error of the view, another shape or another dtype."""
    shape, dtype, block = (group.slots, group.heads, group.head_dim), f"torch.{group.dtype}", view.spare_blocks[index]
    found = []
    for plane in range(group.planes):
        with _named(view, index):
            found.append([view.read(index, layer, plane, block) for layer in range(group.num_layers)])
        for values in found[-1]:
            if (tuple(values.shape), str(values.dtype)) != (shape, dtype):
                raise BadLayout(
                    f"the engine's view reads {list(values.shape)} of {values.dtype}",
                    where=_at(view, index),
                    available=f"{list(shape)} (slots per block, heads, head_dim) of {dtype}",
                )
    return found


def _write(view: EngineView, index: int, group: LayerGroup, values: Sequence[Sequence[torch.Tensor]]) -> None:
    block = view.spare_blocks[index]
    with _named(view, index):
        for plane in range(group.planes):
            for layer in range(group.num_layers):
                view.write(index, layer, plane, block, values[plane][layer])


@contextlib.contextmanager
def _named(view: EngineView, index: int) -> Iterator[None]:
    """Raise `BadLayout` for any error of the engine's own code."""
    try:
        yield
    except KVFrameworkError:
        raise
    except Exception as error:
        raise BadLayout(
            f"the engine's view failed: {type(error).__name__}: {error}",
            where=_at(view, index),
            hint="correct the read or write of the EngineView",
        ) from error
