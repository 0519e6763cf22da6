"""Copies by a GPU: vLLM's own handlers, from and to the arena, which is registered with the device once it is mapped.

vLLM's handlers know rows of host memory. Here a row begins at each `ROW` bytes of the arena, as the server places
objects, so the number of a row is an object's offset divided by `ROW`; a row's length is that of a chunk's blocks.
Nothing here has run on a GPU yet; the addresses are those of vLLM's own arithmetic, which tests run in host memory.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from vllm.v1.kv_offload.base import GPULoadStoreSpec, OffloadingWorker, TransferResult
from vllm.v1.kv_offload.cpu.common import CPULoadStoreSpec
from vllm.v1.kv_offload.cpu.gpu_worker import SingleDirectionOffloadingHandler
from vllm.v1.kv_offload.cpu.host_register import host_register, host_unregister

from kvf_vllm.offloading.copies import ROW
from kvf_vllm.offloading.messages import NOWHERE, ArenaPlaces
from kvf_vllm.offloading.worker import SPARE_S, ServedArena
from kvframework.api.copying import address_of

if TYPE_CHECKING:
    from vllm.v1.kv_offload.base import CanonicalKVCaches

    from kvf_vllm.offloading.copies import Slot
    from kvframework.client import MappedArena

log = logging.getLogger(__name__)

# Drivers do not take any size at once.
REGISTER_BYTES = 64 << 30


class GpuWorker(OffloadingWorker):  # type: ignore[misc]
    """See `OffloadingWorker`. The tensors are borrowed. For the worker's thread."""

    def __init__(self, kv_caches: CanonicalKVCaches, slot: Slot, arena: ServedArena) -> None:
        self._tensors = [each.tensor.view(torch.int8).view((-1, each.page_size_bytes)) for each in kv_caches.tensors]
        self._refs = kv_caches.group_data_refs
        self._slot = slot
        self._arena = arena
        self._copies: _Copies | None = None
        self._places: dict[int, ArenaPlaces] = {}
        self._not_begun: deque[TransferResult] = deque()

    def submit_store(self, job_id: int, src_spec: GPULoadStoreSpec, dst_spec: ArenaPlaces) -> bool:
        return self._submit(job_id, src_spec, dst_spec, storing=True)

    def submit_load(self, job_id: int, src_spec: ArenaPlaces, dst_spec: GPULoadStoreSpec) -> bool:
        return self._submit(job_id, dst_spec, src_spec, storing=False)

    def get_finished(self) -> list[TransferResult]:
        ended, self._not_begun = list(self._not_begun), deque()
        if self._copies is not None:
            ended += [self._checked(each) for each in self._copies.finished()]
            if not self._places and not self._copies.arena.is_served:
                # The memory of a server that is gone is the driver's no longer than a step.
                self.shutdown()
        return ended

    def wait(self, job_ids: set[int]) -> None:
        if self._copies is not None:
            self._copies.wait(job_ids)

    def shutdown(self) -> None:
        if self._copies is not None:
            self._copies.close()
            self._copies = None

    def _submit(self, job_id: int, blocks: GPULoadStoreSpec, places: ArenaPlaces, *, storing: bool) -> bool:
        arena = self._arena.of(places.session)
        whole = storing or NOWHERE not in places.offsets
        if arena is None or not whole or time.monotonic() > places.until - SPARE_S:
            self._not_begun.append(TransferResult(job_id, False))
            return True
        if self._copies is None or self._copies.arena is not arena:
            self.shutdown()
            self._copies = _Copies(arena, self._tensors, self._refs, self._slot)
        blocks, offsets = self._slot.placed(blocks, places.offsets)
        self._places[job_id] = places
        self._copies.begin(job_id, blocks, CPULoadStoreSpec([offset // ROW for offset in offsets]), storing=storing)
        return True

    def _checked(self, result: TransferResult) -> TransferResult:
        """A copy is good if the arena was served, and the pins held, until it had ended."""
        places = self._places.pop(result.job_id)
        if self._arena.of(places.session) is None or time.monotonic() > places.until:
            result.success = False
        return result


class _Copies:
    """The handlers of both directions for one mapping of the arena."""

    def __init__(
        self, arena: MappedArena, tensors: Sequence[torch.Tensor], refs: Sequence[Sequence[object]], slot: Slot
    ) -> None:
        self.arena = arena
        memory = torch.frombuffer(arena.view, dtype=torch.int8)
        rows = []
        for region in slot.regions:
            begin, length = slot.offset + region.offset, region.page * slot.blocks_per_chunk
            count = (memory.numel() - begin - length) // ROW + 1
            rows.append(memory.as_strided((count, length), (ROW, 1), begin))
        self._registered: list[int] = []
        with address_of(arena.view, True) as (address, nbytes):
            for begin in range(0, nbytes, REGISTER_BYTES):
                if host_register(address + begin, min(REGISTER_BYTES, nbytes - begin)):
                    self._registered.append(address + begin)
        if not self._registered:
            log.warning("copies are slow, because the server's memory is not registered with the device")
        self._handlers = {
            storing: SingleDirectionOffloadingHandler(
                gpu_tensors=list(tensors),
                cpu_tensors=list(rows),
                blocks_per_chunk=slot.blocks_per_chunk,
                layer_refs_per_group=[list(each) for each in refs],
                gpu_to_cpu=storing,
                host_memory_is_pinned=bool(self._registered),
                canonical_layout=slot.canonical,
            )
            for storing in (True, False)
        }

    def begin(self, job_id: int, blocks: GPULoadStoreSpec, rows: CPULoadStoreSpec, *, storing: bool) -> None:
        source, target = (blocks, rows) if storing else (rows, blocks)
        self._handlers[storing].transfer_async(job_id, source, target)

    def finished(self) -> list[TransferResult]:
        return [each for handler in self._handlers.values() for each in handler.get_finished()]

    def wait(self, job_ids: set[int]) -> None:
        for handler in self._handlers.values():
            handler.wait(job_ids)

    def close(self) -> None:
        """Wait for the copies under way, and give the memory back to the driver."""
        for handler in self._handlers.values():
            handler.shutdown()
        for address in self._registered:
            host_unregister(address)
