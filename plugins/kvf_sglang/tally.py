"""The backend's counts, as SGLang's storage metrics take them. Thread-safe."""

from __future__ import annotations

import threading
from collections import Counter
from typing import Literal, NamedTuple

Way = Literal["prefetch", "backup"]
# What nobody takes is dropped.
_MOST = 4096


class Taken(NamedTuple):
    """Pages and GB/s of each transfer since the last time, by way."""

    pages: dict[Way, list[int]]
    gb_per_s: dict[Way, list[float]]


class Tally:
    """`totals` are counts since the start: pages asked for and found, moved each way, failed transfers."""

    def __init__(self) -> None:
        self.totals: Counter[str] = Counter()
        self._lock = threading.Lock()
        self._taken = _empty()

    def found(self, pages: int, asked: int) -> None:
        with self._lock:
            self.totals["asked_pages"] += asked
            self.totals["found_pages"] += pages

    def moved(self, way: Way, pages: int, nbytes: int, seconds: float) -> None:
        with self._lock:
            self.totals[f"{way}_pages"] += pages
            self.totals[f"failed_{way}s"] += not pages
            if pages and len(self._taken.pages[way]) < _MOST:
                self._taken.pages[way].append(pages)
                self._taken.gb_per_s[way].append(nbytes / max(seconds, 1e-9) / 1e9)

    def take(self) -> Taken:
        with self._lock:
            taken, self._taken = self._taken, _empty()
        return taken


def _empty() -> Taken:
    return Taken({"prefetch": [], "backup": []}, {"prefetch": [], "backup": []})
