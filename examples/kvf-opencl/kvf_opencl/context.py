"""The engine half: what a transfer needs before it is handed to the queue of copies. In the engine's own thread."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from functools import partial
from typing import NamedTuple, TypeVar

from kvframework.api.copy_plans import CopyPlanner, one_block, placed
from kvframework.api.futures import Future
from kvframework.api.layout import CANONICAL, OPAQUE, BlockViews, LayerTensors, Layout, TensorLike
from kvframework.api.transport import (
    Arena,
    EngineDrivenLink,
    LoadOutcome,
    LoadPlan,
    Registration,
    StoreOutcome,
    StorePlan,
    Transfer,
    TransferContext,
)
from kvframework.errors import BadBlockIds, BadLayout, DeviceError, NotRegistered, TransportMismatch

from kvf_opencl.copies import Copy, CopyQueue
from kvf_opencl.device import Device, Pinned
from kvf_opencl.runtime import Runtime

R = TypeVar("R", StoreOutcome, LoadOutcome)


class Memory(NamedTuple):
    """The engine's tensors, as addresses: the device, the plans of copies, and the blocks of each layer group."""

    device: Device
    planner: CopyPlanner
    counts: Sequence[int]


class OpenclContext(TransferContext):
    """See `TransferContext`. Between calls it keeps addresses, and no tensor."""

    def __init__(self, link: EngineDrivenLink, runtime: Runtime) -> None:
        self._link = link
        self._runtime = runtime
        self._registered: tuple[Registration, Layout] | None = None
        self._seen: tuple[object, Memory] | None = None
        self._pinned: Pinned | None = None
        self._devices: dict[str, Device] = {}
        self._queue = CopyQueue()

    def on_arena(self, arena: Arena | None) -> None:
        pinned, self._pinned = self._pinned, None
        if pinned is not None:
            self._queue.when_idle(pinned.release)
        if arena is not None:
            self._pinned = Pinned(self._runtime, arena)

    def on_registered(self, registration: Registration, layout: Layout) -> None:
        """Raises `TransportMismatch` or `BadLayout` for what this transport cannot move; an engine's `auto` then takes
        the next one."""
        if not self._link.maps_arena:
            raise TransportMismatch(
                "the server's arena is not mapped in this process",
                where="opencl",
                hint="connect over ipc:// as the server's user, or let cpu_gather go over the wire",
            )
        for group in registration.desc.groups:
            if group.form != CANONICAL and not group.form.startswith(OPAQUE):
                raise BadLayout(
                    f"objects of form {group.form}",
                    where="opencl",
                    available=f"{CANONICAL}, {OPAQUE}...",
                )
        self._registered, self._seen = (registration, layout), None

    def store(self, transfer: Transfer) -> Future[StoreOutcome]:
        return self._begun(transfer, self._link.prepare_store, transfer.failed, 0, to_arena=True)

    def load(self, transfer: Transfer, skip_tokens: int) -> Future[LoadOutcome]:
        return self._begun(transfer, self._link.prepare_load, LoadOutcome.failed, skip_tokens, to_arena=False)

    def gather_block(self, kv_caches: Mapping[str, LayerTensors], blocks: Sequence[int]) -> list[bytes]:
        registration, _ = self._registration()
        views, gathered = self._views(kv_caches), []
        # Not the device of the transfers, which the queue's thread uses.
        with closing(Device(self._runtime, views[0][0][0])) as device:
            for index, (group, block) in enumerate(zip(registration.layout.groups, blocks, strict=True)):
                desc, place, held = one_block(group, block)
                memory = bytearray(place.length)
                for batch in CopyPlanner([group], desc, placed(views[index : index + 1])).plan([place], [held]):
                    device.copy(memoryview(memory), batch, to_arena=True)
                done = device.end_of_copies(to_arena=True)
                while not device.reached(done):
                    pass
                gathered.append(bytes(memory))
        return gathered

    def close(self) -> None:
        self._registered = None
        self._queue.close()
        for device in self._devices.values():
            device.close()
        self._devices.clear()

    def _begun(
        self,
        transfer: Transfer,
        prepare: Callable[[Transfer], Future[StorePlan]] | Callable[[Transfer], Future[LoadPlan]],
        failed: Callable[[BaseException], R],
        skip_tokens: int,
        *,
        to_arena: bool,
    ) -> Future[R]:
        memory = self._memory(transfer)
        try:
            ready = memory.device.mark(transfer.event)
        except DeviceError as error:
            return Future.resolved(failed(error))
        batches = partial(memory.planner.plan, blocks=transfer.blocks, skip_tokens=skip_tokens)
        copy: Copy[R] = Copy(memory.device, ready, batches, failed, transfer.kv_caches, to_arena=to_arena)
        return self._queue.begin(copy, prepare(transfer))

    def _memory(self, transfer: Transfer) -> Memory:
        """The memory of a transfer's tensors. Raises `BadLayout` if they differ from the registered ones, and
        `BadBlockIds` for blocks that they do not have: where the declaration leaves the number of blocks open, nobody
        has checked that."""
        now = [(each.data_ptr(), each.shape, each.stride(), str(each.dtype)) for each in _tensors(transfer.kv_caches)]
        if self._seen is None or self._seen[0] != now:
            views = self._views(transfer.kv_caches)
            groups = transfer.registration.layout.groups
            planner = CopyPlanner(groups, transfer.registration.desc, placed(views))
            counts = [planes[0][0].shape[0] for planes in views]
            self._seen = now, Memory(self._device(views), planner, counts)
        _, memory = self._seen
        for index, (blocks, count) in enumerate(zip(transfer.blocks, memory.counts, strict=True)):
            if blocks.highest >= count:
                raise BadBlockIds(
                    f"block id {blocks.highest}", where=f"layer group {index}", available=f"0 to {count - 1}"
                )
        return memory

    def _views(self, kv_caches: Mapping[str, LayerTensors]) -> BlockViews:
        registration, layout = self._registration()
        return layout.block_views(registration.layout, kv_caches)

    def _device(self, views: BlockViews) -> Device:
        device = Device(self._runtime, views[0][0][0])
        known = self._devices.setdefault(device.name, device)
        if known is not device:
            device.close()
        return known

    def _registration(self) -> tuple[Registration, Layout]:
        if self._registered is None:
            raise NotRegistered("no instance is registered", where="opencl")
        return self._registered


def _tensors(kv_caches: Mapping[str, LayerTensors]) -> list[TensorLike]:
    return [tensor for held in kv_caches.values() for tensor in (held if isinstance(held, Sequence) else (held,))]
