"""One device's copier process as the server sees it: its start, its end, and the requests to it.

One thread per device starts the process, talks to it and reaps it; all calls from the serving thread only add to an
outbox. Requests that a process left unanswered fail, but never before it is reaped: until then it might write.
"""

from __future__ import annotations

import logging
import os
import select
import socket
import subprocess
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from kvframework.api.futures import Future, Promise
from kvframework.api.layout import KVLayout, MemoryLayoutDesc
from kvframework.api.transport import CopyJob
from kvframework.child_process import Backoff, reap, start_child, why_ended
from kvframework.devices.messages import (
    Beat,
    Cancel,
    Close,
    Closed,
    Done,
    Frames,
    FromCopier,
    Lacks,
    Lost,
    Open,
    Opened,
    Ready,
    Start,
    ToCopier,
    copy_message,
    framed,
    from_copier,
)
from kvframework.errors import DeviceLost, KVFrameworkError

_RECEIVE = 1 << 18


@dataclass(eq=False)
class SpawnedCopier:
    """A running copier process. `heard` is the time of its last message, `oldest_s` the age of its oldest launch in
    that message, `lost` the error of its last message, if it sent one."""

    popen: subprocess.Popen[bytes]
    sock: socket.socket
    heard: float
    lost: KVFrameworkError | None = None
    oldest_s: float = 0.0

    @classmethod
    def start(cls, arena_fd: int) -> SpawnedCopier:
        """Start a process; borrows `arena_fd`. Raises the errors of `subprocess.Popen`."""
        popen, ours = start_child("kvframework.devices.copier", arena_fd)
        ours.setblocking(False)
        return cls(popen, ours, time.monotonic())

    def receive(self) -> bytes | None:
        """Return the received bytes; None at the end."""
        try:
            return self.sock.recv(_RECEIVE) or None
        except BlockingIOError:
            return b""
        except OSError:
            return None

    def reap(self) -> None:
        """Kill the process and return once it touches no memory any more: at once, unless a driver holds it in the
        kernel."""
        self.sock.close()
        if self.lost is None:
            self.popen.kill()
        reap(self.popen)


log = logging.getLogger(__name__)

START_S = 30.0
TICK_S = 0.5


@dataclass(eq=False)
class CopierInstance:
    """One engine's memory at the copier. `failure` is set, once, when it is lost or could not be opened; `closed` is
    resolved once none of it is mapped any more, for any reason."""

    number: int
    opened: Promise[None] = field(default_factory=lambda: Promise(lambda: None))
    closed: Promise[None] = field(default_factory=lambda: Promise(lambda: None))
    failure: KVFrameworkError | None = None
    asked: float | None = field(default_factory=time.monotonic)  # when an open or a close was requested; None: answered


@dataclass(eq=False)
class _Pending:
    future: Promise[bool]
    asked: float = field(default_factory=time.monotonic)


class CopierSupervisor:
    """The copier of one device. Starts a process when an instance is opened and none is running, with a backoff after a
    death. `start` is the process's first message; `arena_fd` is borrowed until the end of `join`."""

    def __init__(self, start: Start, arena_fd: int, *, stall_s: float) -> None:
        self.device = start.device
        self._start = start
        self._arena_fd = arena_fd
        self._stall_s = stall_s
        self._lock = threading.Lock()
        self._outbox: deque[tuple[bytes, int | None]] = deque()
        self._instances: dict[int, CopierInstance] = {}
        self._pending: dict[int, _Pending] = {}
        self._numbers = 0
        self._backoff = Backoff()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._closing = False
        self.pid: int | None = None
        self.starts = 0
        self.last_error = ""
        self.lacks: tuple[str, ...] = ()
        self._told_lacks: set[str] = set()
        self._thread = threading.Thread(target=self._run, name=f"kvf-copier-{start.device[:8]}", daemon=True)
        self._thread.start()

    @property
    def idle(self) -> bool:
        """Whether there is neither a process nor an instance: `close` would not wait."""
        with self._lock:
            return self.pid is None and not self._instances and not self._pending

    def status(self) -> dict[str, object]:
        """Return the device's part of the status document. From any thread."""
        with self._lock:
            return {
                "device": self.device,
                "pid": self.pid,
                "starts": self.starts,
                "instances": len(self._instances),
                "copies": len(self._pending),
                "last_error": self.last_error,
                "lacks": list(self.lacks),
            }

    # the serving thread, and any thread that cancels

    def open(
        self, layout: KVLayout, desc: MemoryLayoutDesc, handles: Sequence[bytes], alive_fd: int | None
    ) -> CopierInstance:
        """Request the opening of an engine's memory; takes over `alive_fd`, which the copier keeps open until the
        instance is closed."""
        with self._lock:
            self._numbers += 1
            instance = CopierInstance(self._numbers)
            if self._closing:
                self._refuse(instance, alive_fd, DeviceLost("the server is stopping"))
                return instance
            self._instances[instance.number] = instance
            message = Open(instance.number, layout, desc, tuple(handles), alive_fd is not None)
            self._send(message, alive_fd)
        return instance

    def copy(self, instance: CopierInstance, job: CopyJob) -> Future[bool]:
        """Start a copy. The future fails with `DeviceLost` if the process ends before the copy is done."""
        future: Promise[bool] = Promise(job.cancel)
        with self._lock:
            if instance.failure is not None:
                return Future.failed(instance.failure)
            self._numbers += 1
            number = self._numbers
            self._pending[number] = _Pending(future)
            self._send(copy_message(number, instance.number, job))
        job.on_cancel(lambda: self._cancel(number))
        return future

    def close_instance(self, instance: CopierInstance) -> None:
        """Request the end of the mappings once the launched copies are done. Never blocks."""
        with self._lock:
            if instance.failure is None and instance.number in self._instances:
                instance.asked = time.monotonic()
                self._send(Close(instance.number))
            instance.failure = instance.failure or DeviceLost("the instance was closed")

    def stop(self) -> None:
        """End the process; its requests fail once it has ended. Idempotent. Does not wait."""
        with self._lock:
            self._closing = True
        os.eventfd_write(self._wake, 1)

    def join(self, timeout_s: float) -> bool:
        """Wait, after `stop`, for the end of the process; False if a driver holds it in the kernel beyond `timeout_s`.
        It then keeps the arena mapped, and continues its writes, until the kernel releases it."""
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            log.error("the copier of %s, process %s, does not end: it is blocked in the kernel", self.device, self.pid)
        return not self._thread.is_alive()

    def _cancel(self, number: int) -> None:
        with self._lock:
            if number in self._pending:
                self._send(Cancel(number))

    def _send(self, message: ToCopier, fd: int | None = None) -> None:
        self._outbox.append((framed(message), fd))
        os.eventfd_write(self._wake, 1)

    # the supervisor's thread

    def _run(self) -> None:
        poller = select.poll()
        poller.register(self._wake, select.POLLIN)
        while not self._closing:
            if not self._outbox:
                poller.poll()
                self._drain()
                continue
            self._wait_out_backoff(poller)
            if not self._closing:
                self._one_process()
        self._fail_all(DeviceLost("the server is stopping"))

    def _wait_out_backoff(self, poller: select.poll) -> None:
        while (left := self._backoff.left(time.monotonic())) and not self._closing:
            poller.poll(left * 1000 + 1)
            self._drain()

    def _one_process(self) -> None:
        """Run one process from start to end, then fail its unanswered requests."""
        self._backoff.started(time.monotonic())
        try:
            process = SpawnedCopier.start(self._arena_fd)
        except Exception as error:  # noqa: BLE001  the thread has to go on: it answers the waiting callers
            self._backoff.ended(time.monotonic())
            self._fail_all(self._told(DeviceLost(f"the copier of {self.device} cannot be started: {error}")))
            return
        self.pid = process.popen.pid
        self.starts += 1
        self.lacks = ()
        log.info("the copier of %s is process %d, start %d", self.device, self.pid, self.starts)
        reason: KVFrameworkError
        try:
            reason = self._serve(process)
        except Exception as failure:
            log.exception("the connection to the copier of %s failed", self.device)
            reason = DeviceLost(f"the connection to the copier of {self.device} failed: {failure}")
        finally:
            process.reap()
            self.pid = None
        if not self._closing:
            self._backoff.ended(time.monotonic())
            self._told(reason)
        self._fail_all(reason)

    def _told(self, reason: KVFrameworkError) -> KVFrameworkError:
        self.last_error = reason.fact
        log.error("%s; its instances must register again", reason)
        return reason

    def _serve(self, process: SpawnedCopier) -> KVFrameworkError:
        """Serve until the process ends, must stop, or stalls; return the reason."""
        sock, frames, unsent = process.sock, Frames(), bytearray(framed(self._start))
        ready = False
        poller = select.poll()
        poller.register(self._wake, select.POLLIN)
        while True:
            poller.register(sock, select.POLLIN | (select.POLLOUT if unsent or (ready and self._outbox) else 0))
            happened = dict(poller.poll(TICK_S * 1000))
            self._drain()
            if self._closing:
                return DeviceLost("the server is stopping")
            if happened.get(sock.fileno(), 0) & ~select.POLLOUT:
                data = process.receive()
                if data is None:
                    break
                process.heard = time.monotonic()
                for payload in frames.feed(data):
                    ready |= self._hear(process, from_copier(payload))
            if not self._send_some(sock, unsent, ready):
                break
            stalled = self._stalled(process, ready)
            if stalled:
                return DeviceLost(f"the copier of {self.device} was killed: {stalled}")
        return process.lost or DeviceLost(f"the copier of {self.device} ended{why_ended(process.popen)}")

    def _send_some(self, sock: socket.socket, unsent: bytearray, ready: bool) -> bool:
        """Send as much as the socket takes; False if the other end has closed."""
        try:
            while True:
                if unsent:
                    del unsent[: sock.send(unsent)]
                    continue
                if not ready or not self._outbox:
                    return True
                data, fd = self._outbox.popleft()
                unsent += data
                if fd is not None:
                    try:
                        sent = socket.send_fds(sock, [unsent], [fd])
                    except OSError:
                        # Put both back, also if the other end has closed: the descriptor is closed with the other
                        # unsent ones.
                        unsent.clear()
                        self._outbox.appendleft((data, fd))
                        raise
                    os.close(fd)
                    del unsent[:sent]
        except BlockingIOError:
            return True
        except OSError:
            return False

    def _hear(self, process: SpawnedCopier, message: FromCopier) -> bool:
        """Handle one message; return True for the one that reports the device as open."""
        if isinstance(message, Done):
            with self._lock:
                pending = self._pending.pop(message.job, None)
            if pending is not None and message.failure is not None:
                pending.future.set_exception(message.failure.error())
            elif pending is not None:
                pending.future.set_result(message.ok)
        elif isinstance(message, Opened):
            with self._lock:
                instance = self._instances.get(message.context)
                if instance is not None and instance.failure is None:
                    instance.asked = None
                if instance is not None and message.failure is not None:
                    instance.failure = message.failure.error()
                    del self._instances[message.context]
            if instance is not None and message.failure is not None:
                log.error("the copier of %s could not open an engine's memory: %s", self.device, instance.failure)
                _end(instance, instance.failure)
            elif instance is not None:
                instance.opened.set_result(None)
        elif isinstance(message, Closed):
            with self._lock:
                instance = self._instances.pop(message.context, None)
            if instance is not None:
                _end(instance, instance.failure)
        elif isinstance(message, Lost):
            process.lost = message.failure.error()
            process.lost.fact = f"the copier of {self.device}: {process.lost.fact}"
        elif isinstance(message, Beat):
            process.oldest_s = message.oldest_s
        elif isinstance(message, Lacks):
            self._hear_lacks(message.what)
        return isinstance(message, Ready)

    def _hear_lacks(self, what: tuple[str, ...]) -> None:
        self.lacks = what
        for each in what:
            if each not in self._told_lacks:
                self._told_lacks.add(each)
                log.warning("the copier of %s goes without: %s", self.device, each)

    def _stalled(self, process: SpawnedCopier, ready: bool) -> str:
        """Return why the process has to be killed; "" if it need not be."""
        if process.oldest_s > self._stall_s:
            return f"a copy has taken {process.oldest_s:.1f} s"
        with self._lock:
            asked = [each.asked for each in self._instances.values() if each.asked is not None]
            asked += [each.asked for each in list(self._pending.values())[:1]]
        since = max(process.heard, min(asked)) if ready and asked else process.heard
        silent = time.monotonic() - since
        if silent > (self._stall_s if ready else START_S) and (asked or not ready):
            return f"it has sent no message for {silent:.1f} s"
        return ""

    def _fail_all(self, error: KVFrameworkError) -> None:
        """Fail all unanswered requests, after the end of the process."""
        with self._lock:
            instances, pending = list(self._instances.values()), list(self._pending.values())
            self._instances.clear()
            self._pending.clear()
            for _, fd in self._outbox:
                if fd is not None:
                    os.close(fd)
            self._outbox.clear()
            for instance in instances:
                instance.failure = instance.failure or error
        for each in pending:
            each.future.set_exception(error)
        for instance in instances:
            _end(instance, error)

    def _refuse(self, instance: CopierInstance, alive_fd: int | None, error: KVFrameworkError) -> None:
        if alive_fd is not None:
            os.close(alive_fd)
        instance.failure = error
        _end(instance, error)

    def _drain(self) -> None:
        try:
            os.eventfd_read(self._wake)
        except BlockingIOError:
            return

    def __del__(self) -> None:
        wake = getattr(self, "_wake", -1)
        if wake >= 0:
            os.close(wake)


def _end(instance: CopierInstance, error: KVFrameworkError | None) -> None:
    """Resolve the futures of the instance's opening and end."""
    instance.opened.set_exception(error or DeviceLost("the instance was closed"))
    instance.closed.set_result(None)
