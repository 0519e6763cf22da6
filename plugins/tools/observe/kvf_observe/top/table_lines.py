"""A table as lines: the columns for which there is room, whole numbers, and names that give way. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.cells import cell_len
from rich.text import Text

from kvf_observe.top.minute import Window
from kvf_observe.top.views import Sorting, Table, ordered
from kvframework.text import counted

# The head of the column that is sorted by needs one more.
GAP = 1
# Texts are cut down to as many cells where the columns do not all fit.
LEAST_TEXT = 12
ABOVE_ROWS = 2


def table_lines(
    table: Table, window: Window, width: int, sorting: Sorting, first: int = 0, room: int | None = None
) -> Iterator[Text]:
    """A table: its head, and the rows from the first one on for which there is room."""
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
    end = None if room is None else first + max(room - ABOVE_ROWS, 0)
    for row, shown in list(zip(rows, cells, strict=True))[first:end]:
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
