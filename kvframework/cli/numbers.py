"""The one form of measured numbers on a terminal: few digits, never an exponent."""

from __future__ import annotations

import math

_MOST_PLACES = 12


def short_number(value: float, digits: int = 3) -> str:
    """Return `value` with `digits` significant digits and without needless zeros: 1687, 12.3, 0.5, 0.000012. Digits
    before the point are all there."""
    if not value or not math.isfinite(value):
        return f"{value:.0f}"
    places = digits - 1 - math.floor(math.log10(abs(value)))
    text = f"{value:.{min(max(places, 0), _MOST_PLACES)}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text
