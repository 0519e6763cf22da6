"""The first view of `kvframework top`: problems, what is found and saved, L1 by state, tiers. Pure."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator

from rich.text import Text

from kvf_observe.derived_readings import found_tokens, l1_bytes
from kvf_observe.health import check_of
from kvf_observe.poller import Document
from kvf_observe.top.minute import Window, reach
from kvf_observe.top.table_lines import table_lines
from kvf_observe.top.views import TIERS, percent, share, size
from kvframework.text import counted, one_line, short_count, short_duration

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
