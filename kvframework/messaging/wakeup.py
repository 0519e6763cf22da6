"""Owns the eventfd by which any thread wakes a thread that polls."""

from __future__ import annotations

import os

from kvframework.messaging.fork import close_after_fork


class Wakeup:
    """`signal()` makes `fd` readable until `drain()`. Takes no lock, so it may be used in a signal handler.

    The descriptor lives as long as the object: a late `signal()` never hits a descriptor that was reused.
    """

    def __init__(self) -> None:
        self.fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        close_after_fork(self)

    def signal(self) -> None:
        """Never blocks."""
        if self.fd >= 0:
            os.eventfd_write(self.fd, 1)

    def drain(self) -> None:
        """Forgets the signals so far. To be called before looking at what they announced."""
        try:
            os.eventfd_read(self.fd)
        except BlockingIOError:
            return

    def close_in_child(self) -> None:
        os.close(self.fd)
        self.fd = -1

    def __del__(self) -> None:
        fd = getattr(self, "fd", -1)
        if fd >= 0:
            os.close(fd)
