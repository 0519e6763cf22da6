"""The place of a `kvframework hold`: its lock, its signals, and the socket at which it hears its servers and callers. A
server sends the words of systemd (`keeper/sd_notify.py`), a caller a JSON object with a descriptor for the reply."""

from __future__ import annotations

import array
import contextlib
import fcntl
import json
import os
import signal
import socket
import struct
import time
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from kvframework.keeper.sd_notify import MAX_NOTE_BYTES

# Suffix of the keeper's socket, beside the server's socket.
CONTROL_SUFFIX, _LOCK_SUFFIX = ".hold", ".hold.lock"
_MAX_REPLY_BYTES = 64 << 10
_CREDENTIALS = struct.Struct("=iII")  # pid, uid, gid
# Credentials come first, so that no number of descriptors can displace them.
_ANCILLARY_BYTES = socket.CMSG_SPACE(_CREDENTIALS.size) + socket.CMSG_SPACE(array.array("i").itemsize)


class AlreadyHeldError(Exception):
    """Another process, which the text names, holds the place."""


@contextlib.contextmanager
def locked(base: str) -> Iterator[float]:
    """This process alone has the place within the block, which gets the time, by the monotonic clock, at which the
    first process had it. Raises `AlreadyHeldError` and `OSError`."""
    # The file stays: without it two processes could each lock one of their own.
    lock = os.open(base + _LOCK_SUFFIX, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise AlreadyHeldError(
                os.pread(lock, 32, 0).decode("ascii", "replace").split(" ")[0] or "unknown"
            ) from None
        since = time.monotonic()
        with contextlib.suppress(ValueError):  # a new file; and one of before a boot is not older
            since = min(float(os.pread(lock, 64, 0).partition(b" ")[2]), since)
        os.ftruncate(lock, 0)
        os.pwrite(lock, f"{os.getpid()} {since}\n".encode(), 0)
        yield since
    finally:
        os.close(lock)


def heard_signals(numbers: Sequence[signal.Signals]) -> socket.socket:
    """Return a socket that gets a byte, its number, for each of these signals from now on. In the main thread."""
    heard, written = socket.socketpair()
    for end in (heard, written):
        end.setblocking(False)
    signal.set_wakeup_fd(written.detach(), warn_on_full_buffer=False)
    for number in numbers:
        signal.signal(number, lambda _number, _frame: None)
    return heard


class Received(NamedTuple):
    """A message, b"" if it was cut off, and who sent it as the kernel says. `fd` belongs to the receiver; None: there
    was not exactly one, and others are closed."""

    pid: int
    uid: int
    payload: bytes
    fd: int | None

    def request(self) -> dict[str, Any] | None:
        """Return a caller's request, None for anything else."""
        if self.fd is None or self.payload[:1] != b"{":
            return None
        try:
            request: dict[str, Any] = json.loads(self.payload)
        except (ValueError, RecursionError):
            return None
        return request


class KeeperSocket:
    """A datagram socket at a path of its own, in a directory where others may not write, with mode 0600: the kernel
    refuses the processes of other users before this one sees a byte, which it does not for an abstract name."""

    def __init__(self, path: str) -> None:
        """Bind the socket, in place of one that a killed process left. Raises `OSError`."""
        self._path = path
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
        # Before it is bound: each message has its sender's credentials.
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        self._remove()
        before = os.umask(0o177)
        try:
            self._socket.bind(path)
        finally:
            os.umask(before)

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
        if flags & (socket.MSG_CTRUNC | socket.MSG_TRUNC):
            payload = b""
        if payload and len(fds) == 1:
            return Received(sender[0], sender[1], payload, fds[0])
        for fd in fds:
            os.close(fd)
        return Received(sender[0], sender[1], payload, None)

    def close(self) -> None:
        """Close the socket and remove its path."""
        self._socket.close()
        self._remove()

    def _remove(self) -> None:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._path)


def reply(caller: int, document: dict[str, object]) -> None:
    """Send the reply to a caller's descriptor, and close it. Never blocks: a caller that has ended misses it."""
    with contextlib.suppress(OSError):
        os.set_blocking(caller, False)
        os.write(caller, json.dumps(document).encode())
    os.close(caller)


def ask(path: str, request: dict[str, object], timeout: float) -> Any:
    """Send a request to the keeper at `path` and return its reply. Blocks for `timeout` seconds at most for each of
    both. Raises `ValueError` for a reply that is no JSON, and `OSError`: `FileNotFoundError`,
    `ConnectionRefusedError` without a keeper, `TimeoutError`, `ConnectionResetError` when it ended meanwhile."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sending:
        ours.settimeout(timeout)
        sending.settimeout(timeout)
        with theirs:
            sending.connect(path)
            socket.send_fds(sending, [json.dumps(request).encode()], [theirs.fileno()])
        packet = ours.recv(_MAX_REPLY_BYTES)
    if not packet:
        raise ConnectionResetError("the keeper has ended")
    return json.loads(packet)
