"""The sizes, times and numbers that a user gives to `kvframework plan`, `simulate` and `trace`."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import TypeVar

import typer

from kvframework.api.plugin import ByteSize

T = TypeVar("T")
_SECONDS = {"us": 1e-6, "ms": 1e-3, "": 1, "s": 1, "m": 60, "min": 60, "h": 3600, "d": 86_400}
_COUNTS = {"": 1, "k": 10**3, "M": 10**6, "G": 10**9}
_MOST_SECONDS = 366 * 86_400


def size_of(text: str) -> int:
    """Parse an option that is a size."""
    return _option(parsed_size, text)


def seconds_of(text: str) -> float:
    """Parse an option that is a time."""
    return _option(parsed_duration, text)


def count_of(text: str) -> float:
    """Parse an option that is a positive number, perhaps of thousands."""
    return _option(parsed_count, text)


def _option(parse: Callable[[str], T], text: str) -> T:
    try:
        return parse(text)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None


def parsed_size(text: str) -> ByteSize:
    """Return the bytes of a size such as `64MiB` or `3GB`, one at least. Raises `ValueError` with the expected form."""
    size = ByteSize.parse(text)
    if not size:
        raise ValueError(f"expected a size such as 512MiB or 4TB, found {text!r}")
    return size


def parsed_duration(text: str, *, least: float = 1e-9) -> float:
    """Return the seconds of a time such as `90`, `0.5ms`, `90s`, `10m`, `1.5h` or `2d`. Raises `ValueError` with the
    expected form."""
    seconds = _number(text, _SECONDS)
    if seconds is None or not least <= seconds <= _MOST_SECONDS:
        most = f"up to {_MOST_SECONDS / 86_400:.0f}d"
        raise ValueError(f"expected a time such as 0.5ms, 90s, 10m or 2h, {most}, found {text!r}")
    return seconds


def parsed_count(text: str) -> float:
    """Return a positive number such as `2000`, `20k` or `1.5M`. Raises `ValueError` with the expected form."""
    count = _number(text, _COUNTS)
    if not count:
        raise ValueError(f"expected a positive number such as 25000 or 25k, found {text!r}")
    return count


def _number(text: str, units: Mapping[str, float]) -> float | None:
    found = re.fullmatch(rf"\s*(\d{{1,12}}(?:\.\d{{1,12}})?)\s*({'|'.join(units)})\s*", text)
    return float(found[1]) * units[found[2]] if found else None
