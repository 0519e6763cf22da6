"""The picture of a moment, out of the polls of a server: lines of text, none wider than the screen. Pure. A server's
texts are shown as text."""

from __future__ import annotations

import textwrap
import time
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from rich.cells import cell_len
from rich.text import Text

from kvf_observe.health import check_of
from kvf_observe.poller import Document, Observed
from kvf_observe.readings import l1_bytes, tokens_by_place
from kvf_observe.top.minute import Minute, Window, reach
from kvf_observe.top.views import KEYS, NAMES, TIERS, Sorting, State, Table, ordered, percent, share, size
from kvframework.api.console import counted, short_count, short_duration
from kvframework.api.process import one_line

# The head of the column that is sorted by needs one more.
GAP = 1
# Texts are cut down to as many cells where the columns do not all fit.
LEAST_TEXT = 12
PROBLEMS = 4
PAGE = "docs/operations.md"
_BAR = 40
_STATES = {"used": ("█", "green"), "quarantined": ("▒", "red"), "free": ("░", "dim")}


def table_lines(table: Table, window: Window, width: int, sorting: Sorting) -> Iterator[Text]:
    """A table: its head, and its rows."""
    rows = ordered(table, window, sorting)
    cells = [[column.shown(value) for column, value in zip(table.columns, row, strict=True)] for row in rows]
    heads = [column.head for column in table.columns]
    heads[sorting.column] += "▲" if sorting.reverse else "▼"
    widths = [max(map(cell_len, column)) for column in zip(heads, *cells, strict=True)]
    for at, column in enumerate(table.columns):
        # The size of a column does not follow its sorting.
        widths[at] = max(widths[at], len(column.head) + 1)
    chosen, widths = fitting(widths, [column.form is None for column in table.columns], width, sorting.column)
    texts = {at for at, column in enumerate(table.columns) if column.form is None}
    hidden = len(widths) - len(chosen)
    yield Text(f"{counted(hidden, 'more columns')}, for lack of room" if hidden else "", style="dim")
    yield _line(
        [(heads[at], "bold reverse" if at == sorting.column else "bold") for at in chosen], chosen, widths, texts
    )
    if not rows:
        yield Text("nothing yet", style="dim")
    for row, shown in zip(rows, cells, strict=True):
        style = "red" if table.failing(row) else ""
        yield _line([(shown[at], style) for at in chosen], chosen, widths, texts)


def fitting(widths: Sequence[int], texts: Sequence[bool], width: int, must: int) -> tuple[list[int], list[int]]:
    """The places of the columns that fit into `width`, and how wide each column is: the first column, the one that
    must be seen, and the others from the left. Texts give way first."""
    made = list(widths)
    if sum(made) + GAP * (len(made) - 1) > width:
        made = [min(cells, LEAST_TEXT) if text else cells for cells, text in zip(widths, texts, strict=True)]
    chosen = {0, must}
    left = width - made[0] - (made[must] + GAP if must else 0)
    for at in range(1, len(made)):
        if at in chosen:
            continue
        if made[at] + GAP > left:
            break
        chosen.add(at)
        left -= made[at] + GAP
    for at in sorted(chosen):
        if texts[at]:  # what is left goes to the texts
            more = max(min(widths[at] - made[at], left), 0)
            made[at] += more
            left -= more
    return sorted(chosen), made


def _line(cells: Sequence[tuple[str, str]], chosen: Sequence[int], widths: Sequence[int], texts: set[int]) -> Text:
    line = Text()
    for number, ((text, style), at) in enumerate(zip(cells, chosen, strict=True)):
        cell = Text(text, style=style)
        cell.truncate(widths[at], overflow="ellipsis")
        room = " " * (widths[at] - cell.cell_len)
        line.append(" " * GAP if number else "")
        line = Text.assemble(line, cell, room) if at in texts else Text.assemble(line, room, cell)
    return line


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
        yield from table_lines(TIERS, window, width, TIERS.sorting)


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
    now, before = tokens_by_place(window.now), tokens_by_place(window.before)
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


def picture(state: State, shown: Shown, width: int, height: int) -> list[Text]:
    """The lines of a screen: the last one names the keys."""
    lines = [*_head(shown, width), _tabs(state, width)]
    room = max(height - len(lines) - 1, 0)
    body = list(_body(state, shown, width))[:room]
    lines += [*body, *(Text() for _ in range(room - len(body)))]
    return [_cut(line, width) for line in [*lines[: height - 1], Text(KEYS, style="dim")]]


def frame(state: State, shown: Shown, width: int) -> list[Text]:
    """The lines of a picture that no screen bounds below."""
    return [_cut(line, width) for line in (*_head(shown, width), *_body(state, shown, width))]


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


def _tabs(state: State, width: int) -> Text:
    tabs = Text()
    for number, name in enumerate(NAMES, start=1):
        tabs.append(f"{number} ", "dim")
        tabs.append(name, "reverse bold" if name == state.view else "")
        tabs.append("  " if number < len(NAMES) else "")
    if tabs.cell_len > width:
        return Text.assemble((f"{NAMES.index(state.view) + 1} of {len(NAMES)} ", "dim"), (state.view, "reverse bold"))
    return tabs


def _body(state: State, shown: Shown, width: int) -> Iterator[Text]:
    if shown.window is not None:
        if state.table is None or state.sorting is None:
            yield from overview(shown.window, width)
        else:
            yield from table_lines(state.table, shown.window, width, state.sorting)


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
