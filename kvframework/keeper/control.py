"""The place of a `kvframework hold`: its lock, its signals, and its control socket, where one request and one reply are
a JSON object in one packet each."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import select
import signal
import socket
import struct
from collections.abc import Iterator, Sequence
from typing import Any

from kvframework.keeper.notes import bind_private, remove_socket

# Beside the server's socket.
CONTROL_SUFFIX, NOTE_SUFFIX = ".hold", ".note"
_LOCK_SUFFIX = ".hold.lock"


class AlreadyHeldError(Exception):
    """Another process, which the text names, holds the place."""


@contextlib.contextmanager
def locked(base: str) -> Iterator[None]:
    """This process alone has the place within the block. Raises `AlreadyHeldError` and `OSError`."""
    # The file stays: without it two processes could each lock one of their own.
    lock = os.open(base + _LOCK_SUFFIX, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise AlreadyHeldError(os.pread(lock, 32, 0).decode("ascii", "replace").strip() or "unknown") from None
        os.ftruncate(lock, 0)
        os.pwrite(lock, f"{os.getpid()}\n".encode(), 0)
        yield
    finally:
        os.close(lock)


@contextlib.contextmanager
def heard_signals(numbers: Sequence[signal.Signals]) -> Iterator[socket.socket]:
    """A socket that gets a byte, its number, for each of these signals within the block, and never blocks. In the main
    thread."""
    with contextlib.ExitStack() as stack:
        heard, written = socket.socketpair()
        for end in (heard, written):
            stack.callback(end.close)
            end.setblocking(False)
        stack.callback(signal.set_wakeup_fd, signal.set_wakeup_fd(written.fileno(), warn_on_full_buffer=False))
        for number in numbers:
            stack.callback(signal.signal, number, signal.signal(number, lambda _number, _frame: None))
        yield heard


MAX_PACKET_BYTES = 64 << 10
_MAX_CALLERS = 8
_ASK_S = 5.0
_PEER = struct.Struct("=iII")  # pid, uid, gid


class Caller:
    """A connected caller, until its reply is sent."""

    def __init__(self, connection: socket.socket, now: float) -> None:
        self.connection = connection
        self.ask_by = now + _ASK_S
        self.asked = False


class ControlSocket:
    """A socket at a path that only this user, and root, may use. At most `_MAX_CALLERS` callers at once."""

    def __init__(self, path: str) -> None:
        """Bind the socket, in place of one that a killed process left. Raises `OSError`."""
        self.path = path
        self.callers: list[Caller] = []
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
        bind_private(self._listener, path)
        self._listener.listen(_MAX_CALLERS)

    def register(self, poll: select.poll) -> None:
        """Have `poll` wake up for what `requests` would read."""
        if len(self.callers) < _MAX_CALLERS:
            poll.register(self._listener, select.POLLIN)
        for caller in self.callers:
            # Of a caller that waits for its reply only its end is seen.
            poll.register(caller.connection, 0 if caller.asked else select.POLLIN)

    def requests(self, now: float) -> list[tuple[Caller, dict[str, Any]]]:
        """Accept callers, and return the requests that have come, each with its caller, who waits for `reply`. Never
        blocks. A caller that asks nothing in time, or something that is no object, is closed."""
        self._accept(now)
        found = []
        for caller in list(self.callers):
            if not caller.asked:
                request = self._read(caller, now)
                if request is not None:
                    caller.asked = True
                    found.append((caller, request))
            elif _has_ended(caller.connection):
                self._close(caller)
        return found

    def reply(self, caller: Caller, document: dict[str, object]) -> None:
        """Send the reply and close the connection. Never blocks: a caller that has ended misses it."""
        if caller in self.callers:
            with contextlib.suppress(OSError):
                caller.connection.send(json.dumps(document).encode())
            self._close(caller)

    def close(self) -> None:
        for caller in list(self.callers):
            self._close(caller)
        self._listener.close()
        remove_socket(self.path)

    def _accept(self, now: float) -> None:
        while len(self.callers) < _MAX_CALLERS:
            try:
                connection, _ = self._listener.accept()
            except OSError:  # none waits, or this process has too few descriptors
                return
            _, uid, _ = _PEER.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size))
            if uid not in (0, os.getuid()):
                connection.close()
                continue
            connection.setblocking(False)
            self.callers.append(Caller(connection, now))

    def _read(self, caller: Caller, now: float) -> dict[str, Any] | None:
        try:
            request = json.loads(caller.connection.recv(MAX_PACKET_BYTES))
            if isinstance(request, dict):
                return request
        except BlockingIOError:
            if now < caller.ask_by:
                return None
        except (OSError, ValueError, RecursionError):
            pass
        self._close(caller)
        return None

    def _close(self, caller: Caller) -> None:
        self.callers.remove(caller)
        caller.connection.close()


def _has_ended(connection: socket.socket) -> bool:
    poll = select.poll()
    poll.register(connection, 0)
    return bool(poll.poll(0))


def ask(path: str, request: dict[str, object], timeout: float) -> Any:
    """Send a request to the keeper at `path` and return its reply. Blocks for `timeout` seconds at most for each of the
    connection, the request and the reply. Raises `ValueError` for a reply that is no JSON, and `OSError`:
    `FileNotFoundError` and `ConnectionRefusedError` where there is no keeper, `TimeoutError`, and
    `ConnectionResetError` when it ended meanwhile."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
        # By the kernel: a socket with a timeout of Python's does not wait where many callers do.
        for waits in (socket.SO_SNDTIMEO, socket.SO_RCVTIMEO):
            seconds, rest = divmod(timeout, 1)
            connection.setsockopt(socket.SOL_SOCKET, waits, struct.pack("@ll", int(seconds), int(rest * 1e6)))
        try:
            connection.connect(path)
            connection.send(json.dumps(request).encode())
            packet = connection.recv(MAX_PACKET_BYTES)
        except BlockingIOError:
            raise TimeoutError from None
    if not packet:
        raise ConnectionResetError("it has ended")
    return json.loads(packet)
