"""Owns how `kvframework demo` looks: a line per step with a spinner while it runs, and the table at the end."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from kvframework.api import ByteSize
from kvframework.cli.demo_result import DemoResult, EngineRun


class Step:
    """A step that is running. `say` shows where it is, `done` what is left standing behind it."""

    def __init__(self, title: str, progress: Progress, task: TaskID) -> None:
        self.detail = ""
        self._title = title
        self._progress = progress
        self._task = task

    def say(self, text: str) -> None:
        self._progress.update(self._task, description=f"{self._title}  {text}")

    def done(self, detail: str) -> None:
        self.detail = detail


class DemoView:
    """Writes to one console, from the thread that runs the demo."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._unicode = console.encoding.lower().startswith("utf")

    @contextmanager
    def step(self, title: str) -> Iterator[Step]:
        """Shows `title` with a spinner and the time; behind it stands a line with what `Step.done` was told."""
        started = time.perf_counter()
        columns = (SpinnerColumn(), TextColumn("{task.description}", markup=False), TimeElapsedColumn())
        # Before rich 14.3 even a disabled Progress writes an empty line where there is no terminal.
        terminal = self._console if self._console.is_terminal else Console(quiet=True)
        try:
            with Progress(*columns, console=terminal, transient=True, disable=terminal.quiet) as progress:
                step = Step(title, progress, progress.add_task(title, total=None))
                yield step
        except BaseException:
            self._line("✗" if self._unicode else "x", "red", title, "", started)
            raise
        self._line("✓" if self._unicode else "*", "green", title, step.detail, started)

    def show(self, result: DemoResult) -> None:
        table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0))
        for column in ("", "engine A, cold", "engine B, warm"):
            table.add_column(column, justify="left" if not column else "right", style="bold" if not column else "")
        a, b = result.cold, result.warm
        table.add_row("hit tokens", f"{a.hit_tokens} of {a.prompt_tokens}", f"{b.hit_tokens} of {b.prompt_tokens}")
        table.add_row("KV stored", *(_moved(run.stored_bytes, run.stored_s) for run in (a, b)))
        table.add_row("KV restored", *(_moved(run.restored_bytes, run.restored_s) for run in (a, b)))
        table.add_row("time to first token", *(f"{run.ttft_s:.2f} s" for run in (a, b)))
        self._console.print()
        self._console.print(table, soft_wrap=False)
        self._console.print()
        self._console.print(Text(f"B's first token came {result.ttft_ratio:.1f} times sooner than A's.", style="bold"))
        verdict = f"B's {len(b.tokens)} greedy tokens are {{}} those of the run without a cache."
        if not result.tokens_equal:
            self._console.print(Text(verdict.format("NOT equal to"), style="bold red"))
        elif not b.hit_tokens:
            self._console.print(Text("Nothing was hit: B computed the whole prompt.", style="bold red"))
        else:
            self._console.print(Text(verdict.format("equal to"), style="bold green"))

    def _line(self, mark: str, style: str, title: str, detail: str, started: float) -> None:
        seconds = f"{time.perf_counter() - started:6.1f} s  "
        self._console.print(Text.assemble((f"{mark} ", style), (seconds, "dim"), title, ("  " + detail, "dim")))


def moved(run: EngineRun) -> str:
    """What an engine restored, for the line of its step."""
    return f"{run.hit_tokens} of {run.prompt_tokens} tokens, {_moved(run.restored_bytes, run.restored_s)}"


def copied(nbytes: int) -> str:
    """How much was copied, for the line of a step."""
    return f"{ByteSize(nbytes)} of KV"


def _moved(nbytes: int, seconds: float) -> str:
    if not nbytes:
        return "-"
    return f"{ByteSize(nbytes)} at {nbytes / max(seconds, 1e-9) / 1e9:.1f} GB/s"
