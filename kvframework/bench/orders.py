"""Owns how a bench talks to a child that takes orders: a line there, a line back, each with a deadline.

In the bench's process, for one thread.
"""

from __future__ import annotations

import os
import selectors
import time

from kvframework.bench.child import BenchChild

_ANSWER_S = 120.0


class Orders:
    """To one piped child."""

    def __init__(self, child: BenchChild) -> None:
        self._child = child
        self._unread = b""

    def tell(self, line: bytes) -> None:
        """`line` has no end of line. Raises `BenchFailed` if the child has ended."""
        try:
            os.write(self._child.stdin.fileno(), line + b"\n")
        except OSError as error:
            raise self._child.failure(f"takes no orders any more: {error}") from error

    def hear(self) -> bytes:
        """Waits for a line, two minutes at most. Raises `BenchFailed` without one."""
        deadline = time.monotonic() + _ANSWER_S
        fd = self._child.stdout.fileno()
        with selectors.DefaultSelector() as selector:
            selector.register(fd, selectors.EVENT_READ)
            while b"\n" not in self._unread:
                if not selector.select(max(deadline - time.monotonic(), 0.0)):
                    raise self._child.failure(f"has not answered within {_ANSWER_S:.0f} s")
                data = os.read(fd, 1 << 20)
                if not data:
                    raise self._child.failure("ended")
                self._unread += data
        line, _, self._unread = self._unread.partition(b"\n")
        return line
