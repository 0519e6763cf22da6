"""What `kvframework top` shows of a minute: rates, rows, their order, and lines that fit any screen."""

from __future__ import annotations

import copy
import functools
import io
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len

from kvf_observe.top.command import View
from kvf_observe.top.picture import Shown, picture
from kvf_observe.top.views import APART_S, OTHER, SPAN_S, VIEWS, Minute, Window
from kvframework.api.console import PlainConsole
from tests.observe.documents import document

HOSTILE = "a\x1b[2J\nvery \N{RIGHT-TO-LEFT OVERRIDE}[bold]bad[/] \u4e16\u754c :bomb: name"
FIELDS = ("bytes", "objects", "lookups", "asked_tokens", "hit_tokens", "stored_objects", "evicted_objects")
BUSY: dict[str, Any] = {
    "server__uptime_s": 9000.0,
    "lookups__by_model": {"m": {"lookups": 9, "asked_tokens": 1000, "l1_tokens": 300, "l2_tokens": 200}},
}


def use_row(number: int) -> dict[str, int]:
    return dict.fromkeys(FIELDS, number)


def busy(number: int = 1, **places: Any) -> dict[str, Any]:
    rows = {f"{HOSTILE} {each}": use_row(each * number) for each in range(1, 31)}
    made = document(**{**BUSY, **places})
    made["use"] = dict.fromkeys(("models", "tenants", "namespaces", "engines"), rows)
    down = {"state": "open", "state_s": 130.0, "last_error": HOSTILE, "hits": 3 * number, "bytes_read": 4096 * number}
    made["l2"][0] |= {**down, "name": HOSTILE, "latency_ms": {"get_into": {"count": 9, "p50": 0.5, "p99": 1.5}}}
    made["problems"] = [{"where": where, "fact": HOSTILE * 9} for where in ("l2.0", "l1", HOSTILE, "log", "losses")]
    return made


@functools.cache
def shown(*, seconds: float = 60.0) -> Shown:
    return Shown(f"ipc:///{HOSTILE}", Window(busy(3), busy(1), seconds), 1.8e9)


@given(st.lists(st.tuples(st.floats(0.05, 200.0), st.integers(0, 9), st.integers(0, 19)), min_size=1, max_size=60))
def test_rates_are_those_of_the_last_minute_and_of_one_server(steps: list[tuple[float, int, int]]) -> None:
    """Against all documents: the counter grows by `more` each step, and one in ten steps is a restart."""
    minute, at, boot, sum_, uptime = Minute(), 0.0, 0, 0, 9000.0
    seen: list[tuple[float, int]] = []
    for gap, more, chance in steps:
        at, sum_, uptime = at + gap, sum_ + more, uptime + gap
        if chance < 2:
            # The next server answers for the first time `chance` hundred seconds after its start.
            boot, sum_, uptime, seen = boot + 1, more, 100.0 * chance + 0.5, []
        if not seen and uptime < SPAN_S:
            seen.append((at - uptime, 0))
        seen.append((at, sum_))
        new = document(server__boot_id=str(boot), server__uptime_s=uptime, l1__evictions=sum_)
        window = minute.add(new, at)
        began = at - window.seconds
        known = dict(seen)
        nearest = min(known, key=lambda time: abs(time - began))
        assert nearest == pytest.approx(began, abs=1e-6)
        assert window.grown("l1", "evictions") == sum_ - known[nearest]
        later = [time for time in known if time > nearest + APART_S]
        # The least that is a minute or more, or all there is.
        assert window.seconds >= SPAN_S - 1e-6 or nearest == pytest.approx(seen[0][0])
        assert not later or at - min(later) < SPAN_S + 1e-6
        assert len(minute._ring) <= SPAN_S / APART_S + 3
        rate = window.rate(window.grown("l1", "evictions"))
        assert (rate is None) == (window.seconds == 0)


ROWS = st.dictionaries(st.sampled_from(["a", "b", "c", OTHER]), st.integers(0, 1000))


@given(ROWS, ROWS, st.sets(st.sampled_from(["a", "b", "c"])))
def test_what_ended_is_no_sudden_use_of_others(before: dict[str, int], more: dict[str, int], ended: set[str]) -> None:
    """The rates of all rows add up to what happened, also if engines end, whose sums `other` takes over."""
    sums = {name: before.get(name, 0) + more.get(name, 0) for name in {*before, *more, OTHER}}
    for name in ended & set(sums):
        sums[OTHER] += sums.pop(name)
    now, was = (
        {"use": {"engines": {name: use_row(number) for name, number in rows.items()}}} for rows in (sums, before)
    )
    table = VIEWS["engines"]
    heads = [column.head for column in table.columns]
    rows = list(table.rows(Window(now, was, 10.0)))
    assert sum(float(row[heads.index("asked/s")] or 0) for row in rows) == pytest.approx(sum(more.values()) / 10)


def lines_of(view: str, seen: Shown, width: int = 200) -> list[str]:
    console = PlainConsole(width=width, highlight=False, file=io.StringIO())
    console.print(picture(view, seen))
    return console.file.getvalue().splitlines()  # type: ignore[attr-defined]


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("width", [1, 7, 40, 80, 200])
def test_no_line_is_wider_than_its_screen(view: str, width: int) -> None:
    for seen in (shown(), shown(seconds=0), shown()._replace(silent_since=1.7e9, error=HOSTILE)):
        lines = lines_of(view, seen, width)
        assert max(map(cell_len, lines)) <= width
        assert all(line.isprintable() for line in lines)


def test_the_largest_use_of_l1_comes_first_and_its_numbers_are_in_sight() -> None:
    head, *rows = lines_of("models", shown(), 80)[3:]
    assert head.split()[:3] == ["model", "L1", "hit"]
    assert "90 B" in rows[0]
    assert len(rows) == 30


def test_the_overview_says_what_is_wrong_and_what_to_do() -> None:
    text = "\n".join(lines_of("overview", shown()))
    assert "l2.0: a\\x1b[2J; very \\u202e[bold]bad[/]" in text
    assert "see docs/operations.md#tier-down" in text
    assert "see docs/operations.md#arena-not-resident" in text
    assert "see docs/operations.md#what-do-you-see" in text
    assert "and 1 more: kvframework status --check" in text
    assert "open 2 min" in text


def test_what_a_server_of_another_release_does_not_say_is_not_needed() -> None:
    bare = copy.deepcopy(busy())
    for name in ("use", "lookups", "problems", "messaging"):
        del bare[name]
    for name in ("latency_ms", "usage", "bytes_read"):
        bare["l2"][0].pop(name)
    for view in VIEWS:
        assert lines_of(view, shown()._replace(window=Window(bare, bare, 10.0)))


def test_the_views_are_those_of_the_option() -> None:
    assert [each.value for each in View] == list(VIEWS)
