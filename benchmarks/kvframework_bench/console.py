"""Table cells and progress bars of all benchmarks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING

from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from kvframework_bench.errors import Skipped
from kvframework_bench.rounds import Latency, Spread

if TYPE_CHECKING:
    from rich.console import Console


def new_table(*headers: str) -> Table:
    """Return a table whose first column is text and whose others are figures. A heading starts in upper case."""
    table = Table(pad_edge=False)
    for index, header in enumerate(headers):
        name = header if header[:3] in ("p50", "p90", "p99") else header[:1].upper() + header[1:]
        table.add_column(name, justify="right" if index else "left", no_wrap=True)
    return table


def skipped_table(rows: Sequence[Skipped]) -> Table:
    """Return a table of the parts that could not be measured."""
    table = new_table("skipped", "reason", "hint")
    for row in rows:
        # As they are: names of extras stand in brackets, as markup would.
        table.add_row(escape(row.what), escape(row.reason), escape(row.hint))
    return table


def format_rate(gb_s: Spread) -> tuple[str, str]:
    """Return median and range."""
    return f"{gb_s.median:.2f}", format_range(gb_s)


def format_ratio(ratio: Spread) -> tuple[str, str]:
    """Return median and range of a ratio."""
    return f"{ratio.median:.2f} x", format_range(ratio)


def format_range(spread: Spread) -> str:
    return f"{spread.min:.2f} to {spread.max:.2f}"


def format_latency(latency: Latency) -> tuple[str, str]:
    """Return p50 and p99."""
    return format_time(latency.p50_us), format_time(latency.p99_us)


def format_time(us: float) -> str:
    return f"{us:.0f} µs" if us < 1000 else f"{us / 1000:.2f} ms"


# Enters a stage of that many steps and yields the call to make after each of them.
Stage = Callable[[str, int], AbstractContextManager[Callable[[], None]]]


@contextmanager
def no_progress(_title: str, _steps: int) -> Iterator[Callable[[], None]]:
    """A stage that shows nothing."""
    yield lambda: None


def bars(console: Console) -> Stage:
    """Return stages as bars that disappear when they are done; nothing where the output is no terminal."""

    @contextmanager
    def stage(title: str, steps: int) -> Iterator[Callable[[], None]]:
        columns = (TextColumn("{task.description}", markup=False), BarColumn(), TimeElapsedColumn())
        # Drawn only between steps: a thread that redraws would take processor time from the measurement.
        with Progress(
            *columns, console=console, transient=True, disable=not console.is_terminal, auto_refresh=False
        ) as shown:
            task = shown.add_task(title, total=steps)
            shown.refresh()

            def advance() -> None:
                shown.advance(task)
                shown.refresh()

            yield advance

    return stage
