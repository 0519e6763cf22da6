"""The output of `kvframework demo`: a line per step with a spinner while it runs, and the table at the end."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from kvf_demo.models import ChosenModel
from kvf_demo.result import DemoResult, EngineRun, Recovered
from kvframework.api.console import counted
from kvframework.api.plugin import ByteSize


class Step:
    """A running step. `say` updates its line; `done` sets the detail that remains behind it."""

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
    """The view of one console, used by the thread that runs the demo."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._unicode = console.encoding.lower().startswith("utf")

    def tell_model(self, model: ChosenModel) -> None:
        """Print what is loaded, and how large it is, if it is not made by the demo itself."""
        if model.path is not None:
            self._console.print(Text(f"{model.title}{': ' if model.size else ''}{model.size}"))

    @contextmanager
    def step(self, title: str) -> Iterator[Step]:
        """Show `title` with a spinner and the time; afterwards a line with the text of `Step.done`."""
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
        table.add_row("TTFT", *(f"{run.ttft_s:.2f} s" for run in (a, b)))
        self._console.print()
        self._console.print(table, soft_wrap=False)
        self._console.print()
        if result.question:
            self._console.print(Text(result.question, style="bold"))
            for name, run in (("A", a), ("B", b)):
                self._console.print(Text(f"{name}: {run.text.strip()}{'' if run.ended else ' …'}"))
            self._console.print()
        self._console.print(Text(f"B's TTFT is {result.ttft_ratio:.1f} times shorter than A's.", style="bold"))
        if result.recovered is not None:
            self._console.print(_after_the_kill(result.recovered, hit=b.hit_tokens > 0))
        verdict = f"B's {len(b.tokens)} greedy tokens are {{}} those of the run without a cache."
        if not result.tokens_equal:
            self._console.print(Text(verdict.format("NOT equal to"), style="bold red"))
        elif not b.hit_tokens:
            self._console.print(Text("No hit: engine B computed the whole prompt.", style="bold red"))
        else:
            self._console.print(Text(verdict.format("equal to"), style="bold green"))

    def _line(self, mark: str, style: str, title: str, detail: str, started: float) -> None:
        seconds = f"{time.perf_counter() - started:6.1f} s  "
        self._console.print(Text.assemble((f"{mark} ", style), (seconds, "dim"), title, ("  " + detail, "dim")))


def moved(run: EngineRun) -> str:
    return f"{run.hit_tokens} of {run.prompt_tokens} tokens, {_moved(run.restored_bytes, run.restored_s)}"


def _after_the_kill(found: Recovered, *, hit: bool) -> Text:
    if found.why_cold:
        return Text(f"The new server began with an empty L1: {found.why_cold}", style="bold red")
    amount = f"{counted(found.objects, 'objects')}, {ByteSize(found.bytes)}, in {found.seconds:.2f} s"
    hit_after = f"; {found.hit_s:.2f} s after the kill B had its hit" if hit else ""
    return Text(f"The new server recovered {amount}{hit_after}.", style="bold")


def _moved(nbytes: int, seconds: float) -> str:
    if not nbytes:
        return "-"
    return f"{ByteSize(nbytes)} at {nbytes / max(seconds, 1e-9) / 1e9:.1f} GB/s"
