"""`TransportRig`, the vendor's part by which the kit drives a transport on the vendor's device, and its recipe for any
process."""

from __future__ import annotations

import ctypes
import math
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, field
from functools import wraps
from importlib import import_module
from operator import attrgetter
from pathlib import Path
from typing import Any, ClassVar

import pytest

from kvf_dev.testing.kit import wait_until
from kvframework.api.layout import MemoryTensor, TensorLike
from kvframework.api.plugin import dtype_bytes
from kvframework.errors import DeviceError


class TransportRig(ABC):
    """One process's access to the device, as an engine has it. The kit makes it by `RigSpec` in every process it needs.

    `transport` is the transport's name; `engine_options` and `server_options` are for the two sides. `plugins` are
    modules that the kit registers where the distribution is not installed. `synchronous` is for transports whose
    submits return when the copy is done, as with engine-driven ones. What a device cannot do skips the test: leave that
    method out.
    """

    transport: str
    engine_options: Mapping[str, object] = {}
    server_options: Mapping[str, object] = {}
    plugins: Sequence[str] = ()
    synchronous: bool = False

    @abstractmethod
    def empty(self, shape: Sequence[int], dtype: str) -> TensorLike:
        """Return contiguous memory on the device, by torch's name of the dtype."""

    @abstractmethod
    def write(self, tensor: TensorLike, data: bytes) -> None:
        """Write all bytes of a contiguous tensor, after the writes of `write_later`. Blocking."""

    @abstractmethod
    def read(self, tensor: TensorLike) -> bytes:
        """Return all bytes of a contiguous tensor, read as a kernel of the engine would, after the writes of
        `write_later`. Blocking."""

    @abstractmethod
    def write_later(self, tensor: TensorLike, data: bytes) -> object:
        """Queue a write that takes effect a good while later (0.2 s); return the event behind it, for a submit."""

    def write_behind(self, tensor: TensorLike, data: bytes) -> None:
        """Queue such a write in the calling thread's current stream, for a submit without an event."""
        pytest.skip("Define `write_behind` in the rig: a late write in the current stream")

    def event(self) -> object:
        """Return the engine's event for a submit behind no queued work; None is fine for most."""
        return None

    def stream(self) -> object:
        """Return a stream of the engine's beside its current one, as an argument of `DeviceFuture.wait`."""
        pytest.skip("Define `stream` in the rig: a stream that can wait for a transfer")

    def read_later(self, tensor: TensorLike, stream: object | None) -> Callable[[], bytes | None]:
        """Queue a read of all bytes of a contiguous tensor on a stream (None: the current one), as a kernel of the
        engine would. Never blocks. The returned function gives the bytes once the stream has passed the read, None
        before; it may raise the read's error."""
        pytest.skip("Define `read_later` in the rig: a read queued after a stream's work")

    def holding_copies(self) -> AbstractContextManager[None]:
        """Stop the next copy of the transport in its middle until the block ends."""
        pytest.skip("Define `holding_copies` in the rig (`DeviceRig` has it, with `copies`)")

    def held(self) -> bool:
        """Return whether a copy stands still in `holding_copies`."""
        return False

    def holding_writes(self) -> AbstractContextManager[None]:
        """Delay the effect of `write_later` until the block ends."""
        pytest.skip("Define `holding_writes` in the rig (`DeviceRig` has it)")

    def fail_copy(self) -> None:
        """Make the next copy of the transport fail on a device that works otherwise."""
        pytest.skip("Define `fail_copy` in the rig (`DeviceRig` has it, with `copies`)")

    def poison(self) -> None:
        """Make the next copy of the transport poison the context of its process, as an illegal access does."""
        pytest.skip("Define `poison` in the rig: it loses the device's context")

    def without_device(self) -> AbstractContextManager[None]:
        """Make each call on the device fail until the block ends, as during a reset of it."""
        pytest.skip("Define `without_device` in the rig: it resets the device")

    def problems(self) -> list[str]:
        """Return the mistakes noted so far, where the device can tell: in any process."""
        return []

    def open_elsewhere(self) -> int:
        """Return how many allocations of engines are open in other processes; 0 if unknown."""
        return 0

    def events(self) -> int:
        """Return how many interprocess events of engines there are, here and open elsewhere; 0 if unknown."""
        return 0

    def streams(self) -> int:
        """Return how many streams there are that have to be destroyed, here and in other processes; 0 if unknown."""
        return 0

    def elsewhere(self) -> TransportRig:
        """Return a rig of another device of the machine, in this process."""
        pytest.skip("Define `elsewhere` in the rig: a rig of another device")

    def close(self) -> None:
        """Free the rig's resources. Idempotent."""
        return


def nbytes_of(tensor: TensorLike) -> int:
    """Return the bytes of a tensor's elements."""
    return math.prod(tensor.shape) * tensor.element_size()


@dataclass(frozen=True)
class RigSpec:
    """A rig that any process can make: `factory` is "module:function", called with `arguments`."""

    factory: str
    arguments: Mapping[str, object] = field(default_factory=dict)

    def make(self) -> TransportRig:
        """Import the factory and call it. Raises what it raises."""
        module, _, name = self.factory.partition(":")
        rig = getattr(import_module(module), name)(**self.arguments)
        assert isinstance(rig, TransportRig)
        return rig


LATER_S = 0.2
_POLL_S = 0.002


class Stops:
    """Files in a directory, by which a test stops or fails the next copy in any process."""

    lacks: str = ""  # why no copy looks into it

    def __init__(self, directory: str | Path) -> None:
        self._at = Path(directory)

    def ask(self, what: str) -> None:
        if self.lacks:
            pytest.skip(self.lacks)
        (self._at / what).touch()

    def takes(self, what: str) -> bool:
        """Whether this copy is the one that the test asked for."""
        with suppress(FileNotFoundError):
            (self._at / what).rename(self._at / f"{what}.taken")
            return True
        return False

    def held(self) -> bool:
        return (self._at / "hold.taken").exists()

    @contextmanager
    def holding(self) -> Iterator[None]:
        self.ask("hold")
        try:
            yield
        finally:
            for name in ("hold", "hold.taken"):
                (self._at / name).unlink(missing_ok=True)

    def stand_still(self, then: Callable[[], None] = lambda: None) -> None:
        while self.held():
            time.sleep(_POLL_S)
        then()


class StoppingRig(TransportRig):
    """A rig whose copies look into `stops`: base of `DeviceRig` and `HostRig`."""

    def __init__(self, transport: str, directory: str | Path, options: Mapping[str, object] | None = None) -> None:
        self.transport = transport
        self.engine_options = self.server_options = options or {}
        self.directory = str(directory)
        self.stops = Stops(directory)

    def holding_copies(self) -> AbstractContextManager[None]:
        return self.stops.holding()

    def held(self) -> bool:
        return self.stops.held()

    def fail_copy(self) -> None:
        self.stops.ask("fail")


class DeviceRig(StoppingRig):
    """Give `empty`, the hooks `queue`, `reached`, `hold` and `new_stream`; `copies` and `stream_of` if the transport
    copies in the engine's process. `directory` belongs to the rigs of one test class alone."""

    copies: ClassVar[str] = ""
    """The call by which the transport queues one batch, "module:Class.method". The rig sees it in each process that it
    is made in. What is queued behind a held batch on another stream, or on one without order, passes it."""

    streams_wait: ClassVar[bool] = True
    """Whether the engine's streams can wait for a transfer, by the transport's `stream_hook`."""

    def __init__(self, transport: str, directory: str | Path, options: Mapping[str, object] | None = None) -> None:
        super().__init__(transport, directory, options)
        self._late: object | None = None
        self._queued: list[object] = []  # the events behind late writes
        self._kept: list[bytes] = []  # what those write
        self._gates: list[Callable[[], None]] | None = None
        self._restore: Callable[[], None] = lambda: None
        if self.copies:
            self._see_copies()
        else:
            self.stops.lacks = "Define `copies` in the rig: the call with which the transport queues a copy"

    @abstractmethod
    def queue(self, address: int, host: memoryview, stream: object | None, *, to_device: bool) -> object:
        """Queue a copy of device memory on a stream (None: the thread's current), and return an event behind all it
        has, ordered or not. Never waits. `host` is valid until the event is reached, and read-only for `to_device`."""

    @abstractmethod
    def reached(self, event: object) -> bool:
        """Return whether all before an event of `queue` is done. May raise the error of it."""

    @abstractmethod
    def hold(self, stream: object | None) -> Callable[[], None]:
        """Let what is queued on the stream from now on wait for a call of the returned release. Never waits."""

    @abstractmethod
    def new_stream(self) -> object:
        """Return another stream of the engine's."""

    def stream_of(self, *arguments: Any, **named: Any) -> object:
        """Return the stream on which a call of `copies` queues, by the call's arguments."""
        raise NotImplementedError("Define `stream_of` together with `copies`")

    def write(self, tensor: TensorLike, data: bytes) -> None:
        self._wait_for_late()
        self._wait(self.queue(tensor.data_ptr(), memoryview(data), None, to_device=True))

    def read(self, tensor: TensorLike) -> bytes:
        self._wait_for_late()
        found = bytearray(nbytes_of(tensor))
        self._wait(self.queue(tensor.data_ptr(), memoryview(found), None, to_device=False))
        return bytes(found)

    def write_later(self, tensor: TensorLike, data: bytes) -> object:
        self._late = self._late or self.new_stream()
        return self._written_late(tensor, data, self._late)

    def write_behind(self, tensor: TensorLike, data: bytes) -> None:
        self._written_late(tensor, data, None)

    def _written_late(self, tensor: TensorLike, data: bytes, stream: object | None) -> object:
        release = self.hold(stream)
        if self._gates is None:
            threading.Timer(LATER_S, release).start()
        else:
            self._gates.append(release)
        self._kept.append(data)
        self._queued.append(self.queue(tensor.data_ptr(), memoryview(data), stream, to_device=True))
        return self._queued[-1]

    @contextmanager
    def holding_writes(self) -> Iterator[None]:
        self._gates = []
        try:
            yield
        finally:
            for release in self._gates:
                release()
            self._gates = None

    def stream(self) -> object:
        return self.new_stream() if self.streams_wait else super().stream()

    def read_later(self, tensor: TensorLike, stream: object | None) -> Callable[[], bytes | None]:
        found = bytearray(nbytes_of(tensor))
        event = self.queue(tensor.data_ptr(), memoryview(found), stream, to_device=False)
        return lambda: bytes(found) if self.reached(event) else None

    def close(self) -> None:
        self._wait_for_late()
        self._restore()

    def _see_copies(self) -> None:
        module, _, name = self.copies.partition(":")
        *path, last = name.split(".")
        owner = attrgetter(".".join(path))(import_module(module)) if path else import_module(module)
        right = getattr(owner, last)

        @wraps(right)
        def queued(*arguments: Any, **named: Any) -> Any:
            if self.stops.takes("hold"):
                release = self.hold(self.stream_of(*arguments, **named))
                threading.Thread(target=self.stops.stand_still, args=(release,), daemon=True).start()
            answer = right(*arguments, **named)
            if self.stops.takes("fail"):  # a part of the transfer is under way by now
                raise DeviceError("a fault of the rig: the copy failed")
            return answer

        setattr(owner, last, queued)
        self._restore = lambda: setattr(owner, last, right)

    def _wait_for_late(self) -> None:
        for event in self._queued:
            self._wait(event)
        self._queued.clear()
        self._kept.clear()

    def _wait(self, event: object) -> None:
        wait_until(lambda: self.reached(event), "the engine's copies to end")


class HostRig(StoppingRig):
    """Host memory at an address, and a transport that copies it in the engine's thread. No torch."""

    synchronous = True

    def __init__(self, transport: str, directory: str, options: Mapping[str, object] | None = None) -> None:
        super().__init__(transport, directory, options)
        self._queued: list[threading.Thread] = []

    def empty(self, shape: Sequence[int], dtype: str) -> TensorLike:
        tensor = MemoryTensor(0, shape, dtype)
        memory = ctypes.create_string_buffer(tensor.nbytes + dtype_bytes("float64"))
        # As allocators do, whole elements begin at multiples of their size.
        return MemoryTensor(ctypes.addressof(memory) + 7 & ~7, shape, dtype, owner=memory)

    def write(self, tensor: TensorLike, data: bytes) -> None:
        self._finish_queued()
        _write(tensor, data)

    def read(self, tensor: TensorLike) -> bytes:
        self._finish_queued()
        return ctypes.string_at(tensor.data_ptr(), nbytes_of(tensor))

    def write_later(self, tensor: TensorLike, data: bytes) -> object:
        thread = threading.Timer(LATER_S, _write, (tensor, data))
        thread.start()
        self._queued.append(thread)
        return _Event(self, list(self._queued))

    def event(self) -> object:
        return _Event(self, [])

    def stand_still(self) -> None:
        if self.stops.takes("hold"):
            self.stops.stand_still()
        if self.stops.takes("fail"):
            raise DeviceError("a fault of the rig: the copy failed")

    def close(self) -> None:
        self._finish_queued()

    def _finish_queued(self) -> None:
        for thread in self._queued:
            thread.join()
        self._queued.clear()


class TorchRig(HostRig):
    """CPU tensors of torch."""

    def empty(self, shape: Sequence[int], dtype: str) -> TensorLike:
        import torch

        return torch.zeros(*shape, dtype=getattr(torch, dtype))


class _Event:
    """The part of `torch.Event` that transports of host memory use."""

    def __init__(self, rig: HostRig, behind: Sequence[threading.Thread]) -> None:
        self._rig = rig
        self._behind = behind

    def synchronize(self) -> None:
        for thread in self._behind:
            thread.join()
        self._rig.stand_still()


def _write(tensor: TensorLike, data: bytes) -> None:
    ctypes.memmove(tensor.data_ptr(), data, len(data))
