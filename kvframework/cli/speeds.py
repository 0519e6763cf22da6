"""The speed of a tier as text on a command line. Pure."""

from __future__ import annotations

import math
import re

from kvframework.api.options import ByteSize
from kvframework.errors import SimulationError
from kvframework.simulation.settings import SlowTime, TierSpeed

FORM = "NAME=RATE[,write=RATE][,latency=TIME][,capacity=SIZE][,slow=FACTOR@FROM-TO]"
_UNITS_S = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0, "m": 60.0, "h": 3600.0}


def parse_tier(text: str) -> TierSpeed:
    """Parse the value of `--tier`. Raises `SimulationError`."""
    where = f"--tier {text}"
    name, equals, rest = text.partition("=")
    rate, *parts = rest.split(",")
    if not (name and equals):
        raise SimulationError(
            "a tier without a speed", where=where, available=FORM, hint=f"--tier {name or 'redis'}=3GB/s"
        )
    write, latency_s, capacity, slow = None, 0.0, None, []
    for part in parts:
        key, _, value = part.partition("=")
        if key == "write":
            write = math.inf if value == "free" else parse_rate(value, where)
        elif key == "latency":
            latency_s = parse_seconds(value, where)
        elif key == "capacity":
            capacity = parse_size(value, where)
        elif key == "slow":
            slow.append(_slow(value, where))
        else:
            raise SimulationError(f"{key!r} is nothing of a tier", where=where, available=FORM)
    return TierSpeed(name, parse_rate(rate, where), write, latency_s, capacity, slow)


def parse_rate(text: str, where: str) -> float:
    """Return bytes a second: `3GB/s`. Raises `SimulationError`."""
    size, slash, second = text.partition("/")
    try:
        if slash and second == "s":
            return float(ByteSize.parse(size))
    except ValueError:
        pass  # bits, a misspelt unit
    raise SimulationError(f"{text!r} is no rate", where=where, available="bytes a second, such as 3GB/s or 800MiB/s")


def parse_size(text: str, where: str) -> int:
    """Return bytes: `64MiB`. Raises `SimulationError`."""
    try:
        return ByteSize.parse(text)
    except ValueError:
        raise SimulationError(f"{text!r} is no size", where=where, available="such as 128KiB, 64MiB or 3GB") from None


def parse_seconds(text: str, where: str) -> float:
    """Return seconds: `0.5ms`, `10min`. Raises `SimulationError`."""
    match = re.fullmatch(r"(\d{1,12}(?:\.\d{1,12})?)(us|ms|s|min|m|h)", text)
    if match is None:
        raise SimulationError(f"{text!r} is no time", where=where, available="such as 0.5ms, 30s, 10min or 1h")
    return float(match[1]) * _UNITS_S[match[2]]


def _slow(text: str, where: str) -> SlowTime:
    match = re.fullmatch(r"(\d{1,6}(?:\.\d{1,12})?)@([^-]+)-([^-]+)", text)
    if match is None:
        raise SimulationError(
            f"{text!r} is no slow time", where=where, available="FACTOR@FROM-TO, such as 0.2@10min-20min"
        )
    return SlowTime(parse_seconds(match[2], where), parse_seconds(match[3], where), float(match[1]))
