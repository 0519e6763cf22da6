"""The curve of the hit rate of L1 over its capacity, from what lookups find among the ghosts. Pure.

A chunk of a lookup counts at the first capacity that would still hold it and all chunks before it. The curve holds for
a policy by recency; for another one it is an estimate.
"""

from __future__ import annotations

from collections.abc import Iterable

from kvframework.storage.l1.evicted_stack import EvictedStack

# The capacities: four steps for each doubling, up to eight times the present one.
_STEPS = 12
_STEPS_PER_DOUBLING = 4
_SEGMENTS_PER_CAPACITY = 16
# Places are computed again after this share of a capacity has been evicted or has come back.
_STALE = 64


class CapacityCurve:
    """Sums since the start. `capacity` is L1's, in the units of the stack."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._extra = [round(capacity * (2 ** (step / _STEPS_PER_DOUBLING) - 1)) for step in range(1, _STEPS + 1)]
        self.stack = EvictedStack(capacity // _SEGMENTS_PER_CAPACITY, self._extra[-1])
        # The oldest place of each capacity.
        self._places = self.stack.places(self._extra)
        self._moved = 0
        self._asked = 0
        self._hits = 0
        self._gained = [0] * _STEPS

    def looked_up(self, asked: int, hits: int) -> None:
        """Count a lookup's tokens, and those that L1 holds."""
        self._asked += asked
        self._hits += hits

    def missed(self, places: Iterable[float], tokens: int) -> None:
        """Count the chunks behind the hit of a lookup, each of `tokens` tokens, by their places in the stack, in the
        order of the prompt up to the first that no larger L1 would hold."""
        if self.stack.moved - self._moved > self._capacity // _STALE:
            self._moved = self.stack.moved
            self._places = self.stack.places(self._extra)
        step, least, oldest = 0, self._places[0], self._places[-1]
        for place in places:
            if place < least:
                if place < oldest:
                    return
                while place < self._places[step]:
                    step += 1
                least = self._places[step]
            self._gained[step] += tokens

    def rates(self, unit: int, most: float) -> list[dict[str, float]]:
        """Return the capacities in bytes, of `unit` bytes a unit, and their hit rates: the present one first, then
        those that are larger by at most `most` units."""
        asked = max(self._asked, 1)
        hits = self._hits
        rows: list[dict[str, float]] = [{"capacity_bytes": self._capacity * unit, "hit_rate": hits / asked}]
        for extra, gained in zip(self._extra, self._gained, strict=True):
            if extra > most:
                break
            hits += gained
            rows.append({"capacity_bytes": (self._capacity + extra) * unit, "hit_rate": hits / asked})
        return rows
