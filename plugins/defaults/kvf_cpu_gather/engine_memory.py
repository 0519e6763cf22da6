"""The engine's memory as blocks, remembered while the tensors keep their addresses; and the moves of a
transfer's objects.

Engine side. Making views of the tensors takes longer in Python than a small copy, and has the same result at every
submit of an engine with stable memory. Only addresses are remembered: between calls no tensor is held."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple, cast

import torch

from kvf_cpu_gather.kernel import CopyKernel
from kvf_cpu_gather.torch_copies import Copies, Piece, TorchCopies, mark_device, on_host, wait_for_devices
from kvframework.api.copy_plans import CopyPlanner, one_block, placed
from kvframework.api.layout import LayerGroup, LayerTensors, Layout, MemoryLayoutDesc
from kvframework.api.plugin import Buffer
from kvframework.api.transport import ArenaRange, GroupBlocks, Registration, Transfer
from kvframework.errors import BadBlockIds

if TYPE_CHECKING:
    from kvf_cpu_gather.torch_copies import GroupViews


class _Place(NamedTuple):
    """A view of one of the tensors, which is named by its order; `offset` is in elements from the tensor's first."""

    tensor: int
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int


class RememberedViews:
    """The places of views, valid for tensors with an equal `signature`."""

    def __init__(self, places: Sequence[Sequence[Sequence[_Place]]]) -> None:
        self._places = places

    @classmethod
    def of(cls, views: Sequence[GroupViews], kv_caches: Mapping[str, LayerTensors]) -> RememberedViews | None:
        """Return the places of `views`; None if a view has another dtype than its memory, or is of none of the
        tensors."""
        tensors = {
            (tensor.untyped_storage().data_ptr(), tensor.dtype): index
            for index, tensor in enumerate(tensors_of(kv_caches))
        }
        starts = [tensor.storage_offset() for tensor in tensors_of(kv_caches)]

        def place(view: torch.Tensor) -> _Place:
            index = tensors[view.untyped_storage().data_ptr(), view.dtype]
            return _Place(index, view.shape, view.stride(), int(view.storage_offset()) - int(starts[index]))

        try:
            return cls([[[place(view) for view in plane] for plane in planes] for planes in views])
        except KeyError:
            return None

    def again(self, kv_caches: Mapping[str, LayerTensors]) -> list[GroupViews]:
        """Return the views of these tensors. Torch checks that their storage reaches as far."""
        tensors = list(tensors_of(kv_caches))
        starts = [tensor.storage_offset() for tensor in tensors]
        return [
            [
                [
                    tensors[place.tensor].as_strided(place.shape, place.stride, starts[place.tensor] + place.offset)
                    for place in plane
                ]
                for plane in planes
            ]
            for planes in self._places
        ]


def signature(kv_caches: Mapping[str, LayerTensors]) -> list[object]:
    """Return everything that a layout's views depend on; equal for two calls only if all tensors lie in the same way at
    the same places, and their storage still reaches as far: torch checks that where it makes views."""
    found: list[object] = []
    for name, tensors in kv_caches.items():
        found.append(name)
        for tensor in _planes(tensors):
            found += (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, tensor.device)
            found.append(tensor.untyped_storage().nbytes())
    return found


def tensors_of(kv_caches: Mapping[str, LayerTensors]) -> Iterator[torch.Tensor]:
    """Yield all tensors, layer by layer."""
    for tensors in kv_caches.values():
        yield from _planes(tensors)


def _planes(tensors: LayerTensors) -> Sequence[torch.Tensor]:
    return (tensors,) if isinstance(tensors, torch.Tensor) else cast("Sequence[torch.Tensor]", tensors)


class KernelCopies(Copies):
    """Copies of host memory, found by its addresses."""

    def __init__(self, kernel: CopyKernel, planner: CopyPlanner, blocks: Sequence[GroupBlocks]) -> None:
        self._kernel = kernel
        self._planner = planner
        self._blocks = blocks

    def gather(self, memory: torch.Tensor, places: Sequence[ArenaRange]) -> None:
        # Measured: shards joined are stored up to twice as fast, and loaded more slowly than one after the other.
        for batch in self._planner.plan(places, self._blocks, joined=True):
            self._kernel.copy(batch, memory.data_ptr(), to_arena=True)

    def scatter(self, memory: torch.Tensor, places: Sequence[ArenaRange], skip_tokens: int) -> None:
        self._scatter(places, memory.data_ptr(), skip_tokens)

    def scatter_each(self, pieces: Sequence[Piece], skip_tokens: int) -> None:
        # To one copy all memory is one: each object's offset is its address.
        places = [ArenaRange(place.chunk, place.group, data.data_ptr(), data.numel()) for place, data in pieces]
        self._scatter(places, 0, skip_tokens)

    def _scatter(self, places: Sequence[ArenaRange], address: int, skip_tokens: int) -> None:
        for batch in self._planner.plan(places, self._blocks, skip_tokens):
            self._kernel.copy(batch, address, to_arena=False)


class EngineMemory(ABC):
    """An engine's tensors; `block_counts` has the number of blocks of each layer group."""

    def __init__(self, views: Sequence[GroupViews]) -> None:
        self.block_counts = tuple(planes[0][0].shape[0] for planes in views)

    @abstractmethod
    def copies(self, blocks: Sequence[GroupBlocks]) -> Copies:
        """Return the copies of one transfer; `blocks` are by layer group, each below its count."""

    def wait(self) -> None:
        """Block until the work queued on the tensors' devices is done: none in host memory."""
        return

    def mark(self) -> torch.Event | None:
        """Return an event behind the work that the calling thread has queued on the tensors' device, for another thread
        to wait for; None for host memory."""
        return None


class PlannedMemory(EngineMemory):
    """Host memory as the kernel sees it: addresses. Valid as long as the tensors keep them."""

    def __init__(
        self, kernel: CopyKernel, groups: Sequence[LayerGroup], desc: MemoryLayoutDesc, views: Sequence[GroupViews]
    ) -> None:
        super().__init__(views)
        self._kernel = kernel
        self._planner = CopyPlanner(groups, desc, placed(views), merged=False)

    def copies(self, blocks: Sequence[GroupBlocks]) -> Copies:
        return KernelCopies(self._kernel, self._planner, blocks)


class ViewedMemory(EngineMemory):
    """Any memory, as torch sees it. Borrows the tensors."""

    def __init__(self, groups: Sequence[LayerGroup], desc: MemoryLayoutDesc, views: Sequence[GroupViews]) -> None:
        super().__init__(views)
        self._groups = groups
        self._desc = desc
        self._views = views

    def copies(self, blocks: Sequence[GroupBlocks]) -> Copies:
        return TorchCopies(self._groups, self._desc, self._views, blocks)

    def wait(self) -> None:
        wait_for_devices(self._views)

    def mark(self) -> torch.Event | None:
        return mark_device(self._views)


class RegisteredMemory:
    """The memory of one registration, with new views whenever the tensors have changed. For one thread at a time."""

    def __init__(self, registration: Registration, layout: Layout, kernel: CopyKernel | None) -> None:
        self.registration = registration
        self.layout = layout
        self._kernel = kernel
        self._seen: tuple[object, PlannedMemory | RememberedViews] | None = None

    def views(self, kv_caches: Mapping[str, LayerTensors]) -> Sequence[GroupViews]:
        """Return the layout's views, which are of torch as the tensors are."""
        return cast("Sequence[GroupViews]", self.layout.block_views(self.registration.layout, kv_caches))

    def of(self, kv_caches: Mapping[str, LayerTensors]) -> EngineMemory:
        """Return the memory of these tensors. Raises `BadLayout` for tensors that do not fit the registration."""
        groups, desc = self.registration.layout.groups, self.registration.desc
        now = signature(kv_caches)
        seen = self._seen[1] if self._seen is not None and self._seen[0] == now else None
        if isinstance(seen, PlannedMemory):
            return seen
        with torch.inference_mode():
            if seen is not None:
                return ViewedMemory(groups, desc, seen.again(kv_caches))
            views = self.views(kv_caches)
            memory = memory_of(self._kernel, groups, desc, views)
            kept = memory if isinstance(memory, PlannedMemory) else RememberedViews.of(views, kv_caches)
        self._seen = (now, kept) if kept is not None else None
        return memory


def memory_of(
    kernel: CopyKernel | None, groups: Sequence[LayerGroup], desc: MemoryLayoutDesc, views: Sequence[GroupViews]
) -> EngineMemory:
    """Return the memory for the kernel, if there is one and all of it is host memory, else for torch."""
    if kernel is not None and on_host(views):
        return PlannedMemory(kernel, groups, desc, views)
    return ViewedMemory(groups, desc, views)


class Moves:
    """The moves of one transfer. Borrows the engine's tensors. Raises `BadBlockIds` for blocks that these tensors do
    not have, which a registration without a number of blocks cannot check."""

    def __init__(self, transfer: Transfer, memory: EngineMemory) -> None:
        for index, (blocks, count) in enumerate(zip(transfer.blocks, memory.block_counts, strict=True)):
            if blocks.highest >= count:
                raise BadBlockIds(
                    f"block id {blocks.highest} does not exist",
                    where=f"layer group {index}",
                    available=f"0 to {count - 1}",
                )
        self.memory = memory
        self._tokens = transfer.tokens
        self._chunk_tokens = transfer.registration.desc.chunk_tokens
        self._copies = memory.copies(transfer.blocks)

    def gather(self, memory: Buffer, places: Sequence[ArenaRange]) -> None:
        """Fill the ranges of `memory` from the engine's blocks."""
        self._copies.gather(_seen(memory), places)

    def scatter(self, memory: Buffer, places: Sequence[ArenaRange], skip_tokens: int) -> None:
        """Write the ranges of `memory` into the engine's blocks, limited to a group's window and without the first
        `skip_tokens` tokens. A state is written whole, unless all tokens are skipped."""
        if skip_tokens < self._tokens:
            self._copies.scatter(_seen(memory), places, skip_tokens)

    def scatter_each(self, parts: Iterable[tuple[Buffer, ArenaRange]], skip_tokens: int) -> None:
        """Do `scatter` for objects that arrived one by one, each whole in a separate buffer."""
        if skip_tokens < self._tokens:
            self._copies.scatter_each([Piece(place, _seen(memory)) for memory, place in parts], skip_tokens)

    def reaches(self, place: ArenaRange, skip_tokens: int) -> bool:
        """Return False if a load that skips the first `skip_tokens` tokens would write nothing of `place`."""
        return (place.chunk + 1) * self._chunk_tokens > skip_tokens


def _seen(memory: Buffer) -> torch.Tensor:
    return torch.frombuffer(memory, dtype=torch.uint8)


def gather_blocks(
    registration: Registration, views: Sequence[GroupViews], blocks: Sequence[int], kernel: CopyKernel | None
) -> list[bytes]:
    """Return one block of each layer group as the bytes of its canonical form `[planes, layers, slots per block,
    hidden]`, by the copies that stores make."""
    gathered = []
    for group, view, block in zip(registration.layout.groups, views, blocks, strict=True):
        desc, place, held = one_block(group, block)
        memory = torch.empty(place.length, dtype=torch.uint8)
        memory_of(kernel, [group], desc, [view]).copies([held]).gather(memory, [place])
        gathered.append(bytes(memory.tolist()))
    return gathered
