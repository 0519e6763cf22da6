"""Transports of the simulated accelerator with one bug each, as a plugin module: what the kit is there to find."""

from __future__ import annotations

import contextlib
import re
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, ClassVar

from kvf_simdev import SimCopier, SimEngine, SimOptions, runtime
from msgspec import structs

from kvf_dev.testing.accelerator import AcceleratorError, Event, Stream
from kvf_devices import Allocation, Exported
from kvf_devices.endpoints import DeviceTransfer
from kvframework.api import transport
from kvframework.api.copy_plans import CopyBatch
from kvframework.api.futures import Future, Promise
from kvframework.api.requests import ClientInfo
from kvframework.errors import DeviceError, DeviceLost
from tests.devices.faulty import FaultyCopier, FaultyEngine, provider


class PlantedCopier(FaultyCopier):
    pass


class TakesAnyDevice(PlantedCopier):
    """Made for a device that the machine lacks."""


class OffByOne(PlantedCopier):
    def copy(self, stream: Stream, batch: CopyBatch, *, to_arena: bool) -> None:
        if to_arena:
            addresses = batch.place_addresses[:]
            addresses[-1] += batch.run
            batch = replace(batch, place_addresses=addresses)
        super().copy(stream, batch, to_arena=to_arena)


class WrongStride(PlantedCopier):
    def copy(self, stream: Stream, batch: CopyBatch, *, to_arena: bool) -> None:
        steps = tuple(step._replace(device=step.arena) for step in batch.steps)
        super().copy(stream, replace(batch, steps=steps) if to_arena else batch, to_arena=to_arena)


class KeepsMemoryOpen(PlantedCopier):
    def close_memory(self, address: int) -> None:
        return None


class OpensWithoutASize(PlantedCopier):
    def open(self, allocation: Allocation) -> int:
        return super().open(structs.replace(allocation, nbytes=0))


class KnowsNoLoss(PlantedCopier):
    def reached(self, event: Event) -> bool:
        try:
            return super().reached(event)
        except DeviceLost as error:
            raise DeviceError(error.fact) from error


class LosesAtOnce(PlantedCopier):
    def reached(self, event: Event) -> bool:
        try:
            return super().reached(event)
        except DeviceError as error:
            raise DeviceLost(error.fact) from error


class MergesNeighbours(PlantedCopier):
    """Joins fragments that follow each other on both sides, whichever allocation they are of."""

    def copy(self, stream: Stream, batch: CopyBatch, *, to_arena: bool) -> None:
        addresses, offsets, run = batch.fragments()
        joined: list[tuple[int, int, int]] = []
        for address, offset in zip(addresses, offsets, strict=True):
            if joined and (joined[-1][0] + joined[-1][2], joined[-1][1] + joined[-1][2]) == (address, offset):
                joined[-1] = (*joined[-1][:2], joined[-1][2] + run)
            else:
                joined.append((address, offset, run))
        for address, offset, length in joined:
            _copy(self, stream, [address], [offset], length, to_arena)


class CopiesSoMany(PlantedCopier):
    """A launch takes so many fragments at most, and the rest is forgotten."""

    def copy(self, stream: Stream, batch: CopyBatch, *, to_arena: bool) -> None:
        addresses, offsets, run = batch.fragments()
        _copy(self, stream, addresses[:1024], offsets[:1024], run, to_arena)


class OffsetsOf20Bits(PlantedCopier):
    def copy(self, stream: Stream, batch: CopyBatch, *, to_arena: bool) -> None:
        addresses, offsets, run = batch.fragments()
        _copy(self, stream, addresses, [offset & 0xFFFFF for offset in offsets], run, to_arena)


class PinsTheFirstSlice(PlantedCopier):
    def pin(self, offset: int, nbytes: int) -> None:
        if offset == 0:
            super().pin(offset, nbytes)


class HasOneCopyStream(PlantedCopier):
    both: Stream | None = None

    def create_stream(self, *, loads: bool) -> Stream:
        self.both = self.both or super().create_stream(loads=loads)
        return self.both


class OpensAnyDevice(PlantedCopier):
    def open(self, allocation: Allocation) -> int:
        for device in self._runtime.devices:
            with contextlib.suppress(AcceleratorError):
                return self._runtime.open_memory(device, allocation.handle, allocation.nbytes)
        return super().open(allocation)


class OpensOnce(PlantedCopier):
    """Remembers addresses by the size of an allocation."""

    known: dict[int, int] | None = None

    def open(self, allocation: Allocation) -> int:
        self.known = {} if self.known is None else self.known
        if allocation.nbytes not in self.known:
            self.known[allocation.nbytes] = super().open(allocation)
        return self.known[allocation.nbytes]

    def close_memory(self, address: int) -> None:
        return None


class ReachesWhatFailed(PlantedCopier):
    def reached(self, event: Event) -> bool:
        try:
            return super().reached(event)
        except DeviceLost:
            raise
        except DeviceError:
            return True


class CopiesAtOnce(PlantedCopier):
    def copy(self, stream: Stream, batch: CopyBatch, *, to_arena: bool) -> None:
        super().copy(stream, batch, to_arena=to_arena)
        stream.synchronize(60.0)


class RecordsBefore(PlantedCopier):
    """The event of a copy is recorded in a stream of its own."""

    def record(self, event: Event, behind: Stream) -> None:
        super().record(event, self._runtime.default_stream(behind.device))


def _copy(
    copier: SimCopier, stream: Stream, addresses: Sequence[int], offsets: Sequence[int], length: int, to_arena: bool
) -> None:
    try:
        copier._runtime.copy(stream, copier._arena.view, addresses, offsets, length, to_host=to_arena)
    except AcceleratorError as error:
        raise DeviceError(str(error)) from error


class PlantedEngine(FaultyEngine):
    pass


class KeepsStreams(PlantedEngine):
    def destroy_event(self, event: Event) -> None:
        self._behind.pop(event, None)
        super().destroy_event(event)


class ExportsEachTensor(PlantedEngine):
    """As if an allocation ended at each tensor: the same memory is opened many times."""

    def export(self, address: int) -> Exported:
        found = super().export(address)
        return found._replace(allocation=structs.replace(found.allocation, nbytes=found.offset + 1))


class TakesTheDefaultStream(PlantedEngine):
    """Any object is the current stream."""

    def block_stream(self, stream: object | None) -> Callable[[], None]:
        return super().block_stream(stream if isinstance(stream, Stream) else None)


class TheLastOfTheProcess(PlantedEngine):
    """Events are made on the device that was first used in this process."""

    used: ClassVar[list[str]] = []

    def create_event(self, device: str) -> Event:
        self.used.append(device)
        return super().create_event(self.used[0])


class ForgetsTheEvent(PlantedEngine):
    def record(self, event: Event, behind: object | None) -> None:
        super().record(event, None)


class ExportsNoOffset(PlantedEngine):
    def export(self, address: int) -> Exported:
        return super().export(address)._replace(offset=0)


class WaitsForTheEngine(PlantedEngine):
    def record(self, event: Event, behind: object | None) -> None:
        while isinstance(behind, Event) and not self._runtime.reached(behind):
            time.sleep(0.005)
        super().record(event, behind)


class HasOneStream(PlantedEngine):
    def record(self, event: Event, behind: object | None) -> None:
        if behind is not None:
            self._behind[event] = next(iter(self._behind.values()), None) or self._runtime.stream(event.device)
        super().record(event, behind)

    def destroy_event(self, event: Event) -> None:
        self._runtime.destroy_event(event)


class TakesAnythingForNone(PlantedEngine):
    def record(self, event: Event, behind: object | None) -> None:
        super().record(event, behind if isinstance(behind, Event) else None)


class KeepsEvents(PlantedEngine):
    def destroy_event(self, event: Event) -> None:
        return None


class ReleasesOnce(PlantedEngine):
    def block_stream(self, stream: object | None) -> Callable[[], None]:
        releases = [super().block_stream(stream)]
        return lambda: releases.pop()()


class ReleasesWhileItIsOpen(PlantedEngine):
    closed = False

    def block_stream(self, stream: object | None) -> Callable[[], None]:
        release = super().block_stream(stream)
        return lambda: None if self.closed else release()

    def close(self) -> None:
        self.closed = True


class ForgetsItsRuntime(PlantedEngine):
    def close(self) -> None:
        vars(self).pop("_runtime", None)


class HoldsNothing(PlantedEngine):
    def block_stream(self, stream: object | None) -> Callable[[], None]:
        return lambda: None


class NeverReleases(PlantedEngine):
    def block_stream(self, stream: object | None) -> Callable[[], None]:
        super().block_stream(stream)
        return lambda: None


class HoldsTheThread(PlantedEngine):
    def block_stream(self, stream: object | None) -> Callable[[], None]:
        raise DeviceError("streams are not known here")


class IgnoresSkip(DeviceTransfer):
    def load(self, transfer: transport.Transfer, skip_tokens: int) -> Future[transport.LoadOutcome]:
        return super().load(transfer, 0)


class WaitsForTheCopy(DeviceTransfer):
    def store(self, transfer: transport.Transfer) -> Future[transport.StoreOutcome]:
        future = super().store(transfer)
        threading.Event().wait(0.1)
        return future


class AnswersCancelAtOnce(transport.ServerTransport):
    """A cancelled copy is answered while it goes on."""

    def __init__(self, options: SimOptions, arena_fd: int) -> None:
        self._real = sound_server(options, arena_fd)

    def open(self, client: ClientInfo, layout: Any, desc: Any, handles: Sequence[bytes]) -> transport.ServerContext:
        return _Hasty(self._real.open(client, layout, desc, handles))

    def close(self) -> None:
        self._real.close()


class _Hasty(transport.ServerContext):
    def __init__(self, real: transport.ServerContext) -> None:
        self._real = real

    def copy(self, job: transport.CopyJob) -> Future[bool]:
        unstoppable = transport.CopyJob(
            is_store=job.is_store,
            arena=job.arena,
            ranges=job.ranges,
            blocks=job.blocks,
            event=job.event,
            skip_tokens=job.skip_tokens,
        )
        answer: Promise[bool] = Promise(lambda: None)
        self._real.copy(unstoppable).add_done_callback(lambda copy: answer.set_result(copy.exception() is None))
        job.on_cancel(lambda: answer.set_result(False) and None)
        return answer

    def when_open(self) -> Future[None] | None:
        return self._real.when_open()

    def when_closed(self) -> Future[None] | None:
        return self._real.when_closed()

    def close(self) -> None:
        self._real.close()


def sound_server(options: SimOptions, arena_fd: int) -> transport.ServerTransport:
    made = provider("sound").create_server
    return made(options, arena_fd)


def _by_hand(
    name: str,
    transfer: Callable[[transport.EngineLink, SimEngine], transport.TransferContext] = DeviceTransfer,
    server: Callable[[SimOptions, int], transport.ServerTransport] | None = None,
) -> transport.TransportProvider[SimOptions]:
    return transport.TransportProvider(
        name=name,
        summary="has a bug",
        options=SimOptions,
        create=lambda options, link: transfer(link, SimEngine(runtime(options.node))),
        create_server=server or sound_server,
        is_gpu=True,
    )


def _name(bug: type) -> str:
    """`OffByOne` is the transport `off_by_one`."""
    return "_".join(re.findall(r"[A-Z][a-z]*|\d+", bug.__name__)).lower()


@transport.hookimpl
def kvf_transports() -> list[transport.TransportProvider[SimOptions]]:
    return [
        *(provider(_name(bug), copier=bug) for bug in PlantedCopier.__subclasses__()),
        *(provider(_name(bug), engine=bug) for bug in PlantedEngine.__subclasses__()),
        _by_hand("ignores_skip", IgnoresSkip),
        _by_hand("waits_for_the_copy", WaitsForTheCopy),
        _by_hand("copies_after_cancel", server=AnswersCancelAtOnce),
    ]
