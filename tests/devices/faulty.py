"""Transports of the simulated accelerator whose driver raises, as a plugin module: what becomes of its errors."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kvf_simdev import SimCopier, SimEngine, SimOptions, create_copier, create_engine, runtime

from kvf_dev.testing.accelerator import Event, Stream
from kvf_devices import Allocation, Arena, DeviceTransportProvider, Exported
from kvframework.api.copy_plans import CopyBatch
from kvframework.api.plugin import hookimpl
from kvframework.errors import DeviceError, DeviceLost

HINT = "set ACME_IPC=1"
PIN_S = 2.0


class FaultyCopier(SimCopier):
    """Made as a provider's `create_copier` is called: the class is its own factory."""

    def __init__(self, options: SimOptions, device: str, arena: Arena) -> None:
        super().__init__(runtime(options.node), device, arena)
        self.marker = Path(options.node) / "broken"


class RefusesMemory(FaultyCopier):
    def open(self, allocation: Allocation) -> int:
        raise DeviceError("it is not shared", where="acme.open", available="shared pools", hint=HINT)


class RefusesCopies(FaultyCopier):
    def copy(self, stream: Stream, batch: CopyBatch, *, to_arena: bool) -> None:
        raise DeviceError("no engine is free", where="acme.copy", hint=HINT)


class CannotPin(FaultyCopier):
    def pin(self, offset: int, nbytes: int) -> None:
        raise DeviceError("so much memory may not be locked", where="acme.pin", hint=HINT)


class PinsSlowly(FaultyCopier):
    def pin(self, offset: int, nbytes: int) -> None:
        time.sleep(PIN_S)
        super().pin(offset, nbytes)


class CannotCloseEvents(FaultyCopier):
    error: type[DeviceError] = DeviceError

    def destroy_event(self, event: Event) -> None:
        super().destroy_event(event)
        raise self.error("the event is in use", where="acme.close_event")


class IsLostAtAnEvent(CannotCloseEvents):
    error = DeviceLost


class BreaksOnce(FaultyCopier):
    """Once on a node: the copier that comes after it works."""

    def copy(self, stream: Stream, batch: CopyBatch, *, to_arena: bool) -> None:
        if not self.marker.exists():
            self.marker.touch()
            raise ValueError("an index is off")
        super().copy(stream, batch, to_arena=to_arena)


class FaultyEngine(SimEngine):
    """Made as a provider's `create_engine` is called."""

    def __init__(self, options: SimOptions) -> None:
        super().__init__(runtime(options.node))


class LendsNothing(FaultyEngine):
    """As long as `lends` is false. `open` are those that were not closed yet."""

    lends = False
    open: list[LendsNothing] = []  # noqa: RUF012  of the process, as the test asks

    def __init__(self, options: SimOptions) -> None:
        super().__init__(options)
        self.open.append(self)

    def export(self, address: int) -> Exported:
        if not LendsNothing.lends:
            raise DeviceError("this memory is of a virtual pool", where="acme.export", hint=HINT)
        return super().export(address)

    def close(self) -> None:
        self.open.remove(self)


class RefusesLate(FaultyEngine):
    """A driver to tell apart: a test makes its transport refuse what the server has registered."""


def is_broken(options: SimOptions, device: str, arena: Arena) -> SimCopier:
    raise ValueError("no such luck")


def needs_a_library(options: SimOptions, device: str, arena: Arena) -> SimCopier:
    raise DeviceError("there is no library", where="acme", hint=HINT)


def provider(
    name: str, copier: Callable[..., Any] = create_copier, engine: Callable[[SimOptions], SimEngine] = create_engine
) -> DeviceTransportProvider[SimOptions]:
    return DeviceTransportProvider(
        name=name, summary="raises", options=SimOptions, create_engine=engine, create_copier=copier
    )


@hookimpl
def kvf_transports() -> list[DeviceTransportProvider[SimOptions]]:
    return [
        provider("sound"),
        provider("refuses_memory", RefusesMemory),
        provider("refuses_copies", RefusesCopies),
        provider("cannot_pin", CannotPin),
        provider("pins_slowly", PinsSlowly),
        provider("cannot_close_events", CannotCloseEvents),
        provider("is_lost_at_an_event", IsLostAtAnEvent),
        provider("breaks_once", BreaksOnce),
        provider("is_broken", is_broken),
        provider("needs_a_library", needs_a_library),
        provider("lends_nothing", RefusesMemory, LendsNothing),
        provider("refuses_late", engine=RefusesLate),
    ]
