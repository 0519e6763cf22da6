"""An eventfd by which any thread wakes a thread that polls."""

from __future__ import annotations

import os
import threading

from kvframework.messaging.fork import close_after_fork


class Wakeup:
    """`signal()` makes `fd` readable until `drain()`. Its lock is reentrant, so a signal handler may use it.

    The owner closes it: an object of a reference cycle, or of a traceback that is kept, would hold the descriptor until
    the garbage collector runs, which an engine may have switched off.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self.fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        close_after_fork(self)

    def signal(self) -> None:
        """Make `fd` readable. Never blocks. No effect after `close()`, so that a late call never hits a descriptor's
        next owner."""
        with self._lock:
            if self.fd >= 0:
                os.eventfd_write(self.fd, 1)

    def drain(self) -> None:
        """Reset the signals so far. The caller drains before it checks what they announced."""
        with self._lock:
            if self.fd >= 0:
                try:
                    os.eventfd_read(self.fd)
                except BlockingIOError:
                    return

    def close(self) -> None:
        """Close the descriptor. Idempotent. The caller ensures that no thread polls `fd`."""
        with self._lock:
            fd, self.fd = self.fd, -1
            if fd >= 0:
                os.close(fd)

    def close_in_child(self) -> None:
        self._lock = threading.RLock()  # another thread of the parent may have held it
        self.close()

    def __del__(self) -> None:
        if hasattr(self, "fd"):
            self.close()
