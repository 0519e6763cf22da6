"""What became of a store's objects: sums, and that it is unknown. Pure."""

from __future__ import annotations

from kvframework.api import StoreOutcome
from kvframework.errors import KVFrameworkError


def plus(one: StoreOutcome, other: StoreOutcome) -> StoreOutcome:
    """What became of the objects of both."""
    return StoreOutcome(
        stored=one.stored + other.stored,
        present=one.present + other.present,
        in_flight=one.in_flight + other.in_flight,
        dropped=one.dropped + other.dropped,
        unknown=one.unknown + other.unknown,
    )


class InDoubt(Exception):
    """The server did not say in time, which is `error`, what it made of objects that it has got."""

    def __init__(self, error: KVFrameworkError, outcome: StoreOutcome) -> None:
        super().__init__(str(error))
        self.error = error
        self.outcome = outcome
