"""Tables that are too wide for a terminal: parted into several, each of which repeats the first column."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.console import Console, ConsoleOptions, RenderResult
from rich.measure import Measurement
from rich.table import Column, Table

_ANY_WIDTH = 10_000


class WideTable:
    """A table as it is where it fits; elsewhere as many tables as it takes, so that no cell is cut off."""

    def __init__(self, table: Table) -> None:
        self._table = table

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        for columns in self._parts(console, options):
            yield _part(self._table, columns)

    def _parts(self, console: Console, options: ConsoleOptions) -> Iterator[list[int]]:
        def fits(columns: Sequence[int]) -> bool:
            wide = options.update(max_width=_ANY_WIDTH)
            part = _part(self._table, columns)
            part.title = None  # which is wrapped
            return Measurement.get(console, wide, part).maximum <= options.max_width

        part = [0]
        for index in range(1, len(self._table.columns)):
            if len(part) > 1 and not fits([*part, index]):
                yield part
                part = [0]
            part.append(index)
        yield part


def _part(table: Table, columns: Sequence[int]) -> Table:
    chosen = [table.columns[index] for index in columns]
    heads = [
        Column(
            column.header,
            justify=column.justify,
            style=column.style,
            no_wrap=column.no_wrap and place > 0,
            overflow="fold",
        )
        for place, column in enumerate(chosen)
    ]
    part = Table(*heads, title=table.title, box=table.box, pad_edge=table.pad_edge, padding=table.padding)
    for cells in zip(*(column.cells for column in chosen), strict=True):
        part.add_row(*cells)
    return part
