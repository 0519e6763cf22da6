"""The copier, a separate process: one device, one driver, one thread that copies and listens to the server.

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

from kvf_devices import messages as m
from kvf_devices.driver import CopierDriver, DeviceOptions
from kvf_devices.handles import read_handles
from kvframework.api.copy_plans import CopyBatch, CopyPlanner
from kvframework.api.process import LogForm, configure_logging, end_logging, end_with_parent
from kvframework.api.transport import Arena
from kvframework.errors import DeviceError, DeviceLost, KVFrameworkError

log = logging.getLogger(__name__)

THREADS = 4


class Pinning:
    """Registers all `size` bytes of the arena with the device: slice by slice, several at once, from `start` on in the
    background, during the first copies."""

    def __init__(self, driver: CopierDriver[Any, Any], size: int, slice_bytes: int = 0) -> None:
        self._driver = driver
        self._slice = slice_bytes or m.SLICE_BYTES
        self._size = size
        self._usable = 0
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
        try:
            with ThreadPoolExecutor(THREADS) as threads:
                for end in threads.map(self._pin, range(0, self._size, self._slice)):
                    self._usable = end
        except DeviceError as error:
            self._error = error
        except Exception as error:
            # Otherwise copies would wait for it for ever.
            log.exception("pinning the server's memory failed")
            self._error = DeviceError(f"the server's memory could not be pinned: {type(error).__name__}: {error}")

    def _pin(self, start: int) -> int:
        end = min(start + self._slice, self._size)
        self._driver.pin(start, end - start)
        return end


@dataclass(eq=False)
class Job:
    """One copy. `event` is the engine's, opened (None: nothing to wait for); `end` is the highest byte of the arena;
    `launched` of its batches are under way."""

    number: int
    context: int
    is_store: bool
    batches: Iterator[CopyBatch]
    event: Any
    end: int
    error: KVFrameworkError | None = None
    cancelled: bool = False
    waited: bool = False
    launched: int = 0
    upcoming: CopyBatch | None = None
    exhausted: bool = False

    def advance(self) -> None:
        """Prepare the next batch, one ahead, so that a job ends with its last one."""
        self.upcoming = next(self.batches, None)
        self.exhausted = self.upcoming is None

    @property
    def stopped(self) -> bool:
        return self.exhausted or self.cancelled or self.error is not None


@dataclass(eq=False)
class _Launch:
    job: Job
    event: Any
    nbytes: int
    started: float


class _Direction:
    """Loads or stores of the device: a stream, a bound of bytes and a pace, so that neither waits for the other.

    With `bytes_per_s` (0: no bound) a launch waits until the time of those before it has passed. Idle time gives no
    credit, and a launch of any size may begin when none is pending: within any time t at most `bytes_per_s` x t bytes
    and one launch begin.
    """

    def __init__(self, stream: Any, limit: int, bytes_per_s: int) -> None:
        self.stream = stream
        self.jobs: deque[Job] = deque()
        self.launches: deque[_Launch] = deque()
        self._limit = limit
        self._bytes_per_s = bytes_per_s
        self._in_flight = 0
        self._paid = 0.0

    @property
    def busy(self) -> bool:
        return bool(self.jobs or self.launches)

    def left(self, now: float) -> float:
        """Return the seconds until the pace admits the next launch."""
        return max(self._paid - now, 0.0)

    def has_room(self, now: float) -> bool:
        return self._in_flight < self._limit and not self.left(now)

    def launched(self, launch: _Launch) -> None:
        self.launches.append(launch)
        launch.job.launched += 1
        self._in_flight += launch.nbytes
        if self._bytes_per_s:
            self._paid = max(self._paid, launch.started) + launch.nbytes / self._bytes_per_s

    def collected(self) -> _Launch:
        """Take the oldest launch, which has ended."""
        launch = self.launches.popleft()
        launch.job.launched -= 1
        self._in_flight -= launch.nbytes
        return launch


class Launcher:
    """All jobs of one device: they wait for their events, launches for room. A job whose event is not reached delays no
    other. `done(job)` is called once for each, when its launches are done, also after a cancel or an error; `clock` is
    monotonic seconds."""

    def __init__(
        self,
        driver: CopierDriver[Any, Any],
        *,
        limit: int,
        pace: int = 0,
        usable: Callable[[], int],
        done: Callable[[Job], None],
        clock: Callable[[], float],
    ) -> None:
        self._driver = driver
        self._usable = usable
        self._done = done
        self._clock = clock
        self._spare: list[Any] = []
        self._loads = _Direction(driver.create_stream(loads=True), limit, pace)
        self._stores = _Direction(driver.create_stream(loads=False), limit, pace)

    @property
    def busy(self) -> bool:
        """Whether `step` has any work."""
        return self._loads.busy or self._stores.busy

    def rest_s(self) -> float:
        """Return the seconds for which `step` has no work unless it gets a new job or a cancel: all remaining work
        waits for its pace."""
        now = self._clock()
        waiting = [each for each in (self._loads, self._stores) if each.busy]
        return min((0.0 if each.launches else each.left(now) for each in waiting), default=0.0)

    def oldest_s(self) -> float:
        """Return how long the oldest launch has been under way, in seconds."""
        now = self._clock()
        return max((now - each.launches[0].started for each in (self._loads, self._stores) if each.launches), default=0)

    def add(self, job: Job) -> None:
        (self._stores if job.is_store else self._loads).jobs.append(job)

    def cancel(self, *, number: int | None = None, context: int | None = None) -> None:
        """Cancel a job, or all of an instance: it launches nothing more, and ends with its launches under way."""
        for job in self._jobs():
            if job.number == number or job.context == context:
                job.cancelled = True

    def holds(self, context: int) -> bool:
        """Return whether a job of this instance is not done."""
        return any(job.context == context for job in self._jobs())

    def step(self) -> bool:
        """Take completed launches and start those that there is room for; return whether anything has changed. Raises
        `DeviceLost`; other errors end their job."""
        changed = False
        for direction in (self._loads, self._stores):
            changed |= self._collect(direction)
            changed |= self._launch(direction)
            changed |= self._finish(direction)
        return changed

    def _jobs(self) -> Iterator[Job]:
        yield from self._loads.jobs
        yield from self._stores.jobs

    def _collect(self, direction: _Direction) -> bool:
        changed = False
        while direction.launches:
            launch = direction.launches[0]
            try:
                if not self._driver.reached(launch.event):
                    break
            except DeviceLost:
                raise
            except DeviceError as error:
                # The stream has passed it, or the driver could not tell.
                launch.job.error = launch.job.error or error
            self._spare.append(direction.collected().event)
            changed = True
        return changed

    def _launch(self, direction: _Direction) -> bool:
        changed = False
        for job in list(direction.jobs):
            if not job.stopped and self._is_ready(job):
                changed |= self._launch_job(direction, job)
                if not direction.has_room(self._clock()):
                    break
        return changed

    def _is_ready(self, job: Job) -> bool:
        if job.launched:
            return True
        if job.end > self._usable():
            return False
        try:
            return job.event is None or self._driver.reached(job.event)
        except DeviceLost:
            raise
        except DeviceError as error:
            job.error = error
            return False

    def _launch_job(self, direction: _Direction, job: Job) -> bool:
        changed = False
        if job.upcoming is None:
            job.advance()
            changed = job.exhausted
        while not job.stopped and direction.has_room(self._clock()):
            batch = job.upcoming
            assert batch is not None
            job.advance()
            changed = True
            event = None
            try:
                event = self._spare.pop() if self._spare else self._driver.create_event()
                if job.event is not None and not job.waited:
                    self._driver.wait(direction.stream, job.event)
                    job.waited = True
                self._driver.copy(direction.stream, batch, to_arena=job.is_store)
            except DeviceLost:
                raise
            except DeviceError as error:
                job.error = error
            if event is None:
                break
            # Also after a failed launch, which may have begun: the job ends only once the stream has passed it.
            self._driver.record(event, direction.stream)
            direction.launched(_Launch(job, event, batch.nbytes, self._clock()))
        return changed

    def _finish(self, direction: _Direction) -> bool:
        ended = [job for job in direction.jobs if job.stopped and not job.launched]
        for job in ended:
            direction.jobs.remove(job)
            self._done(job)
        return bool(ended)


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
        self._frames = m.Frames()
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
        self.send(m.Ready())
        self._flush()
        self._pinned.start()
        wait = SHORTEST_WAIT_S
        while True:
            busy = self._launcher.busy or bool(self._opening) or bool(self._closing)
            rest = max(wait, min(self._launcher.rest_s(), BEAT_S)) if busy else BEAT_S
            # Not `poll`, whose timeout is in whole milliseconds.
            if select.select([self._sock], [], [], rest)[0]:
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

    def send(self, message: m.FromCopier) -> None:
        self._outbox.append(m.framed(message))

    def _flush(self) -> None:
        if self._outbox:
            data, self._outbox = b"".join(self._outbox), []
            self._sock.sendall(data)

    def _beat(self) -> None:
        now = time.monotonic()
        if (self._launcher.busy or self._opening) and now >= self._next_beat:
            self._next_beat = now + BEAT_S
            self.send(m.Beat(self._launcher.oldest_s()))

    def _tell_lacks(self) -> None:
        """Before the answer to the open that found them."""
        lacks = tuple(self._driver.lacks())
        if lacks != self._lacks:
            self._lacks = lacks
            self.send(m.Lacks(lacks))

    def _receive(self) -> bool:
        data, fds, _, _ = socket.recv_fds(self._sock, _RECEIVE, 16)
        for fd in fds:
            self._fds.append(_moved_up(fd))
        if not data:
            return False
        for payload in self._frames.feed(data):
            self._handle(m.to_copier(payload))
        return True

    def _handle(self, message: m.ToCopier) -> None:
        if isinstance(message, m.Copy):
            self._copy(message)
        elif isinstance(message, m.Cancel):
            self._launcher.cancel(number=message.job)
        elif isinstance(message, m.Open):
            self._open(message)
        elif isinstance(message, m.Close):
            self._launcher.cancel(context=message.context)
            self._opening.discard(message.context)
            self._closing.add(message.context)

    def _open(self, message: m.Open) -> None:
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
            self.send(m.Opened(message.context, m.Failure.of(error)))
            return
        self._instances[message.context] = _Instance(planner, addresses, alive)
        self._opening.add(message.context)

    def _answer_opens(self) -> None:
        """Answer only once a part of the arena is pinned: where none can be, no engine may choose this transport."""
        if self._opening and self._pinned.usable() > 0:
            for context in self._opening:
                self.send(m.Opened(context))
            self._opening.clear()

    def _close_memory(self, addresses: list[int], alive_fd: int | None) -> None:
        _close_each(self._driver.close_memory, addresses, "memory")
        if alive_fd is not None:
            os.close(alive_fd)

    def _copy(self, message: m.Copy) -> None:
        instance = self._instances.get(message.context)
        if instance is None or message.context in self._closing:
            self.send(m.Done(message.job, False))
            return
        try:
            ranges = m.ranges_of(message)
            batches = instance.planner.plan(ranges, m.blocks_of(message), message.skip_tokens)
            if message.event and message.event not in instance.events:
                instance.events[message.event] = self._driver.open_event(message.event)
        except DeviceLost:
            raise
        except KVFrameworkError as error:
            self.send(m.Done(message.job, False, m.Failure.of(error)))
            return
        self._launcher.add(
            Job(
                message.job,
                message.context,
                message.is_store,
                _split(batches, self._launch_bytes),
                instance.events.get(message.event),
                max((place.offset + place.length for place in ranges), default=0),
            )
        )

    def _done(self, job: Job) -> None:
        ok = job.error is None and (not job.cancelled or job.exhausted)
        self.send(m.Done(job.number, ok, m.Failure.of(job.error) if job.error is not None else None))

    def _close_idle(self) -> None:
        for context in [each for each in self._closing if not self._launcher.holds(each)]:
            self._closing.discard(context)
            instance = self._instances.pop(context, None)
            if instance is not None:
                _close_each(self._driver.destroy_event, instance.events.values(), "an event")
                self._close_memory(instance.addresses, instance.alive_fd)
            self.send(m.Closed(context))


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


# The form for a server that sends none, such as one in a test.
_LOG = LogForm("warning", "human")


def main(arguments: list[str]) -> int:
    """Run the copier, until the parent-death signal, the end of the socket, or the loss of its device. `arguments` are
    the numbers of the socket's and of the arena's descriptor. Returns the exit status."""
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
        lost = m.Lost(m.Failure.of(error))
    except Exception as error:
        log.exception("the copier of %s failed", start.device)
        lost = m.Lost(m.Failure(DeviceLost.code, f"{type(error).__name__}: {error}"))
    with contextlib.suppress(OSError):
        sock.sendall(m.framed(lost))
    # Not by the interpreter's exit: a lost device may hang in a library's exit handler.
    end_logging()
    os._exit(1)


def _first(sock: socket.socket) -> m.Start:
    """Read the first message, and not a byte more. Raises `EOFError`."""
    head = sock.recv(m.FRAME_HEAD.size, socket.MSG_WAITALL)
    if len(head) < m.FRAME_HEAD.size:
        raise EOFError
    (size,) = m.FRAME_HEAD.unpack(head)
    start = m.to_copier(sock.recv(size, socket.MSG_WAITALL))
    assert isinstance(start, m.Start)
    return start


def _work(sock: socket.socket, arena_fd: int, start: m.Start) -> int:
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
