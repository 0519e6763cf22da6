"""The place of a `kvframework hold`: its lock, its signals, the socket at which it hears its servers, and its control
socket, where one request and one reply are a JSON object in one packet each."""

from __future__ import annotations

import array
import contextlib
import fcntl
import json
import os
import select
import signal
import socket
import struct
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from kvframework.keeper.sd_notify import MAX_NOTE_BYTES, Note, parse_note

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


_CREDENTIALS = struct.Struct("=iII")  # pid, uid, gid
# Credentials come first, so that no number of descriptors can displace them.
_ANCILLARY_BYTES = socket.CMSG_SPACE(_CREDENTIALS.size) + socket.CMSG_SPACE(array.array("i").itemsize)


class Received(NamedTuple):
    """A message, and who sent it as the kernel says. `fd` belongs to the receiver; None: there was not exactly one, and
    others are closed."""

    pid: int
    uid: int
    note: Note
    fd: int | None


class NoteSocket:
    """A datagram socket at a path of its own, in a directory where others may not write, with mode 0600: the kernel
    refuses the processes of other users before this one sees a byte, which it does not for an abstract name."""

    def __init__(self, path: str) -> None:
        """Bind the socket, in place of one that a killed process left. Raises `OSError`."""
        self.path = path
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
        # Before it is bound: each message has its sender's credentials.
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        bind_private(self._socket, path)

    def fileno(self) -> int:
        return self._socket.fileno()

    def receive(self) -> Received | None:
        """Return the next message, None if there is none. Never blocks."""
        try:
            payload, ancillary, flags, _ = self._socket.recvmsg(
                MAX_NOTE_BYTES, _ANCILLARY_BYTES, socket.MSG_CMSG_CLOEXEC
            )
        except BlockingIOError:
            return None
        fds, sender = array.array("i"), (0, 0, 0)
        for level, kind, data in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                fds.frombytes(data[: len(data) - len(data) % fds.itemsize])
            elif level == socket.SOL_SOCKET and kind == socket.SCM_CREDENTIALS and len(data) >= _CREDENTIALS.size:
                sender = _CREDENTIALS.unpack_from(data)
        whole = not flags & (socket.MSG_CTRUNC | socket.MSG_TRUNC)
        if whole and len(fds) == 1:
            return Received(sender[0], sender[1], parse_note(payload), fds[0])
        for fd in fds:
            os.close(fd)
        return Received(sender[0], sender[1], parse_note(payload) if whole else Note(), None)

    def close(self) -> None:
        """Close the socket and remove its path."""
        self._socket.close()
        remove_socket(self.path)


def bind_private(bound: socket.socket, path: str) -> None:
    """Bind a socket to a path that only this user may use, in place of an earlier one. Raises `OSError`."""
    remove_socket(path)
    before = os.umask(0o177)
    try:
        bound.bind(path)
    finally:
        os.umask(before)


def remove_socket(path: str) -> None:
    """Remove the path of a socket, if there is one."""
    try:
        os.unlink(path)
    except FileNotFoundError:
        return
