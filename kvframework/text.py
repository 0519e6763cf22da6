"""Text for people: numbers of few digits, amounts and times with their unit, and what others sent on one line. Pure."""

from __future__ import annotations

import math

_MOST_PLACES = 12


def counted(amount: int, plural: str) -> str:
    """ "1 lease", "2 leases"; for plurals that end with an s."""
    return f"{amount} {plural if amount != 1 else plural.removesuffix('s')}"


def short_number(value: float, digits: int = 3) -> str:
    """Return `value` with `digits` significant digits and without needless zeros: 1687, 12.3, 0.5, 0.000012. Digits
    before the point are all there."""
    if not value or not math.isfinite(value):
        return f"{value:.0f}"
    places = digits - 1 - math.floor(math.log10(abs(value)))
    text = f"{value:.{min(max(places, 0), _MOST_PLACES)}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def short_count(value: float) -> str:
    """Return an amount with three digits and a unit: 12, 9999, 12.3k, 4.56M; below ten thousand all digits."""
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


def one_line(text: str) -> str:
    """The text on one line: lines are joined by "; ", and unprintable characters are written as escape sequences."""
    return visible("; ".join(filter(None, (line.strip() for line in text.splitlines()))))


def described(error: BaseException) -> str:
    """An error with its type, on one line: "ValueError: no such key", "KeyError"."""
    return " ".join(f"{type(error).__name__}: {error}".split()).removesuffix(":")


def visible(line: str) -> str:
    """A line with its unprintable characters as escape sequences."""
    return "".join(letter if letter.isprintable() else ascii(letter)[1:-1] for letter in line)


def plain(value: object) -> object:
    """A value of a type of its own as JSON has it, a size as its number: a hook of msgspec's encoders."""
    return int(value) if isinstance(value, int) else str(value)
