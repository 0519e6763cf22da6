"""Owns what becomes of a part of a bench that cannot be measured here: it is named, and the others go on."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import TypeVar

import msgspec

from kvframework.bench.errors import BenchUnavailable

T = TypeVar("T")


class NotMeasured(msgspec.Struct, frozen=True):
    what: str
    why: str
    hint: str


def attempt(not_measured: list[NotMeasured], what: str, make: Callable[[], T]) -> T | None:
    """What `make` gives; None, and a line more in `not_measured`, if it raises `BenchUnavailable`."""
    try:
        return make()
    except BenchUnavailable as error:
        not_measured.append(NotMeasured(what, error.fact, error.hint))
        return None


def require_torch() -> None:
    """Raises `BenchUnavailable` where no engine's tensors can be played. Imports nothing."""
    missing = [name for name in ("torch", "numpy") if importlib.util.find_spec(name) is None]
    if missing:
        raise BenchUnavailable(f"not installed: {', '.join(missing)}", hint='pip install "kvframework[torch]"')
