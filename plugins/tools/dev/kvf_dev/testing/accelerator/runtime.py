"""`Accelerator`: the runtime library of a simulated device, as a process on its node uses it.

Unlike that of a real device it refuses each mistake that would be passed over with wrong bytes, and notes it on the
node (`Misuse`). Thread-safe. What a process has ends with it.
"""

from __future__ import annotations

import itertools
import math
import mmap
import os
import queue
import random
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from kvf_dev.testing.accelerator.memory import DeviceMemory, Fragments
from kvf_dev.testing.accelerator.node import NODE_VARIABLE, AcceleratorError, ContextLost, merged
from kvframework.api.layout import MemoryTensor
from kvframework.api.plugin import dtype_bytes

_POLL_S, _HOLD_POLL_S = 0.0005, 0.005
_NUMBERS = itertools.count(1)


@dataclass(eq=False)
class Event:
    """A point in a stream's work: `row` of the ledger; `opening` is the row of another process's event opened here."""

    device: str
    row: int
    opening: int | None = None
    closed: bool = False


class Stream:
    """A queue of work in order, each piece a little late, in a thread. `row` is that of a stream to be destroyed."""

    def __init__(self, runtime: Accelerator, device: str, row: int | None = None) -> None:
        runtime.check(device)
        self.device = device
        self.row = row
        self.number = next(_NUMBERS)
        self.error = ""
        self._runtime = runtime
        self._holds: list[threading.Event] = []
        self._work: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        threading.Thread(target=self._run, name=f"sim-stream-{self.number}", daemon=True).start()

    def add(self, work: Callable[[], object]) -> None:
        """Queue work behind what is queued. Never blocks."""
        self._work.put(work)

    def hold(self) -> Callable[[], None]:
        """Begin the work queued from now on once the returned function was called, in any thread. Never waits."""
        released = threading.Event()
        self._holds = [each for each in self._holds if not each.is_set()] + [released]
        self.add(released.wait)
        return released.set

    @property
    def held(self) -> bool:
        """Whether a hold stops the stream now."""
        return not all(each.is_set() for each in self._holds)

    def synchronize(self, timeout: float = 20.0) -> None:
        """Block until the work queued so far has ended, `timeout` seconds at most."""
        done = threading.Event()
        self.add(done.set)
        if not done.wait(timeout):
            raise AcceleratorError(f"stream {self.number} did not finish within {timeout} s")
        error, self.error = self.error, ""
        if error:
            raise AcceleratorError(error)

    def end_later(self) -> None:
        """End the stream's thread behind the work queued so far. Never blocks."""
        self._work.put(None)

    def _run(self) -> None:
        while (work := self._work.get()) is not None:
            time.sleep(random.uniform(0, self._runtime.max_delay_s))  # noqa: S311 - a delay
            try:
                work()
            except ContextLost as error:
                self._runtime.poison(str(error))
            except Exception as error:  # noqa: BLE001 - a stream never ends before it is destroyed
                self.error = self.error or str(error) or type(error).__name__


class Accelerator(DeviceMemory):
    """This process on the node in `path` (None: that of $KVF_SIMULATED_NODE). `devices` are identities, in the order in
    which this process sees them. Raises `AcceleratorError` if there is no node.
    """

    def __init__(self, path: str | Path | None = None) -> None:
        directory = Path(path or os.environ.get(NODE_VARIABLE, ""))
        if not (path or NODE_VARIABLE in os.environ) or not directory.is_dir():
            raise AcceleratorError(f"there is no simulated node at {str(directory)!r}")
        super().__init__(directory)
        self._default_streams: dict[str, Stream] = {}

    # streams and events

    def stream(self, device: str) -> Stream:
        row = self._ledger.insert("insert into streams(process) values(?)", self.process)
        return Stream(self, device, row)

    def destroy_stream(self, stream: Stream) -> None:
        stream.end_later()
        self._ledger.all("delete from streams where id = ?", stream.row)

    def default_stream(self, device: str) -> Stream:
        with self._lock:
            if device not in self._default_streams:
                self._default_streams[device] = Stream(self, device)
            return self._default_streams[device]

    def hold(self, stream: Stream) -> Callable[[], None]:
        """Make later work of the stream begin once the returned function was called, in any thread. Never waits."""
        self.check(stream.device)
        return stream.hold()

    def create_event(self, device: str, *, interprocess: bool = False) -> Event:
        self.check(device)
        token = secrets.token_bytes(16)
        row = self._ledger.insert(
            "insert into events values(null, ?, ?, ?, ?, 0, 0, 0, '')", device, self.process, interprocess, token
        )
        return Event(device, row)

    def export_event(self, event: Event) -> bytes:
        row = self._ledger.one("select token from events where id = ? and shared", event.row)
        if row is None or event.opening is not None:
            raise AcceleratorError("export: the event is not an interprocess event of this process")
        return bytes(row[0])

    def open_event(self, device: str, handle: bytes) -> Event:
        """Return the event behind another process's handle."""
        self.check(device)
        row = self._ledger.one("select id, device, process from events where token = ? and not destroyed", handle)
        if row is None:
            raise AcceleratorError("open: the handle names no event")
        number, owner_device, process = row
        if process == self.process:
            raise self._misuse("wrong_process", "open: a process cannot open its own event")
        if owner_device != device:
            raise self._misuse("wrong_device", f"open: the event is on {owner_device}, not on {device}")
        opening = self._ledger.insert("insert into openings(event, process) values(?, ?)", number, self.process)
        return Event(device, number, opening)

    def destroy_event(self, event: Event) -> None:
        event.closed = True
        if event.opening is None:
            self._ledger.all("update events set destroyed = 1 where id = ?", event.row)
        else:
            self._ledger.all("delete from openings where id = ?", event.opening)

    def record(self, event: Event, stream: Stream) -> None:
        """Record the event in place of its former record: it is reached once the stream has come to this point."""
        self._check_usable(event, stream.device, "record")
        (record,) = self._ledger.one(
            "update events set recorded = recorded + 1, error = '' where id = ? returning recorded", event.row
        )

        def reach() -> None:
            if not self._poisoned:
                error, stream.error = stream.error, ""
                self._ledger.all("update events set reached = ?, error = ? where id = ?", record, error, event.row)

        stream.add(reach)

    def reached(self, event: Event) -> bool:
        """Return whether the last record was reached. Raises the error of work before it, `Misuse` without one."""
        self._check_usable(event, event.device, "query")
        recorded, reached, error, _ = self._records(event)
        if reached >= recorded and error:
            raise AcceleratorError(error)
        return reached >= recorded

    def wait(self, stream: Stream, event: Event) -> None:
        """Make later work of the stream begin once the event's last record was reached."""
        self._check_usable(event, stream.device, "wait")
        recorded, _, _, owner = self._records(event)

        def wait() -> None:
            while self._records(event)[1] < recorded:
                if not self._ledger.lives(owner):
                    raise AcceleratorError("the event's process ended before the event was reached")
                time.sleep(_POLL_S)

        stream.add(wait)

    # work

    def copy(
        self,
        stream: Stream,
        host: memoryview,
        addresses: Sequence[int],
        offsets: Sequence[int],
        length: int,
        *,
        to_host: bool,
    ) -> None:
        """Queue a batched copy of fragments of `length` bytes between the device and a pinned host segment."""
        self.check(stream.device)
        what = f"a copy {'from' if to_host else 'to'} the device"
        with self._lock:
            fragments = self.fragments(addresses, length, stream.device, what)
            for offset in {min(offsets, default=0), max(offsets, default=0)}:
                if not any(low <= offset and offset + length <= high for low, high in self._pinned):
                    raise self._misuse("not_pinned", f"{what}: host memory at {offset} is not registered")

        def work(memory: mmap.mmap) -> None:
            for number, (device_at, host_at) in enumerate(zip(fragments.places, offsets, strict=True)):
                if number == len(offsets) // 2:
                    self._in_the_middle(stream.device)
                    self.check_live(fragments, what)
                if to_host:
                    host[host_at : host_at + length] = memory[device_at : device_at + length]
                else:
                    memory[device_at : device_at + length] = host[host_at : host_at + length]

        self._queue(stream, what, fragments, work, writes=not to_host)

    def write(self, address: int, data: bytes, stream: Stream | None = None) -> None:
        """Queue a write by a kernel of the engine; without a stream wait for it."""

        def work(memory: mmap.mmap, at: int) -> None:
            memory[at : at + len(data)] = data

        self._kernel("a write by a kernel", address, len(data), stream, work)

    def read(self, address: int, nbytes: int) -> bytes:
        """Return the bytes that a kernel of the engine reads there, after all work in the default stream."""
        found = bytearray(nbytes)
        self.read_into(memoryview(found), address)
        return bytes(found)

    def read_into(self, host: memoryview, address: int, stream: Stream | None = None) -> None:

        def work(memory: mmap.mmap, at: int) -> None:
            host[:] = memory[at : at + host.nbytes]

        self._kernel("a read by a kernel", address, host.nbytes, stream, work)

    def _kernel(
        self, what: str, address: int, nbytes: int, stream: Stream | None, work: Callable[[mmap.mmap, int], None]
    ) -> None:
        with self._lock:
            target = stream or self.default_stream(self.region(address, what).device)
            self.check(target.device)
            fragments = self.fragments([address], nbytes, target.device, what)
        (place,) = fragments.places
        self._queue(target, what, fragments, lambda memory: work(memory, place), writes="write" in what)
        if stream is None:
            target.synchronize()

    def _queue(
        self, stream: Stream, what: str, fragments: Fragments, work: Callable[[mmap.mmap], None], *, writes: bool
    ) -> None:
        """Queue work on the device's memory. When it begins, its turn must have come and its memory be there."""
        spans = merged((place, place + fragments.length) for place in fragments.places)

        def enter() -> int:
            return self._ledger.queue(stream.device, self.process, stream.number, writes=writes, what=what, spans=spans)

        # Behind a hold, its turn comes after all work queued before the release.
        entered = None if stream.held else enter()

        def run() -> None:
            queued = enter() if entered is None else entered
            try:
                self.check(stream.device)
                if other := self._ledger.conflict(queued):
                    raise self._misuse("unordered", f"{what} runs before {other}, queued earlier, has ended")
                self.check_live(fragments, what)
                work(self._memory[stream.device])
            finally:
                self._ledger.all("delete from queued where id = ?", queued)

        stream.add(run)

    def _in_the_middle(self, device: str) -> None:
        if (fault := self._ledger.take_fault(device)) is None:
            return
        row, kind = fault
        if kind == "copy_fails":
            raise AcceleratorError("an injected fault: the copy failed")
        if kind == "poison":
            raise ContextLost("an injected fault: the context is poisoned")
        while not self._ledger.one("select 1 from faults where id = ? and released", row):
            time.sleep(_HOLD_POLL_S)

    def _records(self, event: Event) -> tuple[int, int, str, int]:
        """Return the records, the records reached, the error before the last one, and the process of the event."""
        row: tuple[int, int, str, int] | None = self._ledger.one(
            "select recorded, reached, error, process from events where id = ? and not destroyed", event.row
        )
        if row is None:
            raise self._misuse("use_after_free", "the event was destroyed by its process")
        if not row[0]:
            raise self._misuse("never_recorded", "the event was never recorded, so nothing can wait for it")
        return row

    def _check_usable(self, event: Event, device: str, what: str) -> None:
        self.check(device)
        if event.closed:
            raise self._misuse("use_after_close", f"{what}: the event was closed here")
        if event.device != device:
            raise self._misuse("wrong_device", f"{what}: the event is on {event.device}, not on {device}")


if TYPE_CHECKING:
    from kvf_dev.testing.accelerator.runtime import Accelerator


class DeviceTensor(MemoryTensor):
    """A view of device memory. `strides` are in elements; `dtype` is torch's name of it."""

    def __init__(
        self, runtime: Accelerator, address: int, shape: Sequence[int], strides: Sequence[int] | None, dtype: str
    ) -> None:
        super().__init__(address, shape, dtype, strides, device="simulated")
        self.runtime = runtime

    @classmethod
    def empty(cls, runtime: Accelerator, device: str, shape: Sequence[int], dtype: str) -> DeviceTensor:
        address = runtime.allocate(device, math.prod(shape) * dtype_bytes(dtype))
        return cls(runtime, address, shape, None, dtype)

    def fill(self, data: bytes) -> None:
        self.runtime.write(self.address, data)

    def content(self) -> bytes:
        return self.runtime.read(self.address, self.nbytes)

    def _made(self, offset: int, shape: Sequence[int], strides: Sequence[int], dtype: str) -> DeviceTensor:
        return DeviceTensor(self.runtime, self.address + offset * self.element_size(), shape, strides, dtype)


def contiguous(shape: Sequence[int]) -> list[int]:
    return [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]
