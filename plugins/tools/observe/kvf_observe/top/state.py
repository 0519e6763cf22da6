"""What is looked at, and what each key does to it. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from kvf_observe.top.views import NAMES, TABLES, Sorting, Table

PAGE = 10
# What the keys are called here, and what they do, as the help shows it.
HELP = (
    ("1 to 7, Tab", "the views: " + ", ".join(NAMES)),
    ("left, right, < >", "sort by the column beside; it is always in sight"),
    ("r", "sort from the other end"),
    ("up, down, k j", "move through what has no room; PgUp and PgDn by ten"),
    ("p, space", "hold the picture still, and go on"),
    ("h, ?", "this help"),
    ("q, Ctrl-C", "quit"),
)
ABOUT = (
    "Rates are of the last minute, or since the server's start, or since this began: the first line says of how "
    "long. saved, asked: tokens found, and looked up. hit: their ratio; hit ever: since the start. stored, evicted: "
    "objects. error: by how much the lookups of a prefix may be too many."
)
_LEFT, _RIGHT = ("left", "<", ","), ("right", ">", ".")
_ROWS = {"up": -1, "k": -1, "down": 1, "j": 1, "pageup": -PAGE, "pagedown": PAGE}


@dataclass(frozen=True)
class State:
    """The view, how each view is sorted if not as at first, its first row in sight, and the switches."""

    view: str = NAMES[0]
    sortings: dict[str, Sorting] = field(default_factory=dict)
    first: int = 0
    paused: bool = False
    helping: bool = False
    ended: bool = False

    @property
    def table(self) -> Table | None:
        return TABLES[self.view]

    @property
    def sorting(self) -> Sorting | None:
        return self.sortings.get(self.view, self.table.sorting) if self.table else None


def pressed(state: State, key: str) -> State:
    """The state after a key. Keys without a meaning change nothing; any key closes the help."""
    if key == "q":
        return replace(state, ended=True)
    if state.helping:
        return replace(state, helping=False)
    if key in ("h", "?"):
        return replace(state, helping=True)
    if key in ("p", " "):
        return replace(state, paused=not state.paused)
    if key.isdecimal() and 1 <= int(key) <= len(NAMES):
        return replace(state, view=NAMES[int(key) - 1], first=0)
    if key in ("tab", "backtab"):
        step = 1 if key == "tab" else -1
        return replace(state, view=NAMES[(NAMES.index(state.view) + step) % len(NAMES)], first=0)
    return _moved(state, key)


def in_sight(state: State, rows: int, room: int) -> State:
    """The state with its first row such that rows fill the room as far as they can."""
    return replace(state, first=max(min(state.first, rows - room), 0))


def _moved(state: State, key: str) -> State:
    table, sorting = state.table, state.sorting
    if key in _ROWS:
        return replace(state, first=max(state.first + _ROWS[key], 0))
    if table is None or sorting is None:
        return state
    if key in _LEFT or key in _RIGHT:
        step = -1 if key in _LEFT else 1
        sorting = Sorting((sorting.column + step) % len(table.columns))
    elif key == "r":
        sorting = sorting._replace(reverse=not sorting.reverse)
    else:
        return state
    return replace(state, sortings=state.sortings | {state.view: sorting}, first=0)
