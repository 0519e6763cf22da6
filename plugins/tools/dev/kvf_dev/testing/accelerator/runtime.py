"""`Accelerator`: the runtime library of a simulated device, as a process on its node uses it.

It has the functions of such libraries: allocations and interprocess handles, streams and events, batched copies that
run later. Unlike them it refuses each mistake that a real device would let pass with wrong bytes, and notes it on the
node (`Misuse`). Thread-safe. Close it, or end the process.
"""

from __future__ import annotations

import itertools
import os
import secrets
import struct
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from kvf_dev.testing.accelerator.memory import AddressSpace
from kvf_dev.testing.accelerator.node import NODE_VARIABLE, AcceleratorError, ContextLost, Ledger, Misuse, merged
from kvf_dev.testing.accelerator.streams import Event, Stream, wait_until_reached

_HANDLE = struct.Struct("=4sQ16s")
_MEMORY, _EVENT = b"simM", b"simE"
_HOLD_POLL_S = 0.005


class Accelerator:
    """This process on the node in `path` (None: that of $KVF_SIMULATED_NODE).

    `devices` are identities, in the order in which this process sees them. Raises `AcceleratorError` if there is no
    node.
    """

    def __init__(self, path: str | Path | None = None) -> None:
        directory = Path(path or os.environ.get(NODE_VARIABLE, ""))
        if not (path or NODE_VARIABLE in os.environ) or not directory.is_dir():
            raise AcceleratorError(f"there is no simulated node at {str(directory)!r}")
        self._ledger = Ledger(directory)
        settings = dict(self._ledger.all("select name, value from settings"))
        self._seed, self._max_delay_s = settings["seed"], float(settings["max_delay_s"])
        self.process = self._ledger.enter()
        rows = self._ledger.all("select uuid from devices order by number")
        self.devices: Sequence[str] = tuple(uuid for (uuid,) in rows)
        self._space = AddressSpace(directory, self._ledger, self.process, self.devices)
        self._lock = threading.RLock()
        self._streams: list[Stream] = []
        self._numbers = itertools.count(1)
        self._named: dict[tuple[str, str], Stream] = {}
        self._pinned: list[tuple[int, int]] = []
        self._poisoned = ""
        self._closed = False

    def close(self) -> None:
        """End the streams, free this process's allocations, close the memory and events it opened. Idempotent."""
        if self._closed:
            return
        self._closed = True
        for stream in self._streams:
            stream.end()
        self._space.close()
        self._ledger.close()

    def poison(self, reason: str) -> None:
        """Make every further call of this process fail with `ContextLost`."""
        self._poisoned = self._poisoned or reason

    def check(self, device: str) -> None:
        """Raise `ContextLost` if this process can no longer use the device, `AcceleratorError` if there is none."""
        if self._closed:
            raise AcceleratorError("the runtime is closed")
        if self._poisoned:
            raise ContextLost(self._poisoned)
        row = self._ledger.one("select vanished from devices where uuid = ?", device)
        if row is None:
            raise AcceleratorError(f"there is no device {device}")
        if row[0]:
            raise ContextLost(f"device {device} has vanished")

    # memory

    def allocate(self, device: str, nbytes: int) -> int:
        """Return the address of new memory. It is meaningless to the host and to other processes."""
        self.check(device)
        with self._lock:
            return self._space.allocate(device, nbytes, secrets.token_bytes(16))

    def free(self, address: int) -> None:
        with self._lock:
            self._space.free(address)

    def export_memory(self, address: int) -> tuple[str, bytes, int, int]:
        """Export the allocation around `address`: return its device, a handle for other processes, its size, and the
        offset of `address` in it."""
        with self._lock:
            region = self._space.region(address, "export")
        self.check(region.device)
        if region.mapping is not None:
            raise AcceleratorError("export: this memory belongs to another process")
        row = self._ledger.one("select token from allocations where id = ?", region.allocation)
        assert row is not None
        return region.device, _HANDLE.pack(_MEMORY, region.allocation, row[0]), region.nbytes, address - region.address

    def open_memory(self, device: str, handle: bytes, nbytes: int = 0) -> int:
        """Return the address here of another process's allocation, which has at least `nbytes`."""
        self.check(device)
        number, token = _unpack(handle, _MEMORY)
        row = self._ledger.one(
            "select device, process, start, nbytes, token, freed from allocations where id = ?", number
        )
        if row is None or row[4] != token:
            raise AcceleratorError("open: there is no such allocation")
        owner_device, process, start, size, _, freed = row
        if process == self.process:
            raise self._misuse("wrong_process", "open: a process cannot open its own handle")
        if owner_device != device:
            raise AcceleratorError(f"open: memory of {owner_device} on {device}")
        if freed or not self._ledger.lives(process):
            raise AcceleratorError("open: the memory was freed, or its process has ended")
        if nbytes > size:
            raise AcceleratorError(f"open: the allocation has {size} bytes, not {nbytes}")
        with self._lock:
            return self._space.map(device, start, size, number)

    def close_memory(self, address: int) -> None:
        with self._lock:
            self._space.unmap(address)

    # host memory

    def pin(self, offset: int, nbytes: int) -> None:
        """Register a slice of the host segment for copies."""
        with self._lock:
            self._pinned.append((offset, offset + nbytes))

    def unpin(self, offset: int, nbytes: int) -> None:
        with self._lock:
            self._pinned.remove((offset, offset + nbytes))

    # streams and events

    def stream(self, device: str) -> Stream:
        stream = self._new_stream(device)
        stream.row = self._ledger.insert("insert into streams(process) values(?)", self.process)
        return stream

    def _new_stream(self, device: str) -> Stream:
        self.check(device)
        with self._lock:
            seed = f"{self._seed}/{device}"
            stream = Stream(self.poison, device, next(self._numbers), seed, self._max_delay_s)
            self._streams = [each for each in self._streams if each.runs] + [stream]
            return stream

    def destroy_stream(self, stream: Stream) -> None:
        """End the stream once its queued work is done. Does not wait."""
        stream.end_later()
        self._ledger.run("delete from streams where id = ?", stream.row)

    def default_stream(self, device: str) -> Stream:
        return self._named_stream("default", device)

    def compute_stream(self, device: str) -> Stream:
        """Return a stream beside the default one, for slow work."""
        return self._named_stream("compute", device)

    def create_event(self, device: str, *, interprocess: bool = False) -> Event:
        self.check(device)
        if not interprocess:
            return Event(device)
        row = self._ledger.insert(
            "insert into events(device, process, token) values(?, ?, ?)", device, self.process, secrets.token_bytes(16)
        )
        return Event(device, row)

    def export_event(self, event: Event) -> bytes:
        if event.row is None or event.opened:
            raise AcceleratorError("export: this is no interprocess event of this process")
        row = self._ledger.one("select token from events where id = ?", event.row)
        assert row is not None
        return _HANDLE.pack(_EVENT, event.row, row[0])

    def open_event(self, device: str, handle: bytes) -> Event:
        self.check(device)
        number, token = _unpack(handle, _EVENT)
        row = self._ledger.one("select device, process, token, destroyed from events where id = ?", number)
        if row is None or row[2] != token or row[3]:
            raise AcceleratorError("open: there is no such event")
        if row[1] == self.process:
            raise self._misuse("wrong_process", "open: a process cannot open its own event")
        if row[0] != device:
            raise self._misuse("wrong_device", f"open: an event of {row[0]} on {device}")
        opening = self._ledger.insert("insert into openings(event, process) values(?, ?)", number, self.process)
        return Event(device, number, opening=opening)

    def destroy_event(self, event: Event) -> None:
        event.closed = True
        if event.row is not None and not event.opened:
            self._ledger.run("update events set destroyed = 1 where id = ?", event.row)
        if event.opening is not None:
            self._ledger.run("delete from openings where id = ?", event.opening)

    def record(self, event: Event, stream: Stream) -> None:
        """Record the event: it is reached once the stream has come to this point. Recording again replaces the former
        record."""
        self.check(stream.device)
        self._usable(event, stream.device, "record")
        if event.row is None:
            event.recorded += 1
            record = event.recorded
        else:
            with self._ledger.change():
                self._ledger.run("update events set recorded = recorded + 1, error = '' where id = ?", event.row)
                row = self._ledger.one("select recorded from events where id = ?", event.row)
            assert row is not None
            record = row[0]

        def reach() -> None:
            if self._poisoned:
                return
            error, stream.error = stream.error, ""
            if event.row is None:
                event.error, event.reached = error, record
            else:
                self._ledger.run("update events set reached = ?, error = ? where id = ?", record, error, event.row)

        stream.add(reach)

    def reached(self, event: Event) -> bool:
        """Return whether the event's last record was reached. Raises `AcceleratorError` with an error of the work
        before it, `Misuse` if it was never recorded."""
        self.check(event.device)
        self._usable(event, event.device, "query")
        recorded, reached, error, _ = self._state(event)
        if not recorded:
            raise self._misuse("never_recorded", "an event is asked for that was never recorded")
        if reached >= recorded and error:
            raise AcceleratorError(error)
        return bool(reached >= recorded)

    def wait(self, stream: Stream, event: Event) -> None:
        """Make later work of the stream begin once the event's last record was reached."""
        self.check(stream.device)
        self._usable(event, stream.device, "wait")
        recorded, _, _, owner = self._state(event)
        if not recorded:
            raise self._misuse("never_recorded", "a stream waits for an event that was never recorded")
        stream.add(
            lambda: wait_until_reached(
                lambda: self._state(event)[1] >= recorded, lambda: self._closed or not self._ledger.lives(owner)
            )
        )

    def hold(self, stream: Stream) -> Callable[[], None]:
        """Make later work of the stream begin once the returned function was called, in any thread. Never waits."""
        self.check(stream.device)
        return stream.hold_behind(lambda: self._closed)

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
            spans, regions = self._space.spans(addresses, length, stream.device, what)
            pinned = merged(iter(self._pinned))
            for offset in {min(offsets, default=0), max(offsets, default=0)}:
                if not any(low <= offset and offset + length <= high for low, high in pinned):
                    raise self._misuse("not_pinned", f"{what}: host memory at {offset} is not registered")
            at = [self._space.offset(address, what) for address in addresses]
        queued = self._ledger.queue(
            stream.device, self.process, stream.number, writes=not to_host, what=what, spans=spans
        )

        def run() -> None:
            try:
                self._begin(stream.device, queued, what)
                memory = self._space.bytes_of(stream.device)
                for number, (device_at, host_at) in enumerate(zip(at, offsets, strict=True)):
                    if number == len(at) // 2:
                        self._in_the_middle(stream.device)
                    for region in regions:
                        if number % 256 == 0:
                            self._space.check_live(region, what)
                    if to_host:
                        host[host_at : host_at + length] = memory[device_at : device_at + length]
                    else:
                        memory[device_at : device_at + length] = host[host_at : host_at + length]
            finally:
                self._ledger.finished(queued)

        stream.add(run)

    def write(self, address: int, data: bytes, stream: Stream | None = None) -> None:
        """Queue a write by a kernel of the engine; without a stream wait for it."""
        self._kernel(address, len(data), stream, lambda memory, at: memory.__setitem__(slice(at, at + len(data)), data))

    def read(self, address: int, nbytes: int) -> bytes:
        """Return the bytes that a kernel of the engine reads there, after all work in the default stream. Waits for
        it."""
        return self.read_later(address, nbytes, None)[0]

    def read_later(self, address: int, nbytes: int, stream: Stream | None) -> list[bytes]:
        """Queue such a read: the list has the bytes once it is done. Without a stream wait for it."""
        found: list[bytes] = []
        self._kernel(address, nbytes, stream, lambda memory, at: found.append(memory[at : at + nbytes]), writes=False)
        return found

    def _kernel(self, address, nbytes, stream, work, *, writes=True) -> None:  # type: ignore[no-untyped-def]
        what = f"a {'write' if writes else 'read'} by a kernel"
        with self._lock:
            region = self._space.region(address, what)
            target = stream or self.default_stream(region.device)
            self.check(region.device)
            spans, _ = self._space.spans([address], nbytes, target.device, what)

        def enter() -> int:
            return self._ledger.queue(region.device, self.process, target.number, writes=writes, what=what, spans=spans)

        # Behind a hold, its turn comes after all work queued before the release.
        entered = None if target.held else enter()

        def run() -> None:
            queued = enter() if entered is None else entered
            try:
                self._begin(region.device, queued, what)
                self._space.check_live(region, what)
                work(self._space.bytes_of(region.device), spans[0][0])
            finally:
                self._ledger.finished(queued)

        target.add(run)
        if stream is None:
            target.synchronize()

    def _named_stream(self, name: str, device: str) -> Stream:
        with self._lock:
            if (name, device) not in self._named:
                self._named[name, device] = self._new_stream(device)
            return self._named[name, device]

    def _begin(self, device: str, queued: int, what: str) -> None:
        """Check, at the beginning of every piece of work, that its turn has come."""
        self.check(device)
        other = self._ledger.conflict(queued)
        if other:
            raise self._misuse("unordered", f"{what} runs before {other} is done, which was queued earlier")

    def _in_the_middle(self, device: str) -> None:
        """The point at which injected faults happen."""
        if self._ledger.take_fault("copy_fails", device):
            raise AcceleratorError("an injected fault: the copy failed")
        if self._ledger.take_fault("poison", device):
            raise ContextLost("an injected fault: the context is poisoned")
        released = self._ledger.one("select value from settings where name = 'released'")
        if self._ledger.take_fault("hold", device):
            while self._ledger.one("select value from settings where name = 'released'") == released:
                if self._closed:
                    raise AcceleratorError("the runtime was closed")
                time.sleep(_HOLD_POLL_S)

    def _state(self, event: Event) -> tuple[int, int, str, int]:
        """Return the records, the records reached, the error before the last one, and the process that owns the
        event."""
        if event.row is None:
            return event.recorded, event.reached, event.error, self.process
        row = self._ledger.one(
            "select recorded, reached, error, process, destroyed from events where id = ?", event.row
        )
        if row is None or row[4]:
            raise self._misuse("use_after_free", "an event is used that its process has destroyed")
        return row[0], row[1], row[2], row[3]

    def _usable(self, event: Event, device: str, what: str) -> None:
        if event.closed:
            raise self._misuse("use_after_close", f"{what}: the event was closed here")
        if event.device != device:
            raise self._misuse("wrong_device", f"{what}: an event of {event.device} on {device}")

    def _misuse(self, kind: str, text: str) -> Misuse:
        self._ledger.violated(self.process, kind, text)
        return Misuse(kind, text)


def _unpack(handle: bytes, kind: bytes) -> tuple[int, bytes]:
    try:
        found, number, token = _HANDLE.unpack(handle)
    except struct.error:
        found, number, token = b"", 0, b""
    if found != kind:
        raise AcceleratorError("open: this is no handle of this kind")
    return number, token
