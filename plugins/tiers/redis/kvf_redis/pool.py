"""A pool of at most N connections, each used by one thread at a time. Thread-safe; connects outside its lock."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable

from kvf_redis.wire import Wire
from kvframework.errors import TierError


class Pool:
    """Hands out connections and makes them when needed. A connection with unread bytes, or one that was closed, is
    never handed out."""

    def __init__(self, connect: Callable[[float], Wire], size: int, *, where: str) -> None:
        self._connect = connect
        self._size = size
        self._where = where
        self._changed = threading.Condition()
        self._queue: deque[object] = deque()  # threads that wait for a connection
        self._idle: list[Wire] = []
        self._in_use: set[Wire] = set()
        self._connecting = 0
        self._closed = False

    def acquire(self, deadline: float) -> Wire:
        """A connection that the caller returns by `release` or `discard`; blocks until `deadline` at most.

        Raises `TierError` if there is none by then, if connecting fails, and once the pool is closed.
        """
        wire = self._reserve(deadline)
        if wire is not None:
            return wire
        try:
            wire = self._connect(deadline)
        finally:
            with self._changed:
                self._connecting -= 1
                closed = self._closed
                if wire is not None and not closed:
                    self._in_use.add(wire)
                self._changed.notify_all()
        if closed:
            wire.close()
            raise self._is_closed()
        return wire

    def release(self, wire: Wire) -> None:
        """Takes back a connection whose replies were all read."""
        with self._changed:
            self._in_use.discard(wire)
            keep = not self._closed and not wire.spoilt
            if keep:
                self._idle.append(wire)
            self._changed.notify_all()
        if not keep:
            wire.close()

    def discard(self, wire: Wire) -> None:
        """Takes back a connection that must not be used again, and closes it."""
        wire.spoilt = True
        self.release(wire)

    @property
    def closed(self) -> bool:
        return self._closed

    def drop_idle(self) -> None:
        """Closes idle connections: they are presumably as dead as the one that has just failed. Never blocks."""
        with self._changed:
            idle, self._idle = self._idle, []
        for wire in idle:
            wire.close()

    def close_unused(self) -> bool:
        """Closes the pool if no connection is in use; True if it was closed. Never blocks."""
        with self._changed:
            if self._in_use or self._connecting:
                return False
            self._closed = True
        self.drop_idle()
        return True

    def close(self) -> None:
        """Closes idle connections and cuts those in use: calls in flight fail. Idempotent; never blocks."""
        with self._changed:
            self._closed = True
            for wire in self._in_use:
                wire.cut()
            self._changed.notify_all()
        self.drop_idle()

    def _reserve(self, deadline: float) -> Wire | None:
        """An idle connection, or None for the right to make one. Threads are served in the order of their arrival:
        without it, a thread that returns a connection and acquires one again at once would starve the others."""
        with self._changed:
            turn = object()
            self._queue.append(turn)
            try:
                while True:
                    if self._closed:
                        raise self._is_closed()
                    remaining = deadline - time.monotonic()
                    if remaining <= 0:
                        raise TierError("the deadline has passed before a connection was free", where=self._where)
                    if self._queue[0] is not turn or not self._available():
                        self._changed.wait(min(remaining, threading.TIMEOUT_MAX))
                    elif not self._idle:
                        self._connecting += 1
                        return None
                    else:
                        wire = self._idle.pop()
                        if wire.is_quiet():
                            self._in_use.add(wire)
                            return wire
                        wire.close()
            finally:
                self._queue.remove(turn)
                self._changed.notify_all()

    def _available(self) -> bool:
        return bool(self._idle) or len(self._in_use) + self._connecting < self._size

    def _is_closed(self) -> TierError:
        return TierError("the tier is closed", where=self._where)
