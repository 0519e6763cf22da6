"""Transports of the simulated accelerator with one bug each, as a plugin module: what the kit is there to find."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from kvf_simdev import SimCopier, SimEngine, SimOptions, create_copier, create_engine, runtime

from kvframework.api import (
    Arena,
    CopyBatch,
    CopyJob,
    DeviceTransportProvider,
    EngineLink,
    MessagingFuture,
    ServerContext,
    ServerTransport,
    TransferContext,
    TransportProvider,
    hookimpl,
)
from kvframework.devices import DeviceServerTransport, DeviceTransfer
from kvframework.errors import DeviceError
from kvframework.testing.accelerator import Event, Stream

# in the copier


class OffByOne(SimCopier):
    def copy(self, stream: Stream, batch: CopyBatch, *, to_arena: bool) -> None:
        if to_arena:
            addresses = batch.place_addresses[:]
            addresses[-1] += batch.run
            batch = replace(batch, place_addresses=addresses)
        super().copy(stream, batch, to_arena=to_arena)


class WrongStride(SimCopier):
    def copy(self, stream: Stream, batch: CopyBatch, *, to_arena: bool) -> None:
        steps = tuple(step._replace(device=step.arena) for step in batch.steps)
        super().copy(stream, replace(batch, steps=steps) if to_arena else batch, to_arena=to_arena)


class FreesEarly(SimCopier):
    def reached(self, event: Event) -> bool:
        return True if event.row is None else super().reached(event)


class KeepsMemoryOpen(SimCopier):
    def close_memory(self, address: int) -> None:
        return None


def off_by_one(options: SimOptions, device: str, arena: Arena) -> SimCopier:
    return OffByOne(runtime(options.node), device, arena)


def wrong_stride(options: SimOptions, device: str, arena: Arena) -> SimCopier:
    return WrongStride(runtime(options.node), device, arena)


def frees_early(options: SimOptions, device: str, arena: Arena) -> SimCopier:
    return FreesEarly(runtime(options.node), device, arena)


def keeps_memory_open(options: SimOptions, device: str, arena: Arena) -> SimCopier:
    return KeepsMemoryOpen(runtime(options.node), device, arena)


# in the engine


class ForgetsTheEvent(SimEngine):
    def record(self, event: Event, ready: object | None) -> None:
        super().record(event, None)


class RecordsTooLate(SimEngine):
    def record(self, event: Event, ready: object | None) -> None:
        def late() -> None:
            with contextlib.suppress(DeviceError):
                record(event, ready)

        record = super().record
        threading.Timer(0.3, late).start()


class IgnoresSkip(DeviceTransfer):
    def submit_retrieve(self, *args: Any, **kwargs: Any) -> MessagingFuture[bool]:
        return super().submit_retrieve(*args[:7], skip_first_n_tokens=0)


class WaitsForTheCopy(DeviceTransfer):
    def submit_store(self, *args: Any) -> MessagingFuture[bool]:
        future = super().submit_store(*args)
        threading.Event().wait(0.1)
        return future


# in the server


class AnswersCancelAtOnce(ServerTransport):
    """A cancelled copy is answered while it goes on."""

    def __init__(self, options: SimOptions) -> None:
        self._real = DeviceServerTransport(SOUND, options)

    def open(self, layout: Any, desc: Any, handles: Sequence[bytes]) -> ServerContext:
        return _Hasty(self._real.open(layout, desc, handles))

    def attach(self, arena_fd: int) -> None:
        self._real.attach(arena_fd)

    def close(self) -> None:
        self._real.close()


class _Hasty(ServerContext):
    def __init__(self, real: ServerContext) -> None:
        self._real = real

    def copy(self, job: CopyJob) -> MessagingFuture[bool]:
        unstoppable = CopyJob(
            is_store=job.is_store,
            arena=job.arena,
            ranges=job.ranges,
            block_ids=job.block_ids,
            blocks_in_chunk=job.blocks_in_chunk,
            event=job.event,
            skip_tokens=job.skip_tokens,
        )
        answer: MessagingFuture[bool] = MessagingFuture(lambda: None)
        self._real.copy(unstoppable).add_done_callback(lambda copy: answer.set_result(copy.exception() is None))
        job.on_cancel(lambda: answer.set_result(False) and None)
        return answer

    def opened(self) -> MessagingFuture[None] | None:
        return self._real.opened()

    def closed(self) -> MessagingFuture[None] | None:
        return self._real.closed()

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
    server: Callable[[SimOptions], ServerTransport] | None = None,
) -> TransportProvider[SimOptions]:
    return TransportProvider(
        name=name,
        summary="has a bug",
        options=SimOptions,
        create=lambda options, link: transfer(link, SimEngine(runtime(options.node))),
        create_server=server or (lambda options: DeviceServerTransport(SOUND, options)),
        is_gpu=True,
    )


@hookimpl
def kvf_transports() -> list[TransportProvider[SimOptions]]:
    return [
        _provider("off_by_one", copier=off_by_one),
        _provider("wrong_stride", copier=wrong_stride),
        _provider("frees_early", copier=frees_early),
        _provider("keeps_memory_open", copier=keeps_memory_open),
        _provider("forgets_the_event", engine=lambda options: ForgetsTheEvent(runtime(options.node))),
        _provider("records_too_late", engine=lambda options: RecordsTooLate(runtime(options.node))),
        _by_hand("ignores_skip", IgnoresSkip),
        _by_hand("waits_for_the_copy", WaitsForTheCopy),
        _by_hand("copies_after_cancel", server=AnswersCancelAtOnce),
    ]
