"""What a counter counts, declared once: the status document, the log, metrics and docs follow from it."""

from __future__ import annotations

import threading
from collections.abc import Mapping

import msgspec

__all__ = ["Counter", "Counts"]


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
        """Raises `KeyError` for a counter that was not declared."""
        with self._lock:
            self._values[name] += amount

    def status(self) -> Mapping[str, object]:
        """Return the values and what they mean, for the status document."""
        return {
            name: {"value": self._values[name], "unit": of.unit, "meaning": of.meaning, "trouble": of.trouble}
            for name, of in self._declared.items()
        }
