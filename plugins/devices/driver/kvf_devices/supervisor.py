"""One device's copier process as the server sees it: its start, its end, and the requests to it."""

from __future__ import annotations

import logging
import math
import os
import select
import socket
import subprocess
import threading
import time
from collections import deque
from collections.abc import Sequence

from kvf_devices import messages as m
from kvframework.api.futures import Future, Promise
from kvframework.api.layout import KVLayout, MemoryLayoutDesc
from kvframework.api.process import LogLimit, SupervisedChild, start_connected
from kvframework.api.transport import CopyJob, ServerContext
from kvframework.errors import DeviceLost, KVFrameworkError

log = logging.getLogger(__name__)

START_S = 30.0
TICK_S = 0.5
_RECEIVE = 1 << 18


class CopierInstance(ServerContext):
    """One engine's memory at the copier. `lost` is set, once, when it is lost or could not be opened; `closed` is
    resolved once none of it is mapped any more, for any reason. `asked` is when its opening or its end was requested,
    None once that is answered."""

    def __init__(self, supervisor: CopierSupervisor, number: int) -> None:
        self._supervisor = supervisor
        self.number = number
        self.opened: Promise[None] = Promise(lambda: None)
        self.closed: Promise[None] = Promise(lambda: None)
        self.lost: KVFrameworkError | None = None
        self.asked: float | None = time.monotonic()

    def copy(self, job: CopyJob) -> Future[bool]:
        return self._supervisor.copy(self, job)

    def close(self) -> None:
        self._supervisor.close_instance(self)

    def when_closed(self) -> Future[None] | None:
        return self.closed

    def when_open(self) -> Future[None] | None:
        return self.opened

    def failure(self) -> KVFrameworkError | None:
        return self.lost

    def end(self, error: KVFrameworkError | None) -> None:
        """Resolve the futures of its opening and end."""
        self.opened.set_exception(error or DeviceLost("the instance was closed"))
        self.closed.set_result(None)


class CopierSupervisor(SupervisedChild):
    """The copier of one device. Starts a process when an instance is opened and none is running, with a back-off after
    a death. `start` is the process's first message; `arena_fd` is borrowed until the end of `join`.

    The calls of other threads only add to an outbox. Requests that a process left unanswered fail, but never before it
    is reaped: until then it might write."""

    def __init__(self, start: m.Start, arena_fd: int, *, stall_s: float) -> None:
        name = f"kvf-copier-{start.device[:8]}"
        super().__init__(f"the copier of {start.device}", thread=name, ready_s=START_S, stop_s=0.0)
        self.device = start.device
        self._start_message = m.framed(start)
        self._arena_fd = arena_fd
        self._stall_s = stall_s
        self._lock = threading.Lock()
        self._outbox: deque[tuple[bytes, int | None]] = deque()
        self._instances: dict[int, CopierInstance] = {}
        # The copies that are not done, with the time of each request.
        self._pending: dict[int, tuple[Promise[bool], float]] = {}
        self._numbers = 0
        self.lacks: tuple[str, ...] = ()
        self._once = LogLimit.once()
        # Of the process: this end of its socket, what was received and what has yet to be sent, the time of its last
        # message, the age of its oldest launch then, and the error of its last message, if it sent one.
        self._socket: socket.socket | None = None
        self._frames, self._unsent = m.Frames(), bytearray()
        self._heard = self._oldest_s = 0.0
        self._lost: KVFrameworkError | None = None
        self.start()

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

    def open(
        self, layout: KVLayout, desc: MemoryLayoutDesc, handles: Sequence[bytes], alive_fd: int | None
    ) -> CopierInstance:
        """Request the opening of an engine's memory; takes over `alive_fd`, which the copier keeps open until the
        instance is closed."""
        with self._lock:
            self._numbers += 1
            instance = CopierInstance(self, self._numbers)
            if self.stopping:
                if alive_fd is not None:
                    os.close(alive_fd)
                instance.lost = DeviceLost("the server is stopping")
                instance.end(instance.lost)
                return instance
            self._instances[instance.number] = instance
            message = m.Open(instance.number, layout, desc, tuple(handles), alive_fd is not None)
            self._send(message, alive_fd)
        return instance

    def copy(self, instance: CopierInstance, job: CopyJob) -> Future[bool]:
        """Start a copy. The future fails with `DeviceLost` if the process ends before the copy is done."""
        future: Promise[bool] = Promise(job.cancel)
        with self._lock:
            if instance.lost is not None:
                return Future.failed(instance.lost)
            self._numbers += 1
            number = self._numbers
            self._pending[number] = future, time.monotonic()
            self._send(m.copy_message(number, instance.number, job))
        job.on_cancel(lambda: self._cancel(number))
        return future

    def close_instance(self, instance: CopierInstance) -> None:
        """Request the end of the mappings once the launched copies are done. Never blocks."""
        with self._lock:
            if instance.lost is None and instance.number in self._instances:
                instance.asked = time.monotonic()
                self._send(m.Close(instance.number))
            instance.lost = instance.lost or DeviceLost("the instance was closed")

    def stop(self) -> None:
        """Kill the process; its requests fail once it has ended. Idempotent. Does not wait."""
        with self._lock:
            super().stop()

    def join(self, timeout_s: float) -> bool:
        """Wait, after `stop`, for the end of the process; False if a driver holds it in the kernel beyond `timeout_s`.
        It then keeps the arena mapped, and continues its writes, until the kernel releases it."""
        ended = super().join(timeout_s)
        if not ended:
            log.error(
                "%s, process %s, does not end, because the process is blocked in the kernel", self.title, self.pid
            )
        return ended

    def _cancel(self, number: int) -> None:
        with self._lock:
            if number in self._pending:
                self._send(m.Cancel(number))

    def _send(self, message: m.ToCopier, fd: int | None = None) -> None:
        self._outbox.append((m.framed(message), fd))
        self.wake()

    # the supervisor's thread

    def wanted(self) -> bool:
        return bool(self._outbox)

    def spawn(self) -> subprocess.Popen[bytes]:
        popen, self._socket = start_connected("kvf_devices.copier", self._arena_fd)
        self._socket.setblocking(False)
        self._frames, self._unsent = m.Frames(), bytearray(self._start_message)
        self._heard, self._oldest_s, self._lost, self.lacks = time.monotonic(), 0.0, None, ()
        return popen

    def watch(self, poller: select.poll) -> float:
        assert self._socket is not None
        sends = self._unsent or (self.is_ready and self._outbox)
        poller.register(self._socket, select.POLLIN | (select.POLLOUT if sends else 0))
        return time.monotonic() + TICK_S

    def serve(self, happened: dict[int, int]) -> str | None:
        assert self._socket is not None
        if happened.get(self._socket.fileno(), 0) & ~select.POLLOUT:
            try:
                data = self._socket.recv(_RECEIVE)
            except OSError:
                data = b""
            if not data:
                return ""
            self._heard = time.monotonic()
            for payload in self._frames.feed(data):
                self._hear(m.from_copier(payload))
        if not self._send_some(self._socket, self._unsent, self.is_ready):
            return ""
        stalled = self._stalled() if self.is_ready else ""
        return f"{self.title} was killed: {stalled}" if stalled else None

    def hang_up(self, popen: subprocess.Popen[bytes]) -> None:
        assert self._socket is not None
        self._socket.close()
        self._socket = None

    def ended(self, why: str) -> None:
        """Fail all unanswered requests: from here on nothing touches their memory."""
        reason = self._lost if why and self._lost else DeviceLost(why or "the server is stopping")
        self._lost = None
        if why:
            self.last_error = reason.fact
            log.error("%s; its instances must register again", reason)
        with self._lock:
            instances, pending = list(self._instances.values()), list(self._pending.values())
            self._instances.clear()
            self._pending.clear()
            for _, fd in self._outbox:
                if fd is not None:
                    os.close(fd)
            self._outbox.clear()
            for instance in instances:
                instance.lost = instance.lost or reason
        for future, _ in pending:
            future.set_exception(reason)
        for instance in instances:
            instance.end(reason)

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

    def _hear(self, message: m.FromCopier) -> None:
        if isinstance(message, m.Done):
            with self._lock:
                pending = self._pending.pop(message.job, None)
            if pending is not None and message.failure is not None:
                pending[0].set_exception(message.failure.error())
            elif pending is not None:
                pending[0].set_result(message.ok)
        elif isinstance(message, m.Opened):
            with self._lock:
                instance = self._instances.get(message.context)
                if instance is None:
                    return
                if instance.lost is None:
                    instance.asked = None
                if message.failure is not None:
                    instance.lost = message.failure.error()
                    del self._instances[message.context]
            if message.failure is None:
                instance.opened.set_result(None)
            else:
                log.error("%s could not open an engine's memory: %s", self.title, instance.lost)
                instance.end(instance.lost)
        elif isinstance(message, m.Closed):
            with self._lock:
                instance = self._instances.pop(message.context, None)
            if instance is not None:
                instance.end(instance.lost)
        elif isinstance(message, m.Lost):
            self._lost = message.failure.error()
            self._lost.fact = f"{self.title}: {self._lost.fact}"
        elif isinstance(message, m.Beat):
            self._oldest_s = message.oldest_s
        elif isinstance(message, m.Lacks):
            self.lacks = message.what
            for each in self.lacks:
                if self._once.passes(each):
                    log.warning("%s lacks a feature: %s", self.title, each)
        elif isinstance(message, m.Ready):
            self.ready()

    def _stalled(self) -> str:
        """Return why the process has to be killed; "" if it need not be."""
        if self._oldest_s > self._stall_s:
            return f"a copy has run for {self._oldest_s:.1f} s"
        with self._lock:
            asked = [each.asked for each in self._instances.values() if each.asked is not None]
            asked += [at for _, at in list(self._pending.values())[:1]]
        silent = time.monotonic() - max(self._heard, min(asked, default=math.inf))
        return f"the copier has sent no message for {silent:.1f} s" if silent > self._stall_s else ""
