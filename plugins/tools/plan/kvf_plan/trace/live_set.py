"""The live set: the chunks that will be asked for again. Pure.

A policy that knew the future would need as much and no more; below it every policy loses hits that it could have.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable

import msgspec


class LiveSet(msgspec.Struct, frozen=True):
    """Counts of chunks: `most` that will be asked for again, at most at once, `at` seconds; `reused` that ever were,
    `stored` that were ever seen; `hits` of `uses` in an endless cache."""

    most: int
    at: float
    reused: int
    stored: int
    uses: int
    hits: int

    @property
    def hit_rate(self) -> float:
        """What an endless cache has of all uses of whole chunks."""
        return self.hits / self.uses if self.uses else 0.0


class LiveCount:
    """The count of a live set, one request after the other. Keeps an entry of a dict for each chunk that differs, and
    16 bytes a request."""

    def __init__(self) -> None:
        # By chunk, the number of the last request that used it; its complement if that was the first one.
        self._last: dict[int, int] = {}
        self._at = array("d")
        # By request, how many chunks begin to be worth keeping with it, less those that are no more.
        self._worth = array("q")
        self._uses = self._reused = 0

    def add(self, at: float, chunks: Iterable[int]) -> None:
        """Count the chunks of the next request."""
        number, last, worth = len(self._worth), self._last, self._worth
        self._at.append(at)
        worth.append(0)
        for chunk in chunks:
            self._uses += 1
            before = last.get(chunk)
            if before is None:
                last[chunk] = ~number
                continue
            if before < 0:
                before = ~before
                self._reused += 1
            worth[before] += 1
            worth[number] -= 1
            last[chunk] = number

    def found(self) -> LiveSet:
        """Return the live set of all requests so far."""
        live = most = 0
        at = 0.0
        for when, change in zip(self._at, self._worth, strict=True):
            live += change
            if live > most:
                most, at = live, when
        return LiveSet(most, at, self._reused, len(self._last), self._uses, self._uses - len(self._last))
