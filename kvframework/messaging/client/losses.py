"""What a client lost, and has not told its server yet: calls that failed by kind and error code. Thread-safe.

PINGs carry it. A server that answered one knows of it, whichever session that was.
"""

from __future__ import annotations

import threading

from kvframework.api import LostKind
from kvframework.wire.messages import LOST_AMOUNTS, LOST_CALLS, MAX_LOST, MAX_LOST_CODE, MOST_LOST, Lost

_OTHERS = "other"


class Losses:
    """Amounts are what the servers of this process do not know of yet; `report` is since `begin`, so that one that is
    heard twice counts once."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._untold: dict[str, Lost] = {}
        self._known: tuple[Lost, ...] = ()

    def add(self, kind: LostKind, code: str, nbytes: int = 0) -> None:
        """One call, and the bytes that it was to move."""
        code = code[:MAX_LOST_CODE]
        with self._lock:
            if code not in self._untold and len(self._untold) >= MAX_LOST - 1:
                code = _OTHERS
            lost = self._untold.get(code) or Lost(code)
            one = Lost(code, nbytes=nbytes, **{kind: 1})
            self._untold[code] = _combined(lost, one, 1)

    def begin(self) -> None:
        """A new session: it is told what no former one has answered for."""
        with self._lock:
            known, self._known = {each.code: each for each in self._known}, ()
            left = {
                code: _combined(lost, known[code], -1) if code in known else lost for code, lost in self._untold.items()
            }
            self._untold = {code: lost for code, lost in left.items() if _counts(lost)}

    def report(self) -> tuple[Lost, ...]:
        """All of this session; () if its server knows already."""
        with self._lock:
            all_of_it = tuple(self._untold.values())
            return () if all_of_it == self._known else all_of_it

    def told(self, report: tuple[Lost, ...]) -> None:
        """The server of this session has answered a PING with it."""
        if report:
            with self._lock:
                self._known = report


def _combined(one: Lost, other: Lost, sign: int) -> Lost:
    amounts = {name: min(max(getattr(one, name) + sign * getattr(other, name), 0), MOST_LOST) for name in LOST_AMOUNTS}
    return Lost(one.code, **amounts)


def _counts(lost: Lost) -> bool:
    return any(getattr(lost, name) for name in LOST_CALLS)
