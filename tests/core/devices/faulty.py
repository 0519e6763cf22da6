"""Transports of the simulated accelerator whose driver raises, as a plugin module: what becomes of its errors."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kvf_simdev import SimCopier, SimEngine, SimOptions, create_copier, create_engine, runtime

from kvf_dev.testing.accelerator import Event, Stream
from kvframework.api.driver import Allocation, Arena, CopyBatch, DeviceTransportProvider, Exported, hookimpl
from kvframework.errors import DeviceError, DeviceLost

HINT = "set ACME_IPC=1"
PIN_S = 2.0


class RefusesMemory(SimCopier):
    def open(self, allocation: Allocation) -> int:
        raise DeviceError("it is not shared", where="acme.open", available="shared pools", hint=HINT)


class RefusesCopies(SimCopier):
    def copy(self, stream: Stream, batch: CopyBatch, *, to_arena: bool) -> None:
        raise DeviceError("no engine is free", where="acme.copy", hint=HINT)


class CannotPin(SimCopier):
    def pin(self, offset: int, nbytes: int) -> None:
        raise DeviceError("so much memory may not be locked", where="acme.pin", hint=HINT)


class PinsSlowly(SimCopier):
    def pin(self, offset: int, nbytes: int) -> None:
        time.sleep(PIN_S)
        super().pin(offset, nbytes)


class CannotCloseEvents(SimCopier):
    error: type[DeviceError] = DeviceError

    def destroy_event(self, event: Event) -> None:
        super().destroy_event(event)
        raise self.error("the event is in use", where="acme.close_event")


class IsLostAtAnEvent(CannotCloseEvents):
    error = DeviceLost


class BreaksOnce(SimCopier):
    """Once on a node: the copier that comes after it works."""

    marker: Path

    def copy(self, stream: Stream, batch: CopyBatch, *, to_arena: bool) -> None:
        if not self.marker.exists():
            self.marker.touch()
            raise ValueError("an index is off")
        super().copy(stream, batch, to_arena=to_arena)


class LendsNothing(SimEngine):
    """As long as `lends` is false. `open` are those that were not closed yet."""

    lends = False
    open: list[LendsNothing] = []  # noqa: RUF012  of the process, as the test asks

    def export(self, address: int) -> Exported:
        if not LendsNothing.lends:
            raise DeviceError("this memory is of a virtual pool", where="acme.export", hint=HINT)
        return super().export(address)

    def close(self) -> None:
        LendsNothing.open.remove(self)


def lends_nothing(options: SimOptions) -> LendsNothing:
    LendsNothing.open.append(LendsNothing(runtime(options.node)))
    return LendsNothing.open[-1]


class RefusesLate(SimEngine):
    """A driver to tell apart: a test makes its transport refuse what the server has registered."""


def refuses_late(options: SimOptions) -> RefusesLate:
    return RefusesLate(runtime(options.node))


def breaks_once(options: SimOptions, device: str, arena: Arena) -> SimCopier:
    made = BreaksOnce(runtime(options.node), device, arena)
    made.marker = Path(options.node) / "broken"
    return made


def refuses_memory(options: SimOptions, device: str, arena: Arena) -> SimCopier:
    return RefusesMemory(runtime(options.node), device, arena)


def refuses_copies(options: SimOptions, device: str, arena: Arena) -> SimCopier:
    return RefusesCopies(runtime(options.node), device, arena)


def cannot_pin(options: SimOptions, device: str, arena: Arena) -> SimCopier:
    return CannotPin(runtime(options.node), device, arena)


def pins_slowly(options: SimOptions, device: str, arena: Arena) -> SimCopier:
    return PinsSlowly(runtime(options.node), device, arena)


def cannot_close_events(options: SimOptions, device: str, arena: Arena) -> SimCopier:
    return CannotCloseEvents(runtime(options.node), device, arena)


def is_lost_at_an_event(options: SimOptions, device: str, arena: Arena) -> SimCopier:
    return IsLostAtAnEvent(runtime(options.node), device, arena)


def is_broken(options: SimOptions, device: str, arena: Arena) -> SimCopier:
    raise ValueError("no such luck")


def needs_a_library(options: SimOptions, device: str, arena: Arena) -> SimCopier:
    raise DeviceError("there is no library", where="acme", hint=HINT)


def _provider(
    name: str, copier: Callable[..., Any], engine: Callable[[SimOptions], SimEngine] | None = None
) -> DeviceTransportProvider[SimOptions]:
    return DeviceTransportProvider(
        name=name, summary="raises", options=SimOptions, create_engine=engine or create_engine, create_copier=copier
    )


@hookimpl
def kvf_transports() -> list[DeviceTransportProvider[SimOptions]]:
    return [
        _provider("sound", create_copier),
        _provider("refuses_memory", refuses_memory),
        _provider("refuses_copies", refuses_copies),
        _provider("cannot_pin", cannot_pin),
        _provider("pins_slowly", pins_slowly),
        _provider("cannot_close_events", cannot_close_events),
        _provider("is_lost_at_an_event", is_lost_at_an_event),
        _provider("breaks_once", breaks_once),
        _provider("is_broken", is_broken),
        _provider("needs_a_library", needs_a_library),
        _provider("lends_nothing", refuses_memory, lends_nothing),
        _provider("refuses_late", create_copier, refuses_late),
    ]
