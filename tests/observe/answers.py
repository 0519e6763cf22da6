"""The answers of /livez and /readyz that the failure tables of docs/operations.md promise, and those of a poll."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

from kvf_observe.health import livez, readyz
from kvf_observe.poller import Observed

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "operations.md").read_text()
COLUMN = "`/livez`, `/readyz`"


class Answers(NamedTuple):
    """The two statuses, and the checks that are not ok; `l2` for any tier."""

    livez: int
    readyz: int
    checks: frozenset[str]


def promised() -> dict[str, list[Answers]]:
    """What each row promises, by its anchor: one or more pairs, in the order of time."""
    found = {}
    column = 0
    for line in PAGE.splitlines():
        cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", line)]
        column = cells.index(COLUMN) if COLUMN in cells else column if line.startswith("|") else 0
        anchor = re.match(r'\| <a id="([\w-]+)"></a>', line)
        if column and anchor:
            pairs = re.findall(r"(\d{3}), (\d{3})(?: \(`([^`]+)`[^)]*\))?", cells[column] or "200, 200")
            found[anchor[1]] = [
                Answers(int(live), int(ready), frozenset({check.removesuffix(".N")} - {""}))
                for live, ready, check in pairs
            ]
    return found


def of(observed: Observed, now: float) -> Answers:
    live, ready = livez(observed, now), readyz(observed, now, verbose=True)
    marked = re.findall(r"^\[[-~]\]([\w.]+) (?:failed|warning)", ready.text, re.MULTILINE)
    checks = {re.sub(r"^l2\.\d+$", "l2", name) for name in marked} - {"server"}
    return Answers(200 if live.ok else 503, 200 if ready.ok else 503, frozenset(checks))
