"""The one form of numbers: readable, near, and never with an exponent."""

from __future__ import annotations

import contextlib
import math
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvf_plan.cli.amounts import parsed_count, parsed_duration, parsed_size
from kvframework.text import short_count, short_duration, short_number

ROOT = Path(__file__).resolve().parents[3]
# A format with `g` or `e`, which may write an exponent.
EXPONENT = re.compile(r":[<>^+,]?\d*(?:\.\d+)?[geGE]\}")


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (1690.0, "1690"),
        (1_234_567.8, "1234568"),
        (12.34, "12.3"),
        (9.996, "10"),
        (0.523, "0.523"),
        (1.2e-05, "0.000012"),
        (100.0, "100"),
        (0.0, "0"),
        (-0.5, "-0.5"),
        (1e-20, "0"),
        (math.inf, "inf"),
    ],
)
def test_numbers_are_short(value: float, text: str) -> None:
    assert short_number(value) == text


@given(st.floats(allow_nan=False, allow_infinity=False), st.integers(1, 6))
def test_no_number_has_an_exponent(value: float, digits: int) -> None:
    assert re.fullmatch(r"-?\d+(?:\.\d*[1-9])?", short_number(value, digits))


@given(st.floats(min_value=1e-6, max_value=1e12), st.integers(2, 6))
def test_a_number_is_near(value: float, digits: int) -> None:
    assert float(short_number(value, digits)) == pytest.approx(value, rel=0.5 * 10.0 ** (1 - digits) + 1e-9)


def test_commands_format_numbers_in_this_one_place() -> None:
    found = [
        f"{file.relative_to(ROOT)}: {line.strip()}"
        for folder in ("kvframework/cli", "kvframework/service", "benchmarks/kvframework_bench")
        for file in sorted((ROOT / folder).rglob("*.py"))
        for line in file.read_text().splitlines()
        if EXPONENT.search(line)
    ]
    assert found == []


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"),
        (9999, "9999"),
        (12_345, "12.3k"),
        (0.0333, "0.0333"),
        (999.96, "1k"),
        (4.56e6, "4.56M"),
        (7.2e15, "7200T"),
    ],
)
def test_amounts_have_three_digits_and_a_unit(value: float, text: str) -> None:
    assert short_count(value) == text


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.4, "0 s"), (119, "119 s"), (300, "5 min"), (9000, "2 h"), (864_000, "10 d")]
)
def test_times_have_their_largest_unit(seconds: float, text: str) -> None:
    assert short_duration(seconds) == text


@given(st.text(max_size=20) | st.from_regex(r"\s*[0-9.]{1,8}\s*(us|ms|s|m|min|h|d|k|M|KiB|GB)?\s*", fullmatch=True))
def test_what_is_given_is_a_bounded_number_or_refused(text: str) -> None:
    for parse, least in ((parsed_duration, 1e-9), (parsed_count, 1e-12), (parsed_size, 1)):
        with contextlib.suppress(ValueError):
            assert least <= parse(text) < math.inf


@pytest.mark.parametrize(("text", "count"), [("2000", 2000), ("20k", 20_000), ("1.5M", 1.5e6), ("0.5", 0.5)])
def test_counts_that_a_user_gives(text: str, count: float) -> None:
    assert parsed_count(text) == count
