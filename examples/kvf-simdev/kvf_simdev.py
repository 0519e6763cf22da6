"""The transport `simdev`: the server moves KV of a simulated accelerator by itself.

A vendor's plugin for a real one looks the same: two small adapters of the device's runtime library, and a provider.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Annotated, ParamSpec, TypeVar

from msgspec import Meta

from kvf_dev.testing.accelerator import NODE_VARIABLE, Accelerator, AcceleratorError, ContextLost, Event, Stream
from kvf_devices import Allocation, Arena, CopierDriver, DeviceOptions, DeviceTransportProvider, EngineDriver, Exported
from kvframework.api.copy_plans import CopyBatch
from kvframework.api.plugin import hookimpl
from kvframework.errors import DeviceError, DeviceLost

P = ParamSpec("P")
R = TypeVar("R")


class SimOptions(DeviceOptions, frozen=True):
    """Options beside those of every device transport."""

    node: Annotated[str, Meta(description=f"directory of the simulated node; else that of ${NODE_VARIABLE}")] = ""


def translated(call: Callable[P, R]) -> Callable[P, R]:
    """Translates the runtime's errors to the framework's: a sticky one ends the copier, any other one copy."""

    @wraps(call)
    def translating(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return call(*args, **kwargs)
        except ContextLost as error:
            raise DeviceLost(str(error), where="simdev") from error
        except AcceleratorError as error:
            raise DeviceError(str(error), where="simdev") from error

    return translating


class SimEngine(EngineDriver[Event]):
    """The half in an engine process. It uses the runtime that the engine's tensors come from."""

    def __init__(self, runtime: Accelerator) -> None:
        self._runtime = runtime
        self._behind: dict[Event, Stream] = {}
        self._device = ""

    @translated
    def export(self, address: int) -> Exported:
        device, handle, nbytes, offset = self._runtime.export_memory(address)
        self._device = device
        return Exported(Allocation(device, handle, nbytes), offset)

    @translated
    def create_event(self, device: str) -> Event:
        return self._runtime.create_event(device, interprocess=True)

    @translated
    def export_event(self, event: Event) -> bytes:
        return self._runtime.export_event(event)

    @translated
    def record(self, event: Event, behind: object | None) -> None:
        if behind is None:
            stream = self._runtime.default_stream(event.device)
        elif isinstance(behind, Event):
            # A stream for each event: no transfer waits for the engine's further work, or for another one's event.
            if event not in self._behind:
                self._behind[event] = self._runtime.stream(event.device)
            stream = self._behind[event]
            self._runtime.wait(stream, behind)
        else:
            raise DeviceError(
                f"the engine's event is a {type(behind).__name__}",
                where="simdev",
                available="None, or an Event of the simulated runtime",
            )
        self._runtime.record(event, stream)

    @translated
    def destroy_event(self, event: Event) -> None:
        if event in self._behind:
            self._runtime.destroy_stream(self._behind.pop(event))
        self._runtime.destroy_event(event)

    @translated
    def block_stream(self, stream: object | None) -> Callable[[], None]:
        if stream is not None and not isinstance(stream, Stream):
            raise DeviceError(
                f"a {type(stream).__name__} cannot wait",
                where="simdev",
                available="None, or a Stream of the simulated runtime",
            )
        return self._runtime.hold(stream or self._runtime.default_stream(self._device))


class SimCopier(CopierDriver[Event, Stream]):
    """The half in the copier process of one device."""

    def __init__(self, runtime: Accelerator, device: str, arena: Arena) -> None:
        self._runtime = runtime
        self._device = device
        self._arena = arena

    @translated
    def pin(self, offset: int, nbytes: int) -> None:
        self._runtime.pin(offset, nbytes)

    @translated
    def open(self, allocation: Allocation) -> int:
        return self._runtime.open_memory(self._device, allocation.handle, allocation.nbytes)

    @translated
    def close_memory(self, address: int) -> None:
        self._runtime.close_memory(address)

    @translated
    def open_event(self, handle: bytes) -> Event:
        return self._runtime.open_event(self._device, handle)

    @translated
    def create_event(self) -> Event:
        return self._runtime.create_event(self._device)

    @translated
    def destroy_event(self, event: Event) -> None:
        self._runtime.destroy_event(event)

    @translated
    def create_stream(self, *, loads: bool) -> Stream:
        return self._runtime.stream(self._device)

    @translated
    def wait(self, stream: Stream, event: Event) -> None:
        self._runtime.wait(stream, event)

    @translated
    def copy(self, stream: Stream, batch: CopyBatch, *, to_arena: bool) -> None:
        addresses, offsets, length = batch.fragments()
        self._runtime.copy(stream, self._arena.view, addresses, offsets, length, to_host=to_arena)

    @translated
    def record(self, event: Event, behind: Stream) -> None:
        self._runtime.record(event, behind)

    @translated
    def reached(self, event: Event) -> bool:
        return self._runtime.reached(event)


_runtimes: dict[str, Accelerator] = {}


@translated
def runtime(node: str) -> Accelerator:
    """This process's runtime on a node; the engine makes its tensors with it."""
    path = node or os.environ.get(NODE_VARIABLE, "")
    if path not in _runtimes:
        _runtimes[path] = Accelerator(path or None)
    return _runtimes[path]


def create_engine(options: SimOptions) -> EngineDriver[Event]:
    return SimEngine(runtime(options.node))


def create_copier(options: SimOptions, device: str, arena: Arena) -> CopierDriver[Event, Stream]:
    found = runtime(options.node)
    translated(found.check)(device)
    return SimCopier(found, device, arena)


def probe() -> str | None:
    """Return why it cannot run here, or None. The options may name a node too, so only a wrong variable is a reason."""
    path = os.environ.get(NODE_VARIABLE)
    if path is not None and not Path(path).is_dir():
        return f"${NODE_VARIABLE} is {path!r}, which is no directory"
    return None


@hookimpl
def kvf_transports() -> list[DeviceTransportProvider[SimOptions]]:
    return [
        DeviceTransportProvider(
            name="simdev",
            summary="the server copies between a simulated accelerator and the arena",
            options=SimOptions,
            create_engine=create_engine,
            create_copier=create_copier,
            probe=probe,
        )
    ]
