"""The speed of a tier as text on a command line. Pure; sizes and times are those of `kvframework.text`."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from functools import partial
from typing import TypeVar

from kvf_plan.cli.amounts import parsed_duration, parsed_size
from kvf_plan.errors import SimulationError
from kvf_plan.simulation.settings import SlowTime, TierSpeed
from kvframework.api.plugin import ByteSize

FORM = "NAME=RATE[,write=RATE][,latency=TIME][,capacity=SIZE][,slow=FACTOR@FROM-TO]"
T = TypeVar("T")


def parse_tier(text: str) -> TierSpeed:
    """Parse the value of `--tier`. Raises `SimulationError`."""
    where = f"--tier {text}"
    name, equals, rest = text.partition("=")
    rate, *parts = rest.split(",")
    if not (name and equals):
        raise SimulationError(
            "the tier's speed is missing", where=where, available=FORM, hint=f"--tier {name or 'redis'}=3GB/s"
        )
    write, latency_s, capacity, slow = None, 0.0, None, []
    for part in parts:
        key, _, value = part.partition("=")
        if key == "write":
            write = math.inf if value == "free" else parse_rate(value, where)
        elif key == "latency":
            latency_s = _seconds(value, where)
        elif key == "capacity":
            capacity = _parsed(parsed_size, value, where)
        elif key == "slow":
            slow.append(_slow(value, where))
        else:
            raise SimulationError(f"{key!r} is not an option of a tier", where=where, available=FORM)
    return TierSpeed(name, parse_rate(rate, where), write, latency_s, capacity, slow)


def parse_rate(text: str, where: str) -> float:
    """Return bytes a second: `3GB/s`. Raises `SimulationError`."""
    size, slash, second = text.partition("/")
    try:
        if slash and second == "s":
            return float(ByteSize.parse(size))
    except ValueError:
        pass  # bits, a misspelt unit
    raise SimulationError(
        f"{text!r} is not a rate", where=where, available="bytes per second, such as 3GB/s or 800MiB/s"
    )


def _slow(text: str, where: str) -> SlowTime:
    match = re.fullmatch(r"(\d{1,6}(?:\.\d{1,12})?)@([^-]+)-([^-]+)", text)
    if match is None:
        raise SimulationError(
            f"{text!r} is not a slow period", where=where, available="FACTOR@FROM-TO, such as 0.2@10min-20min"
        )
    return SlowTime(_seconds(match[2], where), _seconds(match[3], where), float(match[1]))


def _seconds(text: str, where: str) -> float:
    return _parsed(partial(parsed_duration, least=0.0), text, where)


def _parsed(parse: Callable[[str], T], text: str, where: str) -> T:
    try:
        return parse(text)
    except ValueError as error:
        raise SimulationError(str(error), where=where, available=FORM) from None
