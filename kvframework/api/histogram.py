"""A histogram of fixed size, of durations or sizes. Pure; 0.3 us a value."""

from __future__ import annotations

from math import log2

__all__ = ["Histogram"]

_PER_OCTAVE = 8


class Histogram:
    """Counts values in buckets that grow by 9 %, from `first` over `octaves` doublings; smaller values count in the
    first bucket, larger ones in the last. A quantile is accurate to 5 %. Not thread-safe."""

    __slots__ = ("_buckets", "_first", "_last", "_scale", "count", "total")

    def __init__(self, first: float, octaves: int) -> None:
        self.count = 0
        self.total = 0.0
        self._first = first
        self._scale = 1.0 / first
        self._last = _PER_OCTAVE * octaves - 1
        self._buckets = [0] * (self._last + 1)

    def add(self, value: float) -> None:
        scaled = value * self._scale
        at = int(log2(scaled) * _PER_OCTAVE) if scaled > 1.0 else 0
        self._buckets[at if at < self._last else self._last] += 1
        self.count += 1
        self.total += value

    def quantile(self, q: float) -> float:
        """Return the value that the fraction `q` of the values does not exceed; 0 without values."""
        wanted = q * self.count
        seen = 0
        for index, number in enumerate(self._buckets):
            seen += number
            if number and seen >= wanted:
                return self._first * float(2 ** ((index + 0.5) / _PER_OCTAVE))
        return 0.0

    def octaves(self) -> dict[str, object]:
        """Return the histogram for the status document: `counts[i]` values are less than `first * 2 ** (i + 1)` and not
        less than half of that; the first and the last bucket have no other end."""
        counts = [sum(self._buckets[at : at + _PER_OCTAVE]) for at in range(0, self._last + 1, _PER_OCTAVE)]
        return {"first": self._first, "counts": counts, "sum": self.total}
