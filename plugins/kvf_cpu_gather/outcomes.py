"""Owns sums of what became of a store's objects. Pure."""

from __future__ import annotations

from kvframework.api import StoreOutcome


def plus(one: StoreOutcome, other: StoreOutcome) -> StoreOutcome:
    """What became of the objects of both."""
    return StoreOutcome(
        stored=one.stored + other.stored,
        present=one.present + other.present,
        in_flight=one.in_flight + other.in_flight,
        dropped=one.dropped + other.dropped,
    )
