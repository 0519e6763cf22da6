"""Owns the knowledge of which pieces of the arena are lent out for sending without a copy.

ZMQ gives a buffer back, in whatever thread, once it has sent it or given up. Until then the arena must stay mapped.
"""

from __future__ import annotations

import itertools
import time
import weakref

_POLL_S = 0.005


class LentViews:
    """Makes views of the arena and notices when the last reference to each is gone. Thread-safe."""

    def __init__(self, arena: memoryview) -> None:
        self._arena = arena
        self._ids = itertools.count()
        self._out: set[int] = set()  # its single operations are atomic: a view may die in any thread, at any time

    def __len__(self) -> int:
        return len(self._out)

    def lend(self, offset: int, length: int) -> memoryview:
        """A view that the caller passes on; what it shows is only what a pin keeps there."""
        view = self._arena[offset : offset + length]
        number = next(self._ids)
        self._out.add(number)
        weakref.finalize(view, self._out.discard, number).atexit = False
        return view

    def wait_returned(self, timeout: float) -> bool:
        """Waits until every view is gone, at most `timeout` seconds; whether that is so."""
        deadline = time.monotonic() + timeout
        while self._out and time.monotonic() < deadline:
            time.sleep(_POLL_S)
        return not self._out
