"""Counters, declared once: the status document, the log, metrics and docs follow from it; and histograms."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from math import log2

import msgspec

__all__ = ["Counter", "Counts", "Histogram"]

_PER_OCTAVE = 8


class Counter(msgspec.Struct, frozen=True):
    """A number that begins at 0 with the server and only grows. `unit` is what it counts, in the plural, and `meaning`
    what happened to these: "objects", "had no room in L1". `trouble`: growth wants an operator, so the log and
    `kvframework status` report it. `metric` and `label`, of the core's counters, are the family of metrics that shows
    it, and the value of that family's last label; "": the counter's own name."""

    unit: str
    meaning: str = ""
    trouble: bool = False
    metric: str = ""
    label: str = ""


class Counts:
    """The values of a plugin's own counters. What its `status` returns has them as `counters`: they are reported and
    become metrics as the core's do, by the name of the tier or the transport. Thread-safe."""

    def __init__(self, **declared: Counter) -> None:
        self._declared = declared
        self._values = dict.fromkeys(declared, 0)
        self._lock = threading.Lock()

    def __getitem__(self, name: str) -> int:
        return self._values[name]

    def add(self, name: str, amount: int = 1) -> None:
        """Raise `KeyError` for a counter that was not declared."""
        with self._lock:
            self._values[name] += amount

    def status(self) -> Mapping[str, object]:
        """Return the values and what they mean, for the status document."""
        return {
            name: {"value": self._values[name], "unit": of.unit, "meaning": of.meaning, "trouble": of.trouble}
            for name, of in self._declared.items()
        }


class Histogram:
    """A histogram of durations or sizes. Its buckets grow by 9 %, from `first` over `octaves` doublings; smaller values
    count in the first bucket, larger ones in the last. A quantile is accurate to 5 %. Not thread-safe."""

    __slots__ = ("_buckets", "_first", "_last", "_scale", "count", "total")

    def __init__(self, first: float, octaves: int) -> None:
        self.count = 0
        self.total = 0.0
        self._first = first
        self._scale = 1.0 / first
        self._last = _PER_OCTAVE * octaves - 1
        self._buckets = [0] * (self._last + 1)

    def add(self, value: float) -> None:
        """Count one duration of `value` seconds. Never blocks."""
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
