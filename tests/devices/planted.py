"""Transports of the simulated accelerator with one bug each, as a plugin module: what the kit is there to find."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from kvf_simdev import SimCopier, SimEngine, SimOptions, create_copier, create_engine, runtime
from msgspec import structs

from kvframework.api.driver import Allocation, Arena, CopyBatch, DeviceTransportProvider, Exported
from kvframework.api.futures import Future, Promise
from kvframework.api.requests import ClientInfo
from kvframework.api.server_transport import CopyJob, ServerContext, ServerTransport
from kvframework.api.transport import (
    AnyTransportProvider,
    EngineLink,
    LoadOutcome,
    StoreOutcome,
    Transfer,
    TransferContext,
    TransportProvider,
    hookimpl,
)
from kvframework.devices.engine_half import DeviceTransfer
from kvframework.devices.server_half import DeviceServerTransport
from kvframework.errors import DeviceError, DeviceLost
from kvframework.testing.accelerator import Event, Stream

# in the copier


class PlantedCopier(SimCopier):
    """Made as a provider's `create_copier` is called: the class is its own factory."""

    def __init__(self, options: SimOptions, device: str, arena: Arena) -> None:
        super().__init__(runtime(options.node), device, arena)


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


class FreesEarly(PlantedCopier):
    def reached(self, event: Event) -> bool:
        return True if event.row is None else super().reached(event)


class KeepsMemoryOpen(PlantedCopier):
    def close_memory(self, address: int) -> None:
        return None


class KeepsOpenedEvents(PlantedCopier):
    def destroy_event(self, event: Event) -> None:
        return None


class SynchronizesFirst(PlantedCopier):
    def record(self, event: Event, behind: Stream) -> None:
        behind.synchronize(60.0)
        super().record(event, behind)


class OpensWithoutASize(PlantedCopier):
    def open(self, allocation: Allocation) -> int:
        return super().open(structs.replace(allocation, nbytes=0))


class TakesTheFirstDevice(PlantedCopier):
    def open(self, allocation: Allocation) -> int:
        return self._runtime.open_memory(self._runtime.devices[0], allocation.handle, allocation.nbytes)


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


# in the engine


class ForgetsTheEvent(SimEngine):
    def record(self, event: Event, behind: object | None) -> None:
        super().record(event, None)


class RecordsTooLate(SimEngine):
    def record(self, event: Event, behind: object | None) -> None:
        def late() -> None:
            with contextlib.suppress(DeviceError):
                record(event, behind)

        record = super().record
        threading.Timer(0.3, late).start()


class ExportsNoOffset(SimEngine):
    def export(self, address: int) -> Exported:
        return super().export(address)._replace(offset=0)


class WaitsForTheEngine(SimEngine):
    def record(self, event: Event, behind: object | None) -> None:
        while isinstance(behind, Event) and not self._runtime.reached(behind):
            time.sleep(0.005)
        super().record(event, behind)


class HasOneStream(SimEngine):
    def record(self, event: Event, behind: object | None) -> None:
        if behind is not None:
            self._behind[event] = next(iter(self._behind.values()), None) or self._runtime.stream(event.device)
        super().record(event, behind)

    def destroy_event(self, event: Event) -> None:
        self._runtime.destroy_event(event)


class TakesAnythingForNone(SimEngine):
    def record(self, event: Event, behind: object | None) -> None:
        super().record(event, behind if isinstance(behind, Event) else None)


class KeepsEvents(SimEngine):
    def destroy_event(self, event: Event) -> None:
        return None


class HoldsNothing(SimEngine):
    def block_stream(self, stream: object | None) -> Callable[[], None]:
        return lambda: None


class NeverReleases(SimEngine):
    def block_stream(self, stream: object | None) -> Callable[[], None]:
        super().block_stream(stream)
        return lambda: None


class HoldsTheThread(SimEngine):
    def block_stream(self, stream: object | None) -> Callable[[], None]:
        raise DeviceError("streams are not known here")


class HoldsTheCurrentStream(SimEngine):
    def block_stream(self, stream: object | None) -> Callable[[], None]:
        return super().block_stream(None)


class IgnoresSkip(DeviceTransfer):
    def load(self, transfer: Transfer, skip_tokens: int) -> Future[LoadOutcome]:
        return super().load(transfer, 0)


class WaitsForTheCopy(DeviceTransfer):
    def store(self, transfer: Transfer) -> Future[StoreOutcome]:
        future = super().store(transfer)
        threading.Event().wait(0.1)
        return future


# in the server


class AnswersCancelAtOnce(ServerTransport):
    """A cancelled copy is answered while it goes on."""

    def __init__(self, options: SimOptions, arena_fd: int) -> None:
        self._real = DeviceServerTransport(SOUND, options, arena_fd)

    def open(self, client: ClientInfo, layout: Any, desc: Any, handles: Sequence[bytes]) -> ServerContext:
        return _Hasty(self._real.open(client, layout, desc, handles))

    def close(self) -> None:
        self._real.close()


class _Hasty(ServerContext):
    def __init__(self, real: ServerContext) -> None:
        self._real = real

    def copy(self, job: CopyJob) -> Future[bool]:
        unstoppable = CopyJob(
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


def _provider(
    name: str, *, engine: Callable[[SimOptions], Any] = create_engine, copier: Callable[..., Any] = create_copier
) -> DeviceTransportProvider[SimOptions]:
    return DeviceTransportProvider(
        name=name, summary="has a bug", options=SimOptions, create_engine=engine, create_copier=copier
    )


SOUND = _provider("sound")


def _by_hand(
    name: str,
    transfer: Callable[[EngineLink, SimEngine], TransferContext] = DeviceTransfer,
    server: Callable[[SimOptions, int], ServerTransport] | None = None,
) -> TransportProvider[SimOptions]:
    return TransportProvider(
        name=name,
        summary="has a bug",
        options=SimOptions,
        create=lambda options, link: transfer(link, SimEngine(runtime(options.node))),
        create_server=server or (lambda options, arena_fd: DeviceServerTransport(SOUND, options, arena_fd)),
        is_gpu=True,
    )


@hookimpl
def kvf_transports() -> list[AnyTransportProvider[SimOptions]]:
    return [
        _provider("off_by_one", copier=OffByOne),
        _provider("wrong_stride", copier=WrongStride),
        _provider("frees_early", copier=FreesEarly),
        _provider("keeps_memory_open", copier=KeepsMemoryOpen),
        _provider("forgets_the_event", engine=lambda options: ForgetsTheEvent(runtime(options.node))),
        _provider("records_too_late", engine=lambda options: RecordsTooLate(runtime(options.node))),
        _provider("synchronizes_first", copier=SynchronizesFirst),
        _provider("opens_without_a_size", copier=OpensWithoutASize),
        _provider("takes_the_first_device", copier=TakesTheFirstDevice),
        _provider("knows_no_loss", copier=KnowsNoLoss),
        _provider("loses_at_once", copier=LosesAtOnce),
        _provider("keeps_opened_events", copier=KeepsOpenedEvents),
        _provider("has_one_stream", engine=lambda options: HasOneStream(runtime(options.node))),
        _provider("takes_anything_for_none", engine=lambda options: TakesAnythingForNone(runtime(options.node))),
        _provider("exports_no_offset", engine=lambda options: ExportsNoOffset(runtime(options.node))),
        _provider("waits_for_the_engine", engine=lambda options: WaitsForTheEngine(runtime(options.node))),
        _provider("keeps_events", engine=lambda options: KeepsEvents(runtime(options.node))),
        _provider("holds_nothing", engine=lambda options: HoldsNothing(runtime(options.node))),
        _provider("never_releases", engine=lambda options: NeverReleases(runtime(options.node))),
        _provider("holds_the_thread", engine=lambda options: HoldsTheThread(runtime(options.node))),
        _provider("holds_the_current_stream", engine=lambda options: HoldsTheCurrentStream(runtime(options.node))),
        _by_hand("ignores_skip", IgnoresSkip),
        _by_hand("waits_for_the_copy", WaitsForTheCopy),
        _by_hand("copies_after_cancel", server=AnswersCancelAtOnce),
    ]
