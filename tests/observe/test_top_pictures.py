"""What `kvframework top` shows of a minute: rates, rows, their order, and lines that fit any screen. Pure."""

from __future__ import annotations

import copy
import functools
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len

from kvf_observe.top.command import View
from kvf_observe.top.minute import APART_S, SPAN_S, Minute, Window
from kvf_observe.top.picture import GAP, Shown, fitting, frame, picture
from kvf_observe.top.screen import keys_of
from kvf_observe.top.views import NAMES, OTHER, TABLES, Sorting, State, ordered, pressed
from tests.observe.documents import document

HOSTILE = "a\x1b[2J\nvery \N{RIGHT-TO-LEFT OVERRIDE}[bold]bad[/] \u4e16\u754c :bomb: name"
FIELDS = ("bytes", "objects", "lookups", "asked_tokens", "hit_tokens", "stored_objects", "evicted_objects")
KEYS = [*"123456789qr<>,.? x", "tab", "backtab", "left", "right", ""]
BUSY: dict[str, Any] = {
    "server__uptime_s": 9000.0,
    "lookups__by_model": {"m": {"lookups": 9, "asked_tokens": 1000, "l1_tokens": 300, "l2_tokens": 200}},
}


def use_row(number: int) -> dict[str, int]:
    return dict.fromkeys(FIELDS, number)


def busy(number: int = 1, **places: Any) -> dict[str, Any]:
    """A document of a server that `number` times as much has happened to."""
    rows = {f"{HOSTILE} {each}": use_row(each * number) for each in range(1, 31)}
    made = document(**{**BUSY, **places})
    made["use"] = dict.fromkeys(("models", "tenants", "namespaces", "engines"), rows)
    made["use"]["hot_prefixes"] = [
        {"model": HOSTILE, "prefix": f"{each:08x}", "hit_tokens": each * number, "count": each * number + 5, "error": 5}
        for each in range(1, 17)
    ]
    down = {"state": "open", "state_s": 130.0, "last_error": HOSTILE, "hits": 3 * number, "bytes_read": 4096 * number}
    made["l2"][0] |= {**down, "name": HOSTILE, "latency_ms": {"get_into": {"count": 9, "p50": 0.5, "p99": 1.5}}}
    made["problems"] = [{"where": where, "fact": HOSTILE * 9} for where in ("l2.0", "l1", HOSTILE, "log", "losses")]
    return made


@functools.cache
def shown(*, seconds: float = 60.0) -> Shown:
    return Shown(f"ipc:///{HOSTILE}", Window(busy(3), busy(1), seconds), 1.8e9)


# The minute.


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


# The rows.

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
    table = TABLES["engines"]
    assert table is not None
    heads = [column.head for column in table.columns]
    rows = list(table.rows(Window(now, was, 10.0)))
    assert sum(float(row[heads.index("asked/s")] or 0) for row in rows) == pytest.approx(sum(more.values()) / 10)


@given(st.sampled_from(NAMES[1:]), st.data())
def test_rows_are_in_the_order_of_their_column(name: str, data: st.DataObject) -> None:
    table = TABLES[name]
    assert table is not None
    sorting = Sorting(data.draw(st.integers(0, len(table.columns) - 1)), data.draw(st.booleans()))
    window = shown(seconds=data.draw(st.sampled_from([0.0, 60.0]))).window
    assert window is not None
    rows = ordered(table, window, sorting)
    values: list[Any] = [row[sorting.column] for row in rows]
    known = [value.casefold() if isinstance(value, str) else value for value in values if value is not None]
    down = (table.columns[sorting.column].form is not None) != sorting.reverse
    assert known == sorted(known, reverse=down)
    assert all(value is None for value in values[len(known) :])
    assert sorted(map(repr, rows)) == sorted(map(repr, table.rows(window)))


def test_a_prefix_of_which_the_past_is_unknown_has_no_rate() -> None:
    def prefixes(*entries: tuple[str, int, int, int]) -> dict[str, Any]:
        names = ("prefix", "count", "error", "hit_tokens")
        return {"use": {"hot_prefixes": [{"model": "m", **dict(zip(names, entry, strict=True))} for entry in entries]}}

    table = TABLES["prefixes"]
    assert table is not None
    now = prefixes(("a", 30, 0, 500), ("b", 40, 38, 20), ("c", 9, 0, 9))
    rows = {row[0]: row for row in table.rows(Window(now, prefixes(("a", 10, 0, 100), ("b", 5, 0, 90)), 10.0))}
    assert rows["a"][2:5] == (30, 2.0, 40.0)
    assert rows["b"][2:5] == (40, 0.2, 0.0), "it was forgotten since: only what is sure counts"
    assert rows["c"][2:5] == (9, None, None)
    (first, *_) = table.rows(Window(now, {}, 10.0))
    assert first[2:5] == (30, 3.0, 50.0), "since the server's start"


# The state.


@given(st.lists(st.sampled_from(KEYS), max_size=12))
def test_any_keys_lead_to_a_state_that_can_be_drawn(keys: Sequence[str]) -> None:
    state = State()
    for key in keys:
        before, state = state, pressed(state, key)
        assert state.ended == (before.ended or key == "q")
        assert state.view in NAMES
        assert (state.table is None) == (state.sorting is None)
        if state.table is not None and state.sorting is not None:
            assert 0 <= state.sorting.column < len(state.table.columns)
    assert len(picture(state, shown(), 80, 24)) == 24


def test_the_views_are_those_of_the_option() -> None:
    assert tuple(each.value for each in View) == NAMES


# The keys.


def test_keys_are_letters_and_names() -> None:
    typed = {
        "q": "q",
        "\x1bOC": "right",
        "\x1b[Z": "backtab",
        "\t": "tab",
        "7": "7",
        "\x1b[1;5D": "left",
        "\x1b[24~": "",
    }
    assert keys_of("".join(typed).encode()) == list(typed.values())


@given(st.binary(max_size=40))
def test_any_bytes_are_keys_or_nothing(typed: bytes) -> None:
    for key in keys_of(typed):
        pressed(State(view="models"), key)
    assert keys_of(b"\x00\xff\x1b[" + b"0" * 99 + b"\x00q")[-1] == "q"


# The lines.


@given(st.sampled_from(NAMES), st.integers(1, 200), st.integers(1, 60), st.data())
def test_a_picture_is_as_large_as_its_screen(view: str, width: int, height: int, data: st.DataObject) -> None:
    state = State(view=view)
    for key in data.draw(st.lists(st.sampled_from(["left", "right", "r"]), max_size=6)):
        state = pressed(state, key)
    seen = data.draw(st.sampled_from([shown(), shown(seconds=0), shown()._replace(silent_since=1.7e9, error=HOSTILE)]))
    lines = picture(state, seen, width, height)
    assert len(lines) == height
    assert max(cell_len(line.plain) for line in lines) <= width
    assert all(line.plain.isprintable() for line in lines)


@given(st.lists(st.tuples(st.integers(1, 30), st.booleans()), min_size=1, max_size=14), st.integers(1, 200), st.data())
def test_the_column_that_is_sorted_by_is_in_sight(
    columns: list[tuple[int, bool]], width: int, data: st.DataObject
) -> None:
    widths, texts = [cells for cells, _ in columns], [True, *(text for _, text in columns[1:])]
    must = data.draw(st.integers(0, len(columns) - 1))
    chosen, made = fitting(widths, texts, width, must)
    assert {0, must} <= set(chosen)
    assert all(made[at] == widths[at] for at in chosen if not texts[at]), "numbers are whole"
    whole = sum(made[at] for at in chosen) + GAP * (len(chosen) - 1)
    assert whole <= width or len(chosen) <= 2
    if sum(widths) + GAP * (len(widths) - 1) <= width:
        assert (chosen, made) == (list(range(len(widths))), widths)


def test_the_overview_says_what_is_wrong_and_what_to_do() -> None:
    text = "\n".join(line.plain for line in frame(State(), shown(), 200))
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
    window = Window(bare, bare, 10.0)
    for view in NAMES:
        assert len(picture(State(view=view), shown()._replace(window=window), 80, 24)) == 24
