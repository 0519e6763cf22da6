"""The place of a `kvframework hold`: its lock, the names of its sockets, and the signals of its process."""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import socket
from collections.abc import Iterator, Sequence

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
