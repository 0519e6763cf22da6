"""A tier's helper process on the server's side: its start at the first call, its connections, its end.

One thread starts the process, watches it, and kills it where a call has not ended long after its deadline. Callers only
take connections and give them back.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import socket
import subprocess
import threading
import time

from kvframework.api.tier_process_calls import Start, read_answer, write_start
from kvframework.api.tier_process_memory import Connection
from kvframework.child_process import reap, start_child, why_ended
from kvframework.errors import TierError
from kvframework.restart_backoff import Backoff

log = logging.getLogger(__name__)

# Seconds behind its deadline after which a call that the helper has not ended counts as frozen.
FROZEN_S = 1.0
# Seconds within which a process has made its tier: imports of large libraries, on a busy machine.
START_S = 30.0
_DRAINED = 1 << 18


class TierProcessSupervisor:
    """One helper process at a time. `start` is its first message. Thread-safe."""

    def __init__(self, name: str, start: Start, start_s: float) -> None:
        self._name = name
        self._start = start
        self._start_s = start_s
        self._state = threading.Condition()
        self._thread: threading.Thread | None = None
        self._wake = -1
        self._closed = self._wanted = False
        # The socket of a process that has made its tier, and how many have ended.
        self._control: socket.socket | None = None
        self._ends = 0
        self._idle: list[Connection] = []
        self._busy: set[Connection] = set()
        # Connections of calls that ended without an answer, and when they count as frozen. Nothing uses one again.
        self._given_up: dict[Connection, float] = {}
        self._backoff = Backoff()
        self.pid: int | None = None
        self.last_error = ""

    def check_open(self, where: str) -> None:
        """Raises `TierError` after `close`."""
        if self._closed:
            raise TierError("the tier is closed", where=where)

    def connect(self, deadline: float) -> Connection:
        """Returns a connection for one call; starts the process if there is none. Blocks until it has made its tier.
        Raises `OSError`, at once where the process ends."""
        with self._state:
            if self._thread is None and not self._closed:
                self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
                self._thread = threading.Thread(target=self._run, name=f"kvf-helper-{self._name}", daemon=True)
                self._thread.start()
            ends = self._ends
            while self._control is None:
                if self._closed or self._ends != ends:
                    raise ConnectionError("the helper process has ended")
                self._wanted = True
                self._notify()
                if not self._state.wait(deadline - time.monotonic()):
                    raise ConnectionError("no helper process within the deadline")
            connection = self._idle.pop() if self._idle else Connection.through(self._control)
            self._busy.add(connection)
            return connection

    def give_back(self, connection: Connection) -> None:
        """Takes back the connection of a call that was answered."""
        with self._state:
            if connection in self._busy and not self._closed:
                self._busy.discard(connection)
                self._idle.append(connection)
            else:
                connection.close()

    def give_up(self, connection: Connection, deadline: float) -> None:
        """Takes back the connection of a call that was not answered."""
        with self._state:
            if connection not in self._busy or self._closed:
                connection.close()
                return
            self._busy.discard(connection)
            with contextlib.suppress(OSError):
                connection.sock.shutdown(socket.SHUT_WR)
            connection.sock.setblocking(False)
            self._given_up[connection] = deadline + FROZEN_S
            self._notify()

    def close(self) -> None:
        """Ends the process and the calls in flight. Idempotent."""
        with self._state:
            self._closed = True
            for connection in self._busy:
                with contextlib.suppress(OSError):
                    connection.sock.shutdown(socket.SHUT_RDWR)
            self._state.notify_all()
            self._notify()
            thread = self._thread
        if thread is not None:
            thread.join()

    def _notify(self) -> None:
        if self._wake >= 0:
            os.eventfd_write(self._wake, 1)

    # the supervisor's thread

    def _run(self) -> None:
        poller = select.poll()
        poller.register(self._wake, select.POLLIN)
        while not self._closed:
            left = self._backoff.left(time.monotonic())
            if self._wanted and not left:
                self._one_process()
            else:
                poller.poll(left * 1000 + 1 if self._wanted else None)
                self._drain_wake()
        with self._state:
            os.close(self._wake)
            self._wake = -1

    def _one_process(self) -> None:
        self._wanted = False
        self._backoff.started(time.monotonic())
        try:
            popen, control = start_child("kvframework.api.tier_process")
        except Exception as error:  # noqa: BLE001  the thread has to go on: callers wait for it
            self._ended(f"the helper process cannot be started: {error}")
            return
        self.pid = popen.pid
        reason = ""
        try:
            write_start(control, self._start, time.monotonic() + self._start_s)
            control.setblocking(False)
            reason = self._watch(popen, control)
        except OSError as error:
            reason = f"the helper process ended{why_ended(popen)}: {error}"
        finally:
            with self._state:
                self._control = self.pid = None
            control.close()
            if reason:
                popen.kill()
            reap(popen)
            self._forget()
        if reason:
            self._ended(reason)

    def _watch(self, popen: subprocess.Popen[bytes], control: socket.socket) -> str:
        """Watch the process until it must end; return the reason, "" after `close`."""
        pidfd = os.pidfd_open(popen.pid)
        ready_by = time.monotonic() + self._start_s
        try:
            while True:
                poller = select.poll()
                poller.register(self._wake, select.POLLIN)
                poller.register(pidfd, select.POLLIN)
                with self._state:
                    is_ready, given_up = self._control is not None, dict(self._given_up)
                for sock in [each.sock for each in given_up] if is_ready else [control]:
                    poller.register(sock, select.POLLIN)
                due = min(given_up.values(), default=None) if is_ready else ready_by
                happened = dict(poller.poll(None if due is None else max(due - time.monotonic(), 0) * 1000 + 1))
                self._drain_wake()
                if self._closed:
                    return ""
                if control.fileno() in happened:
                    try:
                        refusal = read_answer(control, time.monotonic() + FROZEN_S).refusal
                    except EOFError:
                        return f"the helper process ended{why_ended(popen)}"
                    control.setblocking(False)
                    if refusal is not None:
                        return f"the helper process made no tier: {'; '.join(each for each in refusal if each)}"
                    with self._state:
                        self._control, self.last_error = control, ""
                        self._state.notify_all()
                elif pidfd in happened:
                    return f"the helper process ended{why_ended(popen)}"
                elif not is_ready and time.monotonic() >= ready_by:
                    return f"the helper process was killed: it made no tier within {self._start_s:g} s"
                for connection, its_due in given_up.items():
                    if connection.sock.fileno() in happened and _is_over(connection.sock):
                        with self._state:
                            del self._given_up[connection]
                        connection.close()
                    elif time.monotonic() >= its_due:
                        return f"the helper process was killed: a call went on for {FROZEN_S:g} s after its deadline"
        finally:
            os.close(pidfd)

    def _ended(self, reason: str) -> None:
        with self._state:
            again = reason == self.last_error  # which is empty once a process has made its tier
            self._backoff.ended(time.monotonic())
            self.last_error = reason
            self._ends += 1
            self._state.notify_all()
        log.log(logging.DEBUG if again else logging.ERROR, "tier %s: %s", self._name, reason)

    def _forget(self) -> None:
        """Close the connections of a process that has ended; those in use are closed by their callers."""
        with self._state:
            for connection in (*self._idle, *self._given_up):
                connection.close()
            self._idle.clear()
            self._given_up.clear()
            self._busy.clear()

    def _drain_wake(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._wake)


def _is_over(sock: socket.socket) -> bool:
    """Whether the helper has ended the call and its connection. Drops what it still answers."""
    try:
        return not sock.recv(_DRAINED)
    except BlockingIOError:
        return False
    except OSError:
        return True
