"""Owns how a bench shows that it runs: a bar a stage. Called from the thread that runs the bench."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING

from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

if TYPE_CHECKING:
    from rich.console import Console

# Enters a stage of so many steps and gives what is to be called after each of them.
Stage = Callable[[str, int], AbstractContextManager[Callable[[], None]]]


@contextmanager
def no_progress(_title: str, _steps: int) -> Iterator[Callable[[], None]]:
    """A stage that shows nothing."""
    yield lambda: None


def bars(console: Console) -> Stage:
    """Stages as bars that go when they are done; nothing where nobody looks."""

    @contextmanager
    def stage(title: str, steps: int) -> Iterator[Callable[[], None]]:
        columns = (TextColumn("{task.description}", markup=False), BarColumn(), TimeElapsedColumn())
        # Drawn only between steps: a thread that redraws would take its share of what is measured.
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
