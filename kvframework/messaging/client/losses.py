"""The losses that a client has not reported to its server yet: failed calls by kind and error code. Thread-safe.

PINGs carry them. A server that answered such a PING knows them, whichever session it was.
"""

from __future__ import annotations

import threading

from kvframework.api.transport import LostKind
from kvframework.wire.messages import LOST_AMOUNTS, LOST_CALLS, MAX_LOST, MAX_LOST_CODE, MOST_LOST, Lost

_OTHERS = "other"


class Losses:
    """Losses that no server knows of yet; `report` covers the time since `begin`, so that a repeated report counts
    once."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._untold: dict[str, Lost] = {}
        self._known: tuple[Lost, ...] = ()

    def add(self, kind: LostKind, code: str, nbytes: int = 0) -> None:
        """Add one failed call, and the bytes that it was to move."""
        code = code[:MAX_LOST_CODE]
        with self._lock:
            if code not in self._untold and len(self._untold) >= MAX_LOST - 1:
                code = _OTHERS
            lost = self._untold.get(code) or Lost(code)
            one = Lost(code, nbytes=nbytes, **{kind: 1})
            self._untold[code] = _combined(lost, one, 1)

    def begin(self) -> None:
        """Start a new session: its reports contain the losses that no earlier session acknowledged."""
        with self._lock:
            known, self._known = {each.code: each for each in self._known}, ()
            left = {
                code: _combined(lost, known[code], -1) if code in known else lost for code, lost in self._untold.items()
            }
            self._untold = {code: lost for code, lost in left.items() if _counts(lost)}

    def report(self) -> tuple[Lost, ...]:
        """Return all losses of this session; () if its server knows them already."""
        with self._lock:
            all_of_it = tuple(self._untold.values())
            return () if all_of_it == self._known else all_of_it

    def acknowledged(self, report: tuple[Lost, ...]) -> None:
        """Record that the server of this session has answered a PING with this report."""
        if report:
            with self._lock:
                self._known = report


def _combined(one: Lost, other: Lost, sign: int) -> Lost:
    amounts = {name: min(max(getattr(one, name) + sign * getattr(other, name), 0), MOST_LOST) for name in LOST_AMOUNTS}
    return Lost(one.code, **amounts)


def _counts(lost: Lost) -> bool:
    return any(getattr(lost, name) for name in LOST_CALLS)
