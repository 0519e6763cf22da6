"""The pins on objects of the arena that ZMQ sends without a copy, and the unsent bytes of each client.

ZMQ releases a buffer, in any thread, once it has sent it or given up. Until then the arena must stay mapped, and the
piece must keep its object: a client that reads slowly must not receive bytes that others store there later.
"""

from __future__ import annotations

import itertools
import threading
import time
import weakref
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass

from kvframework.storage.l1.leases import PinLease

_POLL_S = 0.005


@dataclass(eq=False)
class _Send:
    """One answer that ZMQ sends: the server's own pins on its objects, and the number of views not yet sent."""

    client: int
    nbytes: int
    pins: Sequence[PinLease]
    unsent: int = 0


class SendPins:
    """Makes views of the arena and notices when the last reference to each has ended. Thread-safe."""

    def __init__(self, arena: memoryview) -> None:
        self._arena = arena
        self._ids = itertools.count()
        self._lock = threading.Lock()  # guards the counts, and is never taken where a view is finalized
        self._nbytes: Counter[int] = Counter()
        # Their single operations are atomic: a view may be finalized in any thread, at any time.
        self._unsent: set[int] = set()
        self._back: deque[_Send] = deque()

    def __len__(self) -> int:
        """The number of views that are not sent yet."""
        return len(self._unsent)

    def unsent_bytes(self, client: int) -> int:
        """The number of bytes that are being sent to a client."""
        return self._nbytes[client]

    def views(self, client: int, places: Sequence[tuple[int, int]], pins: Sequence[PinLease]) -> list[memoryview]:
        """Return views of (offset, length), at least one, for the caller to pass to ZMQ. `take_sent` later returns
        `pins`."""
        send = _Send(client, sum(length for _, length in places), pins)
        with self._lock:
            self._nbytes[client] += send.nbytes
            return [self._view(send, offset, length) for offset, length in places]

    def take_sent(self) -> list[PinLease]:
        """Return the pins of answers whose views have all been sent, each once. The caller unpins them."""
        pins: list[PinLease] = []
        with self._lock:
            for _ in range(len(self._back)):
                send = self._back.popleft()
                send.unsent -= 1
                if not send.unsent:
                    pins += send.pins
                    self._end(send)
        return pins

    def wait_sent(self, timeout: float) -> bool:
        """Wait until every view is sent, at most `timeout` seconds; return whether that is so."""
        deadline = time.monotonic() + timeout
        while self._unsent and time.monotonic() < deadline:
            time.sleep(_POLL_S)
        return not self._unsent

    def _end(self, send: _Send) -> None:
        self._nbytes[send.client] -= send.nbytes
        if not self._nbytes[send.client]:
            del self._nbytes[send.client]

    def _view(self, send: _Send, offset: int, length: int) -> memoryview:
        view = self._arena[offset : offset + length]
        number = next(self._ids)
        send.unsent += 1
        self._unsent.add(number)
        weakref.finalize(view, self._take_back, number, send).atexit = False
        return view

    def _take_back(self, number: int, send: _Send) -> None:
        self._back.append(send)
        self._unsent.discard(number)
