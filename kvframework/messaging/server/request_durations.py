"""The durations of requests, from the receipt to the answer, by type. Filled by the serving thread, read by any."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from kvframework.histogram import Histogram

# From 10 us to 10 s.
FIRST_S, OCTAVES = 1e-5, 20


class RequestDurations:
    """A histogram for each of the request types `names`, which are known from the start."""

    def __init__(self, names: Iterable[str]) -> None:
        self._histograms = {name: Histogram(FIRST_S, OCTAVES) for name in names}

    def add(self, name: str, seconds: float) -> None:
        """Count one answer, an error too. Types of no request, which strangers may send, are not counted."""
        histogram = self._histograms.get(name)
        if histogram is not None:
            histogram.add(seconds)

    def status(self) -> dict[str, Any]:
        """Return the histograms by request type, see `Histogram.octaves`."""
        return {name: histogram.octaves() for name, histogram in self._histograms.items()}
