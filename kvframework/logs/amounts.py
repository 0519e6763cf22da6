"""A number and what it counts, for sentences that people read. Pure."""

from __future__ import annotations

_UNITS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "us"))


def counted(amount: int, plural: str) -> str:
    """ "1 lease", "2 leases"; for plurals that end with an s."""
    return f"{amount} {plural if amount != 1 else plural.removesuffix('s')}"


def timed(seconds: float) -> str:
    """ "38 us", "1.6 ms", "0 us", "1200 s": three digits at most behind the unit's first, and never an exponent."""
    size, unit = next((each for each in _UNITS if abs(seconds) >= 0.9995 * each[0]), _UNITS[-1])
    value = seconds / size
    text = f"{value:.{0 if abs(value) >= 99.95 else 1 if abs(value) >= 9.995 else 2}f}"
    return f"{text.rstrip('0').rstrip('.') if '.' in text else text} {unit}"
