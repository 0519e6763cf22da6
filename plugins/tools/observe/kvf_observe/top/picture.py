"""The picture of a moment, out of the polls of a server. Pure. A server's texts are shown as text; a table wider than
the screen is cut off at its edge.

The pictures of a server, one after the other: on the terminal's other screen, or as plain text for a pipe or a
file.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from contextlib import suppress
from itertools import islice, takewhile
from typing import NamedTuple

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.live import Live
from rich.table import Table
from rich.text import Text

from kvf_observe.health import check_of
from kvf_observe.poller import Document, Poller
from kvf_observe.readings import l1_bytes, tokens_by_place
from kvf_observe.top.views import TIERS, VIEWS, Minute, View, Window, percent, reach, share, size
from kvframework.api.console import PlainConsole, counted, print_view, short_count, short_duration, stdout
from kvframework.api.process import one_line
from kvframework.client import StatusSource

PROBLEMS = 4
PAGE = "docs/operations.md"
_BAR = 40
_STATES = {"used": ("█", "green"), "quarantined": ("▒", "red"), "free": ("░", "dim")}
# Wider than any table.
_WIDEST = 1000


class Shown(NamedTuple):
    """What there is to show. `window` is None until a server has answered; `silent_since` is of the wall clock and None
    while one answers, `error` why none does; `at` is when it was so."""

    endpoint: str
    window: Window | None
    at: float
    silent_since: float | None = None
    error: str = ""


def picture(view: str, shown: Shown) -> RenderableType:
    """Return the picture of one of `VIEWS`."""
    parts: list[RenderableType] = [*_head(shown)]
    if shown.window is not None:
        table = VIEWS[view]
        parts += _overview(shown.window) if table is None else [Text(), _Whole(_table(table, shown.window))]
    return Group(*parts)


class _Whole(NamedTuple):
    """A table as wide as its cells are, but for long names."""

    table: Table

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        for column in self.table.columns:
            if column.justify == "left":
                column.max_width = max(options.max_width // 3, 1)
        yield from console.render(self.table, options.update(max_width=_WIDEST))


def _plain_table() -> Table:
    return Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="bold")


def _table(view: View, window: Window) -> Table:
    table = _plain_table()
    for column in view.columns:
        table.add_column(column.head, justify="left" if column.form is None else "right", no_wrap=True)
    for row in view.rows(window):
        cells = [Text(column.shown(value)) for column, value in zip(view.columns, row, strict=True)]
        table.add_row(*cells, style="red" if view.failing(row) else "")
    if not table.row_count:
        table.add_row(Text("no requests yet", style="dim"))
    return table


def _head(shown: Shown) -> Iterator[Text]:
    clock = time.strftime("%H:%M:%S", time.localtime(shown.at))
    where = one_line(shown.endpoint)
    if shown.silent_since is not None:
        since = time.strftime("%H:%M:%S", time.localtime(shown.silent_since))
        past = short_duration(max(shown.at - shown.silent_since, 0))
        yield Text(f"{clock}  server silent since {since}, {past}: {where}", style="bold red")
        yield Text(one_line(shown.error))
    elif shown.window is not None:
        window = shown.window
        problems = len(reach(window.now, "problems") or ())
        up = short_duration(reach(window.now, "server", "uptime_s"))
        over = f"rates of {short_duration(window.seconds)}" if window.seconds else "no rates yet"
        yield Text.assemble(
            (clock, "bold"),
            f"  up {up}  {over}  ",
            (counted(problems, "problems"), "bold red" if problems else ""),
            f"  kvframework {one_line(str(reach(window.now, 'server', 'version')))} at {where}",
        )
    else:
        yield Text(f"{clock}  waiting for the first answer of {where}")


def _overview(window: Window) -> Iterator[RenderableType]:
    yield from _problems(window.now)
    yield Text()
    yield _found(window)
    yield Text()
    yield from _l1(window.now)
    instances, sessions = (len(reach(window.now, *path) or ()) for path in (("instances",), ("messaging", "sessions")))
    yield Text(f"{counted(instances, 'instances')} of engines, {counted(sessions, 'connected clients')}")
    if reach(window.now, "l2"):
        yield Text()
        yield _Whole(_table(TIERS, window))


def _problems(document: Document) -> Iterator[Text]:
    """What is wrong now, each with its row of the page that says what to do."""
    problems = reach(document, "problems") or []
    for problem in problems[:PROBLEMS]:
        where, fact = str(problem["where"]), str(problem["fact"])
        yield Text(one_line(f"{where}: {fact}"), style="red")
        yield Text(f"  see {PAGE}#{check_of(where).row or 'what-do-you-see'}")
    if len(problems) > PROBLEMS:
        yield Text(f"and {len(problems) - PROBLEMS} more: kvframework status --check", style="red")


def _found(window: Window) -> Table:
    now, before = tokens_by_place(window.now), tokens_by_place(window.before)
    grown = {where: max(now[where] - before[where], 0) for where in now}
    asked, ever = sum(grown.values()), sum(now.values())
    table = _plain_table()
    table.add_column("", no_wrap=True)
    for head in (f"last {short_duration(window.seconds)}" if window.seconds else "last minute", "since start"):
        table.add_column(head, justify="right", no_wrap=True, min_width=11)

    def ratio(name: str, *places: str) -> None:
        parts = share(sum(grown[at] for at in places), asked), share(sum(now[at] for at in places), ever)
        table.add_row(name, *("-" if part is None else percent(part) for part in parts))

    def counts(name: str, lately: float, always: float) -> None:
        rate = window.rate(lately)
        table.add_row(name, "-" if rate is None else f"{short_count(rate)}/s", short_count(always))

    ratio("hit rate", "l1", "l2")
    ratio("  in L1", "l1")
    ratio("  from L2", "l2")
    counts("tokens saved", grown["l1"] + grown["l2"], now["l1"] + now["l2"])
    counts("tokens asked", asked, ever)
    for name, *path in (
        ("lookups", "lookups", "lookups"),
        ("objects stored", "l1", "counters", "stored"),
        ("objects evicted", "l1", "evictions"),
    ):
        counts(name, window.grown(*path), reach(window.now, *path))
    return table


def _l1(document: Document) -> Iterator[Text]:
    states = {state: max(amount, 0) for (state,), amount in l1_bytes(document)}
    whole = max(reach(document, "l1", "capacity_bytes"), 1)
    bar = Text("L1 ")
    for state, (letter, style) in _STATES.items():
        bar.append(letter * round(_BAR * states[state] / whole), style)
    yield bar
    said = "  ".join(f"{state} {size(states[state])}" for state in _STATES)
    objects = counted(reach(document, "l1", "objects"), "objects")
    yield Text(f"   {said}  of {size(whole)}, {objects}")


def has_screen() -> bool:
    """Whether there is a screen that can be drawn on."""
    return stdout.is_terminal and not stdout.is_dumb_terminal


def watch(source: StatusSource, interval: float, view: str) -> None:
    """Show the server until Ctrl-C, SIGTERM, or the end of the terminal. Owns `source`."""
    _end_by_sigterm()
    signal.signal(signal.SIGTSTP, signal.SIG_IGN)  # a shell would draw over the other screen
    console = PlainConsole(highlight=False)
    try:
        with suppress(KeyboardInterrupt, OSError), Live(console=console, screen=True, auto_refresh=False) as live:
            live.update(picture(view, Shown(source.endpoint, None, time.time())), refresh=True)
            for shown in takewhile(lambda _: console.is_terminal, _polled(source, interval)):  # it may have hung up
                live.update(picture(view, shown), refresh=True)
    finally:
        source.close()


def print_frames(source: StatusSource, interval: float, view: str, number: int) -> bool:
    """Print `number` pictures, `interval` seconds apart; return whether the server answered for the last. Before the
    first one passes an interval if no rate is known without. Ends early by Ctrl-C or SIGTERM. Owns `source`."""
    _end_by_sigterm()
    polled = _polled(source, interval)
    try:
        shown = next(polled)
        if shown.window is not None and not shown.window.seconds:
            shown = next(polled)
        print_view(picture(view, shown))
        for shown in islice(polled, number - 1):
            stdout.print()
            print_view(picture(view, shown))
        return shown.silent_since is None
    except KeyboardInterrupt:
        return True
    finally:
        source.close()


def _polled(source: StatusSource, interval: float) -> Iterator[Shown]:
    """Yield what there is to show after each poll: the last document is shown on while none follows it."""
    poller, minute = Poller(source, lambda _: None), Minute()
    window: Window | None = None
    answered = time.time()
    while True:
        observed = poller.poll()
        if observed.document is None:
            yield Shown(source.endpoint, window, observed.time, answered, observed.error)
        else:
            answered = observed.time
            window = minute.add(observed.document, observed.at)
            yield Shown(source.endpoint, window, observed.time)
        time.sleep(interval)


def _end_by_sigterm() -> None:
    signal.signal(signal.SIGTERM, signal.default_int_handler)
