"""The picture of a moment: lines of text, none wider than the screen. Pure. A server's texts are shown as text."""

from __future__ import annotations

import textwrap
import time
from collections.abc import Iterator
from typing import NamedTuple

from rich.text import Text

from kvf_observe.top.minute import Window, reach
from kvf_observe.top.overview import overview
from kvf_observe.top.state import ABOUT, HELP, State, in_sight
from kvf_observe.top.table_lines import ABOVE_ROWS, table_lines
from kvf_observe.top.views import NAMES
from kvframework.text import counted, one_line, short_duration

_KEYS = "h help  q quit  p hold  < > sort  r reverse  1-7 views"


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
    lines = [*_head(state, shown, width), _tabs(state, width)]
    room = max(height - len(lines) - 1, 0)
    body = list(_help(width) if state.helping else _body(state, shown, width, room))[:room]
    lines += [*body, *(Text() for _ in range(room - len(body)))]
    return [_cut(line, width) for line in [*lines[: height - 1], Text(_KEYS, style="dim")]]


def frame(state: State, shown: Shown, width: int) -> list[Text]:
    """The lines of a picture that no screen bounds below."""
    return [_cut(line, width) for line in (*_head(state, shown, width), *_body(state, shown, width, None))]


def clamped(state: State, shown: Shown, width: int, height: int) -> State:
    """The state of a screen that shows as many rows as it can."""
    if shown.window is None:
        return state
    room = height - len(_head(state, shown, width)) - 2
    if state.table is None:
        return in_sight(state, len(list(overview(shown.window, width))), room)
    return in_sight(state, len(list(state.table.rows(shown.window))), room - ABOVE_ROWS)


def _head(state: State, shown: Shown, width: int) -> list[Text]:
    clock = time.strftime("%H:%M:%S", time.localtime(shown.at))
    held = "  [held]" if state.paused else ""
    where = one_line(shown.endpoint)
    lines = []
    if shown.silent_since is not None:
        since = time.strftime("%H:%M:%S", time.localtime(shown.silent_since))
        past = short_duration(max(shown.at - shown.silent_since, 0))
        lines.append(Text(f"{clock}{held}  no answer since {since}, {past}: {where}", style="bold red"))
        lines += [Text(line) for line in _wrapped(one_line(shown.error), width)[:2]]
    elif shown.window is not None:
        window = shown.window
        problems = len(reach(window.now, "problems") or ())
        up = short_duration(reach(window.now, "server", "uptime_s"))
        over = f"rates of {short_duration(window.seconds)}" if window.seconds else "no rates yet"
        lines.append(
            Text.assemble(
                (f"{clock}{held}", "bold"),
                f"  up {up}  {over}  ",
                (counted(problems, "problems"), "bold red" if problems else ""),
                f"  kvframework {one_line(str(reach(window.now, 'server', 'version')))} at {where}",
            )
        )
    else:
        lines.append(Text(f"{clock}{held}  asking {where}"))
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


def _body(state: State, shown: Shown, width: int, room: int | None) -> Iterator[Text]:
    if shown.window is None:
        return
    if state.table is None or state.sorting is None:
        lines = list(overview(shown.window, width))
        yield from lines[state.first if room is not None else 0 :]
        return
    yield from table_lines(state.table, shown.window, width, state.sorting, state.first, room)


def _help(width: int) -> Iterator[Text]:
    yield Text()
    for keys, meaning in HELP:
        first, *others = _wrapped(meaning, width - 20) or [""]
        yield Text.assemble((f"  {keys:<18}", "bold"), first)
        yield from (Text(" " * 20 + line) for line in others)
    yield Text()
    yield from (Text(f"  {line}") for line in _wrapped(ABOUT, width - 2))


def _wrapped(text: str, width: int) -> list[str]:
    return textwrap.wrap(text, max(width, 20))


def _cut(line: Text, width: int) -> Text:
    cut = line.copy()
    cut.truncate(width, overflow="ellipsis")
    cut.no_wrap = True
    return cut
