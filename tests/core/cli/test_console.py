"""What a terminal shows: letters that can be shown, whoever chose them; numbers in their one form; and lines of 80
columns, of which nothing is cut off."""

from __future__ import annotations

import contextlib
import io
import json
import math
import re
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.table import Table
from rich.text import Text

from kvf_plan.cli.amounts import parsed_count, parsed_duration, parsed_size
from kvframework.api.console import PlainConsole
from kvframework.api.toml import toml_value
from kvframework.text import short_count, short_duration, short_number
from tests.core.cli.command import run
from tests.core.config.test_toml import refusal
from tests.core.registry.fake_distributions import install

HOSTILE = "model\x1b]0;owned\x07\x9b2J\u202e\U000e0041\udcff"
SHOWN = "model\\u001b]0;owned\\u0007\\u009b2J\\u202e\\udb40\\udc41\\udcff"


def printed(what: object) -> str:
    out = io.StringIO()
    PlainConsole(file=out, width=100, highlight=False).print(what)
    return out.getvalue()


def test_a_text_commands_no_terminal() -> None:
    assert printed(Text(f"{HOSTILE}\nnext")) == f"{SHOWN}\nnext\n".replace("\\u0007", "")
    table = Table("name")
    table.add_row(Text(HOSTILE))
    assert "\x1b" not in printed(table)
    assert "\udcff" not in printed(table)


def test_what_is_shown_of_json_is_the_same_json() -> None:
    text = json.dumps(HOSTILE, ensure_ascii=False)
    shown = printed(Text(text))
    assert shown.isascii()
    assert json.loads(shown) == json.loads(json.dumps(HOSTILE))


def test_a_value_as_toml_can_be_shown() -> None:
    text = "a\x1b\x7f\x9b\u202e\U000e0041b"
    shown = toml_value(text)
    assert shown.isprintable()
    assert refusal(f"a = {shown}") is None


def test_the_name_of_a_file_that_is_no_text() -> None:
    name = b"/\xff\x1b.toml".decode(sys.getfilesystemencoding(), "surrogateescape")
    done = run("config", "check", name)
    assert done.returncode == 2
    assert "/\\udcff\\u001b.toml" in done.stderr


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


WIDTH = 80


def on_a_terminal(*arguments: str, site: Path | None = None) -> tuple[subprocess.CompletedProcess[str], list[str]]:
    done = run(*arguments, site=site, FORCE_COLOR="1", TERM="xterm", COLUMNS=str(WIDTH))
    text = re.sub(r"\x1b\[[0-9;]*m", "", done.stdout)
    return done, [line.rstrip() for line in text.splitlines()]


@pytest.mark.parametrize(
    "command",
    [
        "plugins list",
        "plugins info tier.redis",
        "plugins info layout.paged",
        "plugins check tier.redis",
        "config check",
    ],
)
def test_views(command: str) -> None:
    _, lines = on_a_terminal(*command.split())
    assert [line for line in lines if len(line) > WIDTH] == []
    assert "…" not in "".join(lines)


def test_a_reason_of_a_plugin_is_read_as_a_sentence(site: Path) -> None:
    reason = "there is no driver of Acme here, libacme.so.1 cannot be loaded; install one, or give the container a card"
    install(site, "acme", {"codec.bad": "acme_bad"}, {"acme_bad": f"raise OSError({reason!r})"})
    _, lines = on_a_terminal("plugins", "list", site=site)
    assert max(map(len, lines)) <= WIDTH
    assert lines[0].split() == ["NAME", "DISTRIBUTION", "VERSION", "STATUS"]
    start = next(index for index, line in enumerate(lines) if line.startswith("codec.bad: "))
    assert reason in " ".join(lines[start:])
