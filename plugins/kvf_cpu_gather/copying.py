"""Owns the copies between engine tensors and canonical objects in the arena. Engine side, blocking, no server calls.

A canonical object is `[planes, layers, slots, hidden]`; engine memory is seen as one view
`[blocks, slots per block, heads, dim]` per plane and layer. Elements move as integers of their size, since a copy needs
no arithmetic and not every dtype has every kernel.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from kvframework.api import GroupDesc

if TYPE_CHECKING:
    # [plane][layer], each [blocks, slots per block, heads, dim]
    GroupViews = Sequence[Sequence[torch.Tensor]]

# Where the arena's memory can be copied from and to without a stream.
_HOST = frozenset({"cpu"})
_INTEGER = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def object_view(arena: torch.Tensor, offset: int, desc: GroupDesc, sample: torch.Tensor) -> torch.Tensor:
    """The object at `offset` of `arena` (bytes) as `[planes, layers, blocks, slots, heads, dim]` of integers.

    `sample` is any view of the group. Borrows the arena.
    """
    planes, layers = desc.shape[:2]
    integers = arena[offset : offset + desc.nbytes].view(_INTEGER[sample.element_size()])
    return integers.view(planes, layers, -1, *sample.shape[1:])


class BlockSelection:
    """The block ids of one layer group, chunk by chunk: a run of neighbours moves as one slice, others by index."""

    def __init__(self, ids: torch.Tensor, blocks_in_chunk: int) -> None:
        """`ids` is int64, already checked against the views; its length is a multiple of `blocks_in_chunk`."""
        chunks = ids.view(-1, blocks_in_chunk)
        self._first = chunks[:, 0].tolist()
        self._is_run = (chunks.diff(dim=1) == 1).all(dim=1).tolist()
        self._count = blocks_in_chunk
        self._chunks = {chunks.device: chunks}

    def gather(self, chunk: int, views: GroupViews, target: torch.Tensor) -> None:
        """Fills `target`, see `object_view`, with the chunk's blocks."""
        for plane, layers in enumerate(views):
            for layer, view in enumerate(layers):
                source, out = _as_integers(view), target[plane, layer]
                if self._is_run[chunk]:
                    out.copy_(source.narrow(0, self._first[chunk], self._count))
                elif source.device.type in _HOST:
                    torch.index_select(source, 0, self._ids(chunk, source.device), out=out)
                else:
                    out.copy_(source.index_select(0, self._ids(chunk, source.device)))

    def scatter(self, chunk: int, views: GroupViews, source: torch.Tensor, skip_slots: int) -> None:
        """Writes the chunk from `source`, see `object_view`, into its blocks, without its first `skip_slots` slots."""
        skip_blocks, skip_rest = divmod(skip_slots, source.shape[3])
        whole = skip_blocks + (1 if skip_rest else 0)
        for plane, layers in enumerate(views):
            for layer, view in enumerate(layers):
                target, data = _as_integers(view), source[plane, layer]
                ids = self._ids(chunk, target.device)
                if skip_rest:
                    target[int(ids[skip_blocks])][skip_rest:].copy_(data[skip_blocks, skip_rest:])
                if whole == self._count:
                    continue
                if self._is_run[chunk]:
                    target.narrow(0, self._first[chunk] + whole, self._count - whole).copy_(data[whole:])
                else:
                    target.index_copy_(0, ids[whole:], data[whole:].to(target.device))

    def _ids(self, chunk: int, device: torch.device) -> torch.Tensor:
        """The chunk's ids on `device`, brought there once."""
        if device not in self._chunks:
            self._chunks[device] = next(iter(self._chunks.values())).to(device)
        return self._chunks[device][chunk]


def gather_one_block(views: GroupViews, desc: GroupDesc, block: int) -> bytes:
    """The canonical bytes of one block, `[planes, layers, slots per block, hidden]`, by the copy that stores use."""
    sample = views[0][0]
    planes, layers, _, hidden = desc.shape
    shape = (planes, layers, sample.shape[1], hidden)
    one = GroupDesc(shape, desc.dtype)
    memory = torch.empty(one.nbytes, dtype=torch.uint8)
    BlockSelection(torch.tensor([block]), 1).gather(0, views, object_view(memory, 0, one, sample))
    return bytes(memory.tolist())


def wait_for_devices(views: Sequence[GroupViews]) -> None:
    """Blocks until copies queued on the views' devices are done; nothing to wait for in host memory."""
    for device in {view.device for group in views for plane in group for view in plane}:
        if device.type not in _HOST:
            event = torch.Event(device)
            event.record()
            event.synchronize()


def _as_integers(view: torch.Tensor) -> torch.Tensor:
    return view.view(_INTEGER[view.element_size()])
