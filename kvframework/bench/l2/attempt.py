"""Owns what becomes of a part that cannot be measured here: it is named, and the others go on."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from kvframework.bench.errors import BenchUnavailable
from kvframework.bench.l2.document import NotMeasured

T = TypeVar("T")


def attempt(not_measured: list[NotMeasured], what: str, make: Callable[[], T]) -> T | None:
    """What `make` gives; None, and a line more in `not_measured`, if it raises `BenchUnavailable`."""
    try:
        return make()
    except BenchUnavailable as error:
        not_measured.append(NotMeasured(what, error.fact, error.hint))
        return None
