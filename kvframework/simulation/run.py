"""The simulation of a trace; see the package."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from kvframework.simulation.outcome import Outcome
from kvframework.simulation.settings import Settings


def simulate(trace: Iterable[Any], settings: Settings) -> Outcome:
    """Run the requests of a trace, in its order, and return what came of them."""
    raise NotImplementedError
