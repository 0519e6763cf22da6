"""The picture of a moment, out of the polls of a server: lines of text, none wider than the screen. Pure. A server's
texts are shown as text."""

from __future__ import annotations

import textwrap
import time
from collections.abc import Iterator
from typing import NamedTuple

from rich.cells import cell_len
from rich.text import Text

from kvf_observe.health import check_of
from kvf_observe.poller import Document, Observed
from kvf_observe.readings import found_tokens, l1_bytes
from kvf_observe.top.minute import Minute, Window, reach
from kvf_observe.top.views import NAMES, TABLES, TIERS, Column, Table, ordered, percent, share, size
from kvframework.api.console import counted, short_count, short_duration
from kvframework.api.process import one_line

KEYS = "q quit   1-7, Tab views"
GAP = "  "
# Texts are cut down to as many cells.
LONGEST_TEXT = 40


def table_lines(table: Table, window: Window) -> Iterator[Text]:
    """A table: its head, and its rows."""
    rows = ordered(table, window)
    cells = [[column.head for column in table.columns]]
    cells += [[column.shown(value) for column, value in zip(table.columns, row, strict=True)] for row in rows]
    widths = [min(max(map(cell_len, column)), LONGEST_TEXT) for column in zip(*cells, strict=True)]
    yield Text()
    for number, texts in enumerate(cells):
        style = "bold" if not number else "red" if table.failing(rows[number - 1]) else ""
        shown = (_cell(*each) for each in zip(table.columns, texts, widths, strict=True))
        yield Text(GAP, style).join(shown)
    if not rows:
        yield Text("nothing yet", style="dim")


def _cell(column: Column, text: str, width: int) -> Text:
    cell = Text(text)
    cell.truncate(width, overflow="ellipsis")
    room = " " * (width - cell.cell_len)
    return Text.assemble(cell, room) if column.form is None else Text.assemble(room, cell)


PROBLEMS = 4
PAGE = "docs/operations.md"
_BAR = 40
_STATES = {"used": ("█", "green"), "quarantined": ("▒", "red"), "free": ("░", "dim")}


def overview(window: Window, width: int) -> Iterator[Text]:
    """The lines of the view."""
    yield from _problems(window.now, width)
    yield Text()
    yield from _found(window)
    yield Text()
    yield from _l1(window.now, width)
    instances, sessions = (len(reach(window.now, *path) or ()) for path in (("instances",), ("messaging", "sessions")))
    yield Text(f"{counted(instances, 'instances')} of engines, {counted(sessions, 'connected clients')}")
    if reach(window.now, "l2"):
        yield from table_lines(TIERS, window)


def _problems(document: Document, width: int) -> Iterator[Text]:
    """What is wrong now, each with its row of the page that says what to do."""
    problems = reach(document, "problems") or []
    for problem in problems[:PROBLEMS]:
        where, fact = str(problem["where"]), str(problem["fact"])
        row = check_of(where).row or "what-do-you-see"
        for number, line in enumerate(textwrap.wrap(one_line(f"{where}: {fact}"), max(width - 2, 20))[:2]):
            yield Text(f"{'  ' if number else ''}{line}", style="red")
        yield Text(f"  see {PAGE}#{row}")
    if len(problems) > PROBLEMS:
        yield Text(f"and {len(problems) - PROBLEMS} more: kvframework status --check", style="red")


def _found(window: Window) -> Iterator[Text]:
    now, before = _tokens(window.now), _tokens(window.before)
    grown = {where: max(now[where] - before[where], 0) for where in now}
    asked, ever = sum(grown.values()), sum(now.values())
    lately = f"last {short_duration(window.seconds)}" if window.seconds else "lately"
    yield Text(f"{'':<16}{lately:>12}{'ever':>12}", style="bold")

    def ratio(name: str, *places: str) -> Text:
        parts = share(sum(grown[at] for at in places), asked), share(sum(now[at] for at in places), ever)
        return _row(name, *("-" if part is None else percent(part) for part in parts))

    def counts(name: str, lately: float, always: float) -> Text:
        rate = window.rate(lately)
        return _row(name, "-" if rate is None else f"{short_count(rate)}/s", short_count(always))

    yield ratio("hit rate", "l1", "l2")
    yield ratio("  in L1", "l1")
    yield ratio("  from L2", "l2")
    yield counts("tokens saved", grown["l1"] + grown["l2"], now["l1"] + now["l2"])
    yield counts("tokens asked", asked, ever)
    for name, *path in (
        ("lookups", "lookups", "lookups"),
        ("objects stored", "l1", "counters", "stored"),
        ("objects evicted", "l1", "evictions"),
    ):
        yield counts(name, window.grown(*path), reach(window.now, *path))


def _row(name: str, lately: str, always: str) -> Text:
    return Text.assemble(f"{name:<16}", (f"{lately:>12}", "bold"), f"{always:>12}")


def _tokens(document: Document) -> dict[str, float]:
    sums: dict[str, float] = {"l1": 0, "l2": 0, "missed": 0}
    for (_, where), amount in found_tokens(document):
        sums[where] += amount
    return sums


def _l1(document: Document, width: int) -> Iterator[Text]:
    states = {state: max(amount, 0) for (state,), amount in l1_bytes(document)}
    whole = max(reach(document, "l1", "capacity_bytes"), 1)
    bar = Text("L1 ")
    cells = max(min(_BAR, width - 3), 0)
    for state, (letter, style) in _STATES.items():
        bar.append(letter * round(cells * states[state] / whole), style)
    yield bar
    said = "  ".join(f"{state} {size(states[state])}" for state in _STATES)
    objects = counted(reach(document, "l1", "objects"), "objects")
    yield Text(f"   {said}  of {size(whole)}, {objects}")


class Shown(NamedTuple):
    """What there is to show. `window` is None until a server has answered; `silent_since` is of the wall clock and None
    while one answers, `error` why none does; `at` is when it was so."""

    endpoint: str
    window: Window | None
    at: float
    silent_since: float | None = None
    error: str = ""


def picture(view: str, shown: Shown, width: int, height: int) -> list[Text]:
    """The lines of a screen: the last one names the keys."""
    lines = [*_head(shown, width), _tabs(view, width)]
    room = max(height - len(lines) - 1, 0)
    body = list(_body(view, shown, width))[:room]
    lines += [*body, *(Text() for _ in range(room - len(body)))]
    return [_cut(line, width) for line in [*lines[: height - 1], Text(KEYS, style="dim")]]


def frame(view: str, shown: Shown, width: int) -> list[Text]:
    """The lines of a picture that no screen bounds below."""
    return [_cut(line, width) for line in (*_head(shown, width), *_body(view, shown, width))]


def _head(shown: Shown, width: int) -> list[Text]:
    clock = time.strftime("%H:%M:%S", time.localtime(shown.at))
    where = one_line(shown.endpoint)
    lines = []
    if shown.silent_since is not None:
        since = time.strftime("%H:%M:%S", time.localtime(shown.silent_since))
        past = short_duration(max(shown.at - shown.silent_since, 0))
        lines.append(Text(f"{clock}  no answer since {since}, {past}: {where}", style="bold red"))
        lines += [Text(line) for line in textwrap.wrap(one_line(shown.error), max(width, 20))[:2]]
    elif shown.window is not None:
        window = shown.window
        problems = len(reach(window.now, "problems") or ())
        up = short_duration(reach(window.now, "server", "uptime_s"))
        over = f"rates of {short_duration(window.seconds)}" if window.seconds else "no rates yet"
        lines.append(
            Text.assemble(
                (clock, "bold"),
                f"  up {up}  {over}  ",
                (counted(problems, "problems"), "bold red" if problems else ""),
                f"  kvframework {one_line(str(reach(window.now, 'server', 'version')))} at {where}",
            )
        )
    else:
        lines.append(Text(f"{clock}  asking {where}"))
    return lines


def _tabs(view: str, width: int) -> Text:
    tabs = Text()
    for number, name in enumerate(NAMES, start=1):
        tabs.append(f"{number} ", "dim")
        tabs.append(name, "reverse bold" if name == view else "")
        tabs.append("  " if number < len(NAMES) else "")
    if tabs.cell_len > width:
        return Text.assemble((f"{NAMES.index(view) + 1} of {len(NAMES)} ", "dim"), (view, "reverse bold"))
    return tabs


def _body(view: str, shown: Shown, width: int) -> Iterator[Text]:
    table = TABLES[view]
    if shown.window is not None:
        yield from overview(shown.window, width) if table is None else table_lines(table, shown.window)


def _cut(line: Text, width: int) -> Text:
    cut = line.copy()
    cut.truncate(width, overflow="ellipsis")
    cut.no_wrap = True
    return cut


class Moments:
    """Takes every poll of the server at `endpoint`; `began` is when the looking began, by the wall clock."""

    def __init__(self, endpoint: str, began: float) -> None:
        self._endpoint = endpoint
        self._minute = Minute()
        self._answered = began
        self._window: Window | None = None
        self.latest = Shown(endpoint, None, began)

    def take(self, observed: Observed) -> Shown:
        """What there is to show after a poll: the last document is shown on while none follows it."""
        if observed.document is None:
            self.latest = Shown(self._endpoint, self._window, observed.time, self._answered, observed.error)
        else:
            self._answered = observed.time
            self._window = self._minute.add(observed.document, observed.at)
            self.latest = Shown(self._endpoint, self._window, observed.time)
        return self.latest
