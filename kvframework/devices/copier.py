"""The copier, a process of its own: one device, one driver, one thread that copies and listens to the server.

It returns at the end of the server, and raises once its device is lost: a poisoned context is never used again.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import logging
import mmap
import os
import select
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from kvframework.api.copy_plans import CopyPlanner
from kvframework.api.driver import Arena, CopierDriver, CopyBatch, DeviceOptions
from kvframework.devices.handles import read_handles
from kvframework.devices.launching import Job, Launcher
from kvframework.devices.messages import (
    FRAME_HEAD,
    SLICE_BYTES,
    Beat,
    Cancel,
    Close,
    Closed,
    Copy,
    Done,
    Failure,
    Frames,
    FromCopier,
    Lacks,
    Lost,
    Open,
    Opened,
    Ready,
    Start,
    ToCopier,
    blocks_of,
    framed,
    ranges_of,
    to_copier,
)
from kvframework.errors import DeviceError, DeviceLost, KVFrameworkError
from kvframework.logs.form import LogForm, configure_logging, end_logging
from kvframework.supervise.child import end_with_parent

# The registration of the arena with the device: slice by slice, several at once, during the first copies.
#
# In the copier process, in threads of its own.

log = logging.getLogger(__name__)

THREADS = 4


class Pinning:
    """Registers all `size` bytes of the arena, from `start` on in the background."""

    def __init__(self, driver: CopierDriver[Any, Any], size: int, slice_bytes: int = 0) -> None:
        self._driver = driver
        self._slice = slice_bytes or SLICE_BYTES
        self._starts = list(range(0, size, self._slice))
        self._size = size
        self._done = [False] * len(self._starts)
        self._usable = 0
        self._lock = threading.Lock()
        self._error: DeviceError | None = None

    def start(self) -> None:
        threading.Thread(target=self._run, name="kvf-pin", daemon=True).start()

    def usable(self) -> int:
        """The number of bytes that are registered, from the arena's beginning."""
        return self._usable

    def check(self) -> None:
        """Raise the error at which pinning failed, if any."""
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        with ThreadPoolExecutor(THREADS) as threads:
            for _ in threads.map(self._pin, range(len(self._starts))):
                pass

    def _pin(self, index: int) -> None:
        start = self._starts[index]
        try:
            self._driver.pin(start, min(self._slice, self._size - start))
        except DeviceError as error:
            self._error = error
            return
        except Exception as error:
            # Otherwise copies would wait for it for ever.
            log.exception("pinning the arena failed")
            self._error = DeviceError(f"the arena could not be pinned: {type(error).__name__}: {error}")
            return
        with self._lock:
            self._done[index] = True
            first_missing = self._done.index(False) if False in self._done else len(self._done)
            self._usable = max(self._usable, min(first_missing * self._slice, self._size))


BEAT_S = 0.5
# With the smallest fragments, a launch of the allowed bytes would take a driver seconds.
LAUNCH_FRAGMENTS = 1 << 16
# Sleeps of the loop while copies are under way: first the shortest, then longer ones.
SHORTEST_WAIT_S, LONGEST_WAIT_S = 0.00005, 0.001
# A high number, so that it is closed after every descriptor through which an engine's memory could still be written.
ALIVE_FD = 1 << 10
_RECEIVE = 1 << 18


@dataclass(eq=False)
class _Instance:
    """One engine's memory, open. `events` maps the handles of its events to the opened events."""

    planner: CopyPlanner
    addresses: list[int]
    alive_fd: int | None
    events: dict[bytes, Any] = field(default_factory=dict)


class Copier:
    """The process's work, until the socket ends."""

    def __init__(
        self,
        sock: socket.socket,
        driver: CopierDriver[Any, Any],
        options: DeviceOptions,
        size: int,
        slice_bytes: int = 0,
    ) -> None:
        self._sock = sock
        self._driver = driver
        self._launch_bytes = options.launch
        self._instances: dict[int, _Instance] = {}
        self._opening: set[int] = set()
        self._closing: set[int] = set()
        self._frames = Frames()
        self._fds: deque[int] = deque()
        self._outbox: list[bytes] = []
        self._next_beat = 0.0
        self._lacks: tuple[str, ...] = ()
        self._pinned = Pinning(driver, size, slice_bytes)
        self._launcher = Launcher(
            driver,
            limit=options.in_flight,
            pace=options.pace,
            usable=self._pinned.usable,
            done=self._done,
            clock=time.monotonic,
        )

    def run(self) -> None:
        """Run until the server has ended. Raises `DeviceLost`."""
        self.send(Ready())
        self._flush()
        self._pinned.start()
        wait = SHORTEST_WAIT_S
        while True:
            busy = self._launcher.busy or bool(self._opening) or bool(self._closing)
            # Not `poll`, whose timeout is in whole milliseconds.
            if select.select([self._sock], [], [], self._rest(wait) if busy else BEAT_S)[0]:
                if not self._receive():
                    return
                wait = SHORTEST_WAIT_S
            self._pinned.check()
            self._tell_lacks()
            self._answer_opens()
            wait = SHORTEST_WAIT_S if self._launcher.step() else min(wait * 2, LONGEST_WAIT_S)
            self._close_idle()
            self._beat()
            self._flush()

    def _rest(self, wait: float) -> float:
        return max(wait, min(self._launcher.rest_s(), BEAT_S))

    def send(self, message: FromCopier) -> None:
        self._outbox.append(framed(message))

    def _flush(self) -> None:
        if self._outbox:
            data, self._outbox = b"".join(self._outbox), []
            self._sock.sendall(data)

    def _beat(self) -> None:
        now = time.monotonic()
        if (self._launcher.busy or self._opening) and now >= self._next_beat:
            self._next_beat = now + BEAT_S
            self.send(Beat(self._launcher.oldest_s()))

    def _tell_lacks(self) -> None:
        """Before the answer to the open that found them."""
        lacks = tuple(self._driver.lacks())
        if lacks != self._lacks:
            self._lacks = lacks
            self.send(Lacks(lacks))

    def _receive(self) -> bool:
        data, fds, _, _ = socket.recv_fds(self._sock, _RECEIVE, 16)
        for fd in fds:
            self._fds.append(_moved_up(fd))
        if not data:
            return False
        for payload in self._frames.feed(data):
            self._handle(to_copier(payload))
        return True

    def _handle(self, message: ToCopier) -> None:
        if isinstance(message, Copy):
            self._copy(message)
        elif isinstance(message, Cancel):
            self._launcher.cancel(message.job)
        elif isinstance(message, Open):
            self._open(message)
        elif isinstance(message, Close):
            self._launcher.cancel_context(message.context)
            self._opening.discard(message.context)
            self._closing.add(message.context)

    def _open(self, message: Open) -> None:
        alive = self._fds.popleft() if message.alive else None
        addresses: list[int] = []
        try:
            memory = read_handles(message.handles, message.layout, message.desc)
            for allocation in memory.allocations:
                addresses.append(self._driver.open(allocation))
            planner = CopyPlanner(message.layout.groups, message.desc, memory.opened_at(addresses))
        except DeviceLost:
            raise
        except KVFrameworkError as error:
            self._close_memory(addresses, alive)
            self.send(Opened(message.context, Failure.of(error)))
            return
        self._instances[message.context] = _Instance(planner, addresses, alive)
        self._opening.add(message.context)

    def _answer_opens(self) -> None:
        """Answer only once a part of the arena is pinned: where none can be, no engine may choose this transport."""
        if self._opening and self._pinned.usable() > 0:
            for context in self._opening:
                self.send(Opened(context))
            self._opening.clear()

    def _close_memory(self, addresses: list[int], alive_fd: int | None) -> None:
        _close_each(self._driver.close_memory, addresses, "memory")
        if alive_fd is not None:
            os.close(alive_fd)

    def _copy(self, message: Copy) -> None:
        instance = self._instances.get(message.context)
        if instance is None or message.context in self._closing:
            self.send(Done(message.job, False))
            return
        try:
            ranges = ranges_of(message)
            batches = instance.planner.plan(ranges, blocks_of(message), message.skip_tokens)
            event = self._event(instance, message.event)
        except DeviceLost:
            raise
        except KVFrameworkError as error:
            self.send(Done(message.job, False, Failure.of(error)))
            return
        self._launcher.add(
            Job(
                message.job,
                message.context,
                message.is_store,
                _split(batches, self._launch_bytes),
                event,
                max((place.offset + place.length for place in ranges), default=0),
            )
        )

    def _event(self, instance: _Instance, handle: bytes) -> Any:
        if not handle:
            return None
        if handle not in instance.events:
            instance.events[handle] = self._driver.open_event(handle)
        return instance.events[handle]

    def _done(self, job: Job) -> None:
        error = job.error
        if error is not None:
            self.send(Done(job.number, False, Failure.of(error)))
        else:
            self.send(Done(job.number, not job.cancelled or job.exhausted))

    def _close_idle(self) -> None:
        for context in [each for each in self._closing if not self._launcher.holds(each)]:
            self._closing.discard(context)
            instance = self._instances.pop(context, None)
            if instance is not None:
                _close_each(self._driver.destroy_event, instance.events.values(), "an event")
                self._close_memory(instance.addresses, instance.alive_fd)
            self.send(Closed(context))


def _split(batches: Iterable[CopyBatch], limit: int) -> Iterator[CopyBatch]:
    for batch in batches:
        yield from batch.split(min(limit, batch.run * LAUNCH_FRAGMENTS))


def _close_each(close: Callable[[Any], None], things: Iterable[Any], what: str) -> None:
    """Close every thing, also after an error of one; raises `DeviceLost`."""
    for each in things:
        try:
            close(each)
        except DeviceLost:
            raise
        except DeviceError as error:
            log.warning("%s could not be closed: %s", what, error)


def _moved_up(fd: int) -> int:
    try:
        high = fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, ALIVE_FD)
    except OSError:
        return fd  # the limit of descriptors is lower
    os.close(fd)
    return high


# The copier process: its start, and its end with the server in every case.
#
# Started by `kvframework.devices.supervisor`. The parent-death signal, the end of the socket, and the loss of its
# device end it.

# The form for a server that sends none, such as one in a test.
_LOG = LogForm("warning", "human")


def main(arguments: list[str]) -> int:
    """Run the copier. `arguments` are the numbers of the socket's and of the arena's descriptor. Returns the exit
    status."""
    end_with_parent()
    # The lowest free number: `select` takes none above 1023.
    sock = socket.socket(fileno=os.dup(int(arguments[0])))
    os.close(int(arguments[0]))
    arena_fd = int(arguments[1])
    try:
        start = _first(sock)
    except EOFError:
        return 0
    configure_logging(*start.log or _LOG)
    try:
        return _work(sock, arena_fd, start)
    except (BrokenPipeError, ConnectionResetError):
        return 0
    except KVFrameworkError as error:
        lost = Lost(Failure.of(error))
    except Exception as error:
        log.exception("the copier of %s failed", start.device)
        lost = Lost(Failure(DeviceLost.code, f"{type(error).__name__}: {error}"))
    with contextlib.suppress(OSError):
        sock.sendall(framed(lost))
    # Not by the interpreter's exit: a lost device may hang in a library's exit handler.
    end_logging()
    os._exit(1)


def _first(sock: socket.socket) -> Start:
    """Read the first message, and not a byte more. Raises `EOFError`."""
    frames, wanted = Frames(), FRAME_HEAD
    while True:
        data = sock.recv(wanted, socket.MSG_WAITALL)
        if not data:
            raise EOFError
        for payload in frames.feed(data):
            start = to_copier(payload)
            assert isinstance(start, Start)
            return start
        wanted = frames.missing


def _work(sock: socket.socket, arena_fd: int, start: Start) -> int:
    create, options = start.create.resolve()
    segment = mmap.mmap(arena_fd, 0)
    os.close(arena_fd)
    view = memoryview(segment)
    address = ctypes.addressof(ctypes.c_char.from_buffer(segment))
    driver = create(options, start.device, Arena(view, address))
    Copier(sock, driver, options, len(view), start.slice_bytes).run()
    # The mappings end with the process, at once.
    end_logging()
    os._exit(0)
