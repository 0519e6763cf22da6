"""The copies between engine tensors and objects in memory, with torch. Engine side, blocking, no server calls.

A canonical object is `[planes, layers, slots, hidden]`; engine memory is seen as one view `[blocks, slots per block,
heads, dim]` per plane and layer. Elements move as integers of their size, since a copy needs no arithmetic and not
every dtype has every kernel.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch

from kvframework.api.layout import GroupDesc, LayerGroup, MemoryLayoutDesc
from kvframework.api.transport import ArenaRange, GroupBlocks

if TYPE_CHECKING:
    # [plane][layer], each [blocks, slots per block, heads, dim]
    GroupViews = Sequence[Sequence[torch.Tensor]]

# The devices whose memory needs no stream for a copy with the arena.
HOST = frozenset({"cpu"})
_INTEGER = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Piece(NamedTuple):
    """One object: its place in the transfer, and its bytes (1-D, uint8), borrowed."""

    place: ArenaRange
    data: torch.Tensor


class Copies(ABC):
    """The copies of one transfer. `views` and `blocks` are by layer group, already checked against each other. `memory`
    is 1-D, uint8, borrowed, and holds all `places`."""

    @abstractmethod
    def gather(self, memory: torch.Tensor, places: Sequence[ArenaRange]) -> None:
        """Fill the places from their blocks."""

    @abstractmethod
    def scatter(self, memory: torch.Tensor, places: Sequence[ArenaRange], skip_tokens: int) -> None:
        """Write the places into their blocks, without the first `skip_tokens` tokens of the transfer (a state
        whole)."""

    @abstractmethod
    def scatter_each(self, pieces: Sequence[Piece], skip_tokens: int) -> None:
        """Do `scatter` for objects that lie in separate memory."""


class TorchCopies(Copies):
    """Copies by torch, on any of its devices: a call for each layer of each piece. Without gradients, and the tensors
    may be those of an inference mode."""

    def __init__(
        self,
        groups: Sequence[LayerGroup],
        desc: MemoryLayoutDesc,
        views: Sequence[GroupViews],
        blocks: Sequence[GroupBlocks],
    ) -> None:
        self._groups = groups
        self._desc = desc
        self._views = views
        self._blocks = blocks
        self._selections = [BlockSelection(each) for each in blocks]

    def gather(self, memory: torch.Tensor, places: Sequence[ArenaRange]) -> None:
        with torch.inference_mode():
            for place, data in _pieces(memory, places):
                self._selections[place.group].gather(place.chunk, self._views[place.group], self._seen(place, data))

    def scatter(self, memory: torch.Tensor, places: Sequence[ArenaRange], skip_tokens: int) -> None:
        self.scatter_each(_pieces(memory, places), skip_tokens)

    def scatter_each(self, pieces: Sequence[Piece], skip_tokens: int) -> None:
        with torch.inference_mode():
            for place, data in pieces:
                self._scatter(place, data, skip_tokens)

    def _scatter(self, place: ArenaRange, data: torch.Tensor, skip_tokens: int) -> None:
        chunk_tokens = self._desc.chunk_tokens
        group, blocks = self._groups[place.group], self._blocks[place.group]
        if group.state:
            skip = 0 if place.chunk == len(blocks.ids) - 1 else chunk_tokens
        else:
            skip = max(max(skip_tokens, blocks.first * group.block_size) - place.chunk * chunk_tokens, 0)
        if skip < chunk_tokens:
            self._selections[place.group].scatter(
                place.chunk, self._views[place.group], self._seen(place, data), skip // group.slot_tokens
            )

    def _seen(self, place: ArenaRange, data: torch.Tensor) -> torch.Tensor:
        return object_view(data, self._desc.groups[place.group], self._views[place.group][0][0])


def _pieces(memory: torch.Tensor, places: Sequence[ArenaRange]) -> list[Piece]:
    return [Piece(place, memory[place.offset : place.offset + place.length]) for place in places]


def object_view(data: torch.Tensor, desc: GroupDesc, sample: torch.Tensor) -> torch.Tensor:
    """Return the object's bytes as `[planes, layers, blocks, slots, heads, dim]` of integers. `sample` is any view of
    the group. Borrows `data`."""
    planes, layers = desc.shape[:2]
    integers = data.view(_INTEGER[sample.element_size()])
    return integers.view(planes, layers, -1, *sample.shape[1:])


class BlockSelection:
    """The block ids of one layer group, chunk by chunk: a run of neighbours moves as one slice, others by index."""

    def __init__(self, blocks: GroupBlocks) -> None:
        chunks = torch.tensor(blocks.ids, dtype=torch.int64).view(-1, blocks.per_object)
        self._first = chunks[:, 0].tolist()
        self._is_run = (chunks.diff(dim=1) == 1).all(dim=1).tolist()
        self._count = blocks.per_object
        self._chunks = {chunks.device: chunks}

    def gather(self, chunk: int, views: GroupViews, target: torch.Tensor) -> None:
        """Fill `target`, see `object_view`, with the chunk's blocks."""
        for plane, layers in enumerate(views):
            for layer, view in enumerate(layers):
                source, out = _as_integers(view), target[plane, layer]
                if self._is_run[chunk]:
                    out.copy_(source.narrow(0, self._first[chunk], self._count))
                elif source.device.type in HOST:
                    torch.index_select(source, 0, self._ids(chunk, source.device), out=out)
                else:
                    out.copy_(source.index_select(0, self._ids(chunk, source.device)))

    def scatter(self, chunk: int, views: GroupViews, source: torch.Tensor, skip_slots: int) -> None:
        """Write the chunk from `source`, see `object_view`, into its blocks, without its first `skip_slots` slots."""
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
        """Return the chunk's ids on `device`, copied there once."""
        if device not in self._chunks:
            self._chunks[device] = next(iter(self._chunks.values())).to(device)
        return self._chunks[device][chunk]


def on_host(views: Sequence[GroupViews]) -> bool:
    """Return whether all of the views are in host memory."""
    return all(view.device.type in HOST for planes in views for plane in planes for view in plane)


def wait_for_devices(views: Sequence[GroupViews]) -> None:
    """Block until copies queued on the views' devices are done; returns at once for host memory."""
    for device in {view.device for group in views for plane in group for view in plane}:
        if device.type not in HOST:
            event = torch.Event(device)
            event.record()
            event.synchronize()


def mark_device(views: Sequence[GroupViews]) -> torch.Event | None:
    """Return an event behind the work queued on the views' device; None in host memory."""
    device = views[0][0][0].device
    if device.type in HOST:
        return None
    event = torch.Event(device)
    event.record()
    return event


def _as_integers(view: torch.Tensor) -> torch.Tensor:
    return view.view(_INTEGER[view.element_size()])
