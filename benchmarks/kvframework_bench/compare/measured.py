"""The figures of a document by their places: "requests LOOKUP 1k, hit, tokens 1024: ratio". Pure."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from kvframework_bench.compare.readings import NOT_NAMING, READINGS, Reading
from kvframework_bench.rounds import Latency, Spread

# From so many samples on the p99 is a figure of its own, and not the largest of a few.
_SAMPLES_OF_P99 = 200


class Measured(msgspec.Struct, frozen=True):
    """One figure. `low` to `high` is the range of its rounds, None where it is not known. `tail`: a p99. `judged`: its
    value is that of the build; False for an absolute figure beside ratios, which say it without the machine."""

    value: float
    reading: Reading
    low: float | None = None
    high: float | None = None
    tail: bool = False
    judged: bool = True


def measured(figures: msgspec.Struct) -> dict[str, Measured]:
    """Return what can be compared, by its place. A row's place is made of its fields that are no figures, so the same
    row of two documents was measured with the same sizes."""
    found: dict[str, Measured] = {}
    for place, figure in _of_struct(figures, ""):
        name, count = place, 1
        while name in found:
            count += 1
            name = f"{place} #{count}"
        found[name] = figure
    return found


def settings(figures: msgspec.Struct) -> dict[str, object]:
    """Return the plain fields of the figures themselves, with which the whole document was measured."""
    return dict(_naming(figures))


def _of_struct(struct: msgspec.Struct, place: str) -> Iterator[tuple[str, Measured]]:
    readings = READINGS.get(type(struct), {})
    values = {name: getattr(struct, name) for name in struct.__struct_fields__}
    has_ratio = any(
        reading is not None and reading.ratio and values[name] is not None for name, reading in readings.items()
    )
    for name, value in values.items():
        reading, here = readings.get(name), f"{place} {name}".strip()
        if value is None or (name in readings and reading is None):
            continue
        if reading is not None:
            yield from _of_value(value, here, reading, judged=reading.ratio or not has_ratio)
        for each in value if isinstance(value, list) else [value]:
            if isinstance(each, msgspec.Struct) and reading is None:
                named = ", ".join(what if isinstance(what, str) else f"{of} {what}" for of, what in _naming(each))
                yield from _of_struct(each, f"{here} {named}:" if named else here)


def _of_value(value: object, place: str, reading: Reading, *, judged: bool) -> Iterator[tuple[str, Measured]]:
    if isinstance(value, Spread):
        low, high = (value.min, value.max) if value.min < value.max else (None, None)  # one round has no range
        yield place, Measured(value.median, reading, low, high, judged=judged)
    elif isinstance(value, Latency):
        yield f"{place} p50", Measured(value.p50_us, reading, judged=judged)
        if value.samples >= _SAMPLES_OF_P99:
            yield f"{place} p99", Measured(value.p99_us, reading, tail=True, judged=judged)
    elif isinstance(value, (int, float)):
        yield place, Measured(float(value), reading, judged=judged)


def _naming(struct: msgspec.Struct) -> Iterator[tuple[str, object]]:
    for name in struct.__struct_fields__:
        value = getattr(struct, name)
        figure = name in READINGS.get(type(struct), {}) or name in NOT_NAMING or name.startswith("target_")
        if isinstance(value, (str, int)) and not figure:
            yield name, value
