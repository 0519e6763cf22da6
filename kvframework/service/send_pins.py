"""Owns the knowledge of which pieces of the arena are lent out for sending without a copy, and what pins them then.

ZMQ gives a buffer back, in whatever thread, once it has sent it or given up. Until then the arena must stay mapped, and
the piece must hold what was asked for: a client that reads slowly is not to be sent what others store there later.
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
class Loan:
    """What one answer lends: the server's own pins on it, and how many views are still out."""

    client: int
    nbytes: int
    pins: Sequence[PinLease]
    out: int = 0


class LentViews:
    """Makes views of the arena and notices when the last reference to each is gone. Thread-safe."""

    def __init__(self, arena: memoryview) -> None:
        self._arena = arena
        self._ids = itertools.count()
        self._lock = threading.Lock()  # guards the counts, and is never taken where a view dies
        self._nbytes: Counter[int] = Counter()
        # Their single operations are atomic: a view may die in any thread, at any time.
        self._out: set[int] = set()
        self._back: deque[Loan] = deque()

    def __len__(self) -> int:
        return len(self._out)

    def bytes_of(self, client: int) -> int:
        """What is lent to a client."""
        return self._nbytes[client]

    def lend(self, client: int, places: Sequence[tuple[int, int]], pins: Sequence[PinLease]) -> list[memoryview]:
        """Views of (offset, length), at least one, that the caller passes on. `pins` end up in `returned`."""
        loan = Loan(client, sum(length for _, length in places), pins)
        with self._lock:
            self._nbytes[client] += loan.nbytes
            return [self._view(loan, offset, length) for offset, length in places]

    def returned(self) -> list[PinLease]:
        """The pins of loans of which no view is out any more, each once."""
        pins: list[PinLease] = []
        with self._lock:
            for _ in range(len(self._back)):
                loan = self._back.popleft()
                loan.out -= 1
                if not loan.out:
                    pins += loan.pins
                    self._end(loan)
        return pins

    def wait_returned(self, timeout: float) -> bool:
        """Waits until every view is gone, at most `timeout` seconds; whether that is so."""
        deadline = time.monotonic() + timeout
        while self._out and time.monotonic() < deadline:
            time.sleep(_POLL_S)
        return not self._out

    def _end(self, loan: Loan) -> None:
        self._nbytes[loan.client] -= loan.nbytes
        if not self._nbytes[loan.client]:
            del self._nbytes[loan.client]

    def _view(self, loan: Loan, offset: int, length: int) -> memoryview:
        view = self._arena[offset : offset + length]
        number = next(self._ids)
        loan.out += 1
        self._out.add(number)
        weakref.finalize(view, self._take_back, number, loan).atexit = False
        return view

    def _take_back(self, number: int, loan: Loan) -> None:
        self._back.append(loan)
        self._out.discard(number)
