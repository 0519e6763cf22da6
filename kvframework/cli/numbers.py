"""The one form of measured numbers on a terminal: few digits, never an exponent. And of sizes, times and counts that a
user gives."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvframework.api.options import ByteSize


_MOST_PLACES = 12
_SECONDS = {"us": 1e-6, "ms": 1e-3, "": 1, "s": 1, "m": 60, "min": 60, "h": 3600, "d": 86_400}
_COUNTS = {"": 1, "k": 10**3, "M": 10**6, "G": 10**9}
_MOST_SECONDS = 366 * 86_400


def short_number(value: float, digits: int = 3) -> str:
    """Return `value` with `digits` significant digits and without needless zeros: 1687, 12.3, 0.5, 0.000012. Digits
    before the point are all there."""
    if not value or not math.isfinite(value):
        return f"{value:.0f}"
    places = digits - 1 - math.floor(math.log10(abs(value)))
    text = f"{value:.{min(max(places, 0), _MOST_PLACES)}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def short_count(value: float) -> str:
    """Return an amount with three digits and a unit of thousands: 12, 9999, 12.3k, 4.56M; less than ten thousand things
    are counted out."""
    if (value == int(value) and abs(value) < 10_000) or not math.isfinite(value):
        return f"{value:.0f}"
    for unit in ("", "k", "M", "G"):
        if abs(value) < 999.5:
            return short_number(value) + unit
        value /= 1000
    return f"{short_number(value)}T"


def short_duration(seconds: float) -> str:
    """Return a time in its largest fitting unit: 12 s, 34 min, 5 h, 6 d."""
    for limit, length, unit in ((120, 1, "s"), (7200, 60, "min"), (172_800, 3600, "h")):
        if seconds < limit:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds / 86_400:.0f} d"


def parsed_duration(text: str, *, least: float = 1e-9) -> float:
    """Return the seconds of a time such as `90`, `0.5ms`, `90s`, `10m`, `1.5h` or `2d`. Raises `ValueError` with the
    expected form."""
    seconds = _parsed(text, _SECONDS)
    if seconds is None or not least <= seconds <= _MOST_SECONDS:
        most = f"up to {_MOST_SECONDS / 86_400:.0f}d"
        raise ValueError(f"expected a time such as 0.5ms, 90s, 10m or 2h, {most}, found {text!r}")
    return seconds


def parsed_count(text: str) -> float:
    """Return a positive number such as `2000`, `20k` or `1.5M`. Raises `ValueError` with the expected form."""
    count = _parsed(text, _COUNTS)
    if not count:
        raise ValueError(f"expected a positive number such as 25000 or 25k, found {text!r}")
    return count


def parsed_size(text: str) -> ByteSize:
    """Return the bytes of a size such as `64MiB` or `3GB`, one at least. Raises `ValueError` with the expected form."""
    from kvframework.api.options import ByteSize

    size = ByteSize.parse(text)
    if not size:
        raise ValueError(f"expected a size such as 512MiB or 4TB, found {text!r}")
    return size


def _parsed(text: str, units: Mapping[str, float]) -> float | None:
    found = re.fullmatch(rf"\s*(\d{{1,12}}(?:\.\d{{1,12}})?)\s*({'|'.join(units)})\s*", text)
    return float(found[1]) * units[found[2]] if found else None
