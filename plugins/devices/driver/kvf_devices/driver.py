"""The driver interface: the vendor's part of moving KV between a device and the arena.

`EngineDriver` lives in an engine process and exports memory and events to others. `CopierDriver` lives in a process of
its own, one per device, started and watched by the server; it imports the engines' exports and copies. All else is here
once, for all devices.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Annotated, Generic, NamedTuple, TypeVar

from msgspec import Meta

from kvframework.api.copy_plans import CopyBatch
from kvframework.api.plugin import ByteSize, Message, Options
from kvframework.errors import DeviceError

E = TypeVar("E")
S = TypeVar("S")

# The handle of an allocation or of an event.
MAX_HANDLE_BYTES = 2048


class Allocation(Message, frozen=True, array_like=True):
    """One allocation of device memory, as another process can open it. `device` is the same in every process (a UUID,
    never an ordinal); `handle` is the driver's own, at most `MAX_HANDLE_BYTES`."""

    device: str
    handle: bytes
    nbytes: int


class Exported(NamedTuple):
    """The place of an address: `offset` bytes into `allocation`."""

    allocation: Allocation
    offset: int


class DeviceOptions(Options, frozen=True):
    """Base of the options of a device transport, with those of every device's part. Vendors add their own."""

    in_flight: Annotated[
        ByteSize, Meta(description="most bytes being copied per device and direction at once; at least 1")
    ] = ByteSize(128 << 20)
    launch: Annotated[
        ByteSize, Meta(description="bytes of one launch, at least 1; a cancel waits for launched copies")
    ] = ByteSize(32 << 20)
    pace: Annotated[
        ByteSize, Meta(description="most bytes per second copied per device and direction; 0: no limit")
    ] = ByteSize(0)
    # Copiers report every half second that they are alive.
    stall_s: Annotated[
        float, Meta(ge=1, description="seconds without progress after which a copier is killed and restarted")
    ] = 10.0

    def __post_init__(self) -> None:
        """Raise `ValueError` for a size out of range; a subclass with a `__post_init__` of its own calls this one
        too."""
        for name, least in (("in_flight", 1), ("launch", 1), ("pace", 0)):
            value = int(getattr(self, name))
            if value < least:
                raise ValueError(f"{name} is {value}, expected at least {least} byte")
            if value >= 1 << 63:
                raise ValueError(f"{name} is {value}, expected less than 2**63 bytes")


class EngineDriver(ABC, Generic[E]):
    """The driver in an engine process. Called from the engine's thread and from the connection's; no call waits for the
    device. Raises `DeviceError`. `E` is the driver's type of an interprocess event."""

    @abstractmethod
    def export(self, address: int) -> Exported:
        """Exports the allocation that holds the device address to other processes of this user. The same allocation
        gives the same handle for its lifetime. Raises `DeviceError` for memory that cannot be exported, with the
        setting to change as hint."""

    @abstractmethod
    def create_event(self, device: str) -> E:
        """Return a new interprocess event of a device; the caller destroys it."""

    @abstractmethod
    def export_event(self, event: E) -> bytes:
        """Return the handle by which another process opens the event, at most `MAX_HANDLE_BYTES`."""

    @abstractmethod
    def record(self, event: E, behind: object | None) -> None:
        """Records the event, which is reached once the engine's work so far is done. `behind` is the engine's argument
        at its submit: its own event behind that work (a `torch.Event`, one of its backend's event class, or one of the
        vendor's runtime), or None for the work in the calling thread's current stream. Raise `DeviceError` for any
        other object: taking it for None would copy too early. Events are pooled: recording again replaces the former
        record, also while the work of that has not been reached."""

    @abstractmethod
    def destroy_event(self, event: E) -> None:
        """Destroy an event of `create_event`."""

    def block_stream(self, stream: object | None) -> Callable[[], None]:
        """Blocks all further work of one of the engine's streams (None: the calling thread's current one), on the
        device, until the returned release is called. Never blocks. The release may be called by any thread, more than
        once, and after `close`, and never blocks either: until then the driver keeps the memory that the device reads.
        Raises `DeviceError` for an object that is no stream, and where streams cannot wait for the host: the caller
        then waits in its own thread."""
        del stream
        raise DeviceError("this device's streams cannot wait for a transfer")

    def close(self) -> None:
        """End the driver's use in this process. Idempotent."""
        return


class CopierDriver(ABC, Generic[E, S]):
    """The driver in the copier process of one device. One thread calls it, except `pin`, which other threads call at
    the same time. Only `open`, `close_memory`, `destroy_event` and `pin` may wait for the device, for a moment.

    Raises `DeviceError` for one operation that failed, and `DeviceLost` once nothing works any more (a poisoned
    context, a device that vanished): the process then ends, and a new one starts. It may be killed at any moment: all
    that was pinned, opened and created has to end with it. `E` is an event, `S` a stream.
    """

    @abstractmethod
    def pin(self, offset: int, nbytes: int) -> None:
        """Register a slice of the arena with the device, so that copies run asynchronously. Blocking."""

    @abstractmethod
    def open(self, allocation: Allocation) -> int:
        """Maps another process's allocation and returns its address here. Raises `DeviceError` for one that no longer
        exists, is of another device, malformed, or smaller than its `nbytes`: a copy beyond its end would harm others.
        Where the driver cannot tell the size, that is one of `lacks`."""

    @abstractmethod
    def close_memory(self, address: int) -> None:
        """Unmaps the memory that `open` mapped. The engine may free its memory from now on."""

    @abstractmethod
    def open_event(self, handle: bytes) -> E:
        """Open another process's event, see `EngineDriver.export_event`."""

    @abstractmethod
    def create_event(self) -> E:
        """Return a new event for this process alone."""

    @abstractmethod
    def destroy_event(self, event: E) -> None:
        """Destroys an event of `open_event` or `create_event`."""

    @abstractmethod
    def create_stream(self, *, loads: bool) -> S:
        """Return a stream for copies. That for `loads` has priority where the device knows priorities."""

    @abstractmethod
    def wait(self, stream: S, event: E) -> None:
        """Make later work of the stream run behind the event. Never blocks."""

    @abstractmethod
    def copy(self, stream: S, batch: CopyBatch, *, to_arena: bool) -> None:
        """Start to copy every fragment between device and arena; never wait for it. The driver owns the batch."""

    @abstractmethod
    def record(self, event: E, behind: S) -> None:
        """Records the event: it is reached once all work now in the stream `behind` is done."""

    @abstractmethod
    def reached(self, event: E) -> bool:
        """Whether the event was reached, never blocking. Raises `DeviceError` if a copy before it failed."""

    def lacks(self) -> Sequence[str]:
        """What the device's driver cannot do or tell here, and the transport does without: a line each, for the log and
        the status, in the order found; never fewer than before. Asked often, by the copier's thread."""
        return ()
