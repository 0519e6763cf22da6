"""The engine's memory as blocks, remembered while the tensors keep their addresses.

Engine side. Making views of the tensors takes longer in Python than a small copy, and has the same result at every
submit of an engine with stable memory. Only addresses are remembered: between calls no tensor is held.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch

from kvf_cpu_gather.kernel import CopyKernel
from kvf_cpu_gather.remembered_views import RememberedViews, signature
from kvf_cpu_gather.torch_copies import Copies, Piece, TorchCopies, mark_device, on_host, wait_for_devices
from kvframework.api.layout import LayerGroup, LayerTensors, Layout, MemoryLayoutDesc
from kvframework.api.transport import ArenaRange, GroupBlocks, Registration
from kvframework.devices.copy_plans import CopyPlanner, PlacedView

if TYPE_CHECKING:
    from kvf_cpu_gather.torch_copies import GroupViews


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

    block_counts: tuple[int, ...]

    @abstractmethod
    def copies(self, blocks: Sequence[GroupBlocks]) -> Copies:
        """Return the copies of one transfer; `blocks` are by layer group, each below its count."""

    @abstractmethod
    def wait(self) -> None:
        """Block until the work queued on the tensors' devices is done."""

    @abstractmethod
    def mark(self) -> torch.Event | None:
        """Return an event behind the work that the calling thread has queued on the tensors' device, for another thread
        to wait for; None for host memory."""


class PlannedMemory(EngineMemory):
    """Host memory as the kernel sees it: addresses. Valid as long as the tensors keep them."""

    def __init__(
        self,
        kernel: CopyKernel,
        groups: Sequence[LayerGroup],
        desc: MemoryLayoutDesc,
        views: Sequence[GroupViews],
    ) -> None:
        self.block_counts = _block_counts(views)
        self._kernel = kernel
        placed = [[[_placed(view) for view in plane] for plane in planes] for planes in views]
        self._planner = CopyPlanner(groups, desc, placed, merged=False)

    def copies(self, blocks: Sequence[GroupBlocks]) -> Copies:
        return KernelCopies(self._kernel, self._planner, blocks)

    def wait(self) -> None:
        return None

    def mark(self) -> torch.Event | None:
        return None


class ViewedMemory(EngineMemory):
    """Any memory, as torch sees it. Borrows the tensors."""

    def __init__(self, groups: Sequence[LayerGroup], desc: MemoryLayoutDesc, views: Sequence[GroupViews]) -> None:
        self.block_counts = _block_counts(views)
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
            views = self.layout.block_views(self.registration.layout, kv_caches)
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


def _block_counts(views: Sequence[GroupViews]) -> tuple[int, ...]:
    return tuple(planes[0][0].shape[0] for planes in views)


def _placed(view: torch.Tensor) -> PlacedView:
    size = view.element_size()
    block, slot, head, element = view.stride()
    return PlacedView(view.data_ptr(), (block * size, slot * size, head * size, element * size))
