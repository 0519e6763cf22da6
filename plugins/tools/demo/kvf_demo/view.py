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
from kvf_demo.result import FAR_NEARER, OWN_MODEL, BlendResult, DemoResult, EngineRun, Recovered, WayResult
from kvframework.api.console import counted, short_number
from kvframework.api.plugin import ByteSize

_NAMES = {"full": "full", "blend": "blend", "rotated": "rotated only", "naive": "naive"}
_COLUMNS = ("first token", "loaded", "recomputed", "logits off", "KL", "token")
_LEGEND = (
    "full: the whole prompt is computed, as without a cache",
    "naive: the stored KV one behind the other as it is",
    "logits off: how far they are from those of full, by their length (relative L2)",
    "KL: divergence of the next token's distribution from that of full, in nats",
)
_OWN_MODEL = "model: random weights; attention falls with distance, as in trained ones"


def show_blend(result: BlendResult, console: Console) -> None:
    """Print one line per way, and the verdict."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("", style="bold", no_wrap=True)
    for column in _COLUMNS:
        table.add_column(column, justify="right", no_wrap=True)
    for way, name in _NAMES.items():
        done = result.ways[way]
        off = ("-", "-", "-") if way == "full" else _off(done)
        table.add_row(name, f"{done.ttft_s:.2f} s", str(done.hit_tokens), _recomputed(done), *off)
    console.print()
    console.print(table, soft_wrap=False)
    console.print()
    if result.ways["full"].text:
        console.print(Text(result.question, style="bold"))
        for way, name in _NAMES.items():
            console.print(Text(f"{name}: {result.ways[way].text.strip()} …"))
        console.print()
    sooner = f"with blend the TTFT is {result.ttft_ratio:.1f} times shorter."
    console.print(Text(f"{len(result.documents)} documents in another order: {sooner}"))
    legend = [*_LEGEND, _OWN_MODEL] if result.model.startswith(OWN_MODEL) else _LEGEND
    for line in legend:
        console.print(Text(line, style="dim"))
    if not result.all_hit:
        console.print(Text("Not all documents were hit.", style="bold red"))
        return
    style = "bold green" if result.times_nearer >= FAR_NEARER else "bold red"
    console.print(Text(f"Blend is {result.times_nearer:.1f} times nearer to full than naive.", style=style))


def _off(done: WayResult) -> tuple[str, str, str]:
    return f"{done.distance:.2%}", f"{short_number(done.divergence, 2)}", "same" if done.same_token else "other"


def _recomputed(done: WayResult) -> str:
    return f"{done.recomputed / done.hit_tokens:.0%}" if done.hit_tokens else "100%"


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
            self._console.print(Text("Nothing was hit: B computed the whole prompt.", style="bold red"))
        else:
            self._console.print(Text(verdict.format("equal to"), style="bold green"))

    def _line(self, mark: str, style: str, title: str, detail: str, started: float) -> None:
        seconds = f"{time.perf_counter() - started:6.1f} s  "
        self._console.print(Text.assemble((f"{mark} ", style), (seconds, "dim"), title, ("  " + detail, "dim")))


def moved(run: EngineRun) -> str:
    """Return what an engine restored, for the line of its step."""
    return f"{run.hit_tokens} of {run.prompt_tokens} tokens, {_moved(run.restored_bytes, run.restored_s)}"


def copied(nbytes: int) -> str:
    """Return the amount copied, for the line of a step."""
    return f"{ByteSize(nbytes)} of KV"


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
