"""`kvframework drain`: a running server writes to its tiers what only L1 holds, and then ends."""

from __future__ import annotations

import re
from contextlib import closing
from typing import Annotated

import msgspec
import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from kvframework.api.command import EXIT_FOUND, AsJson, Endpoint, EndpointConfig, examples
from kvframework.api.console import counted, print_document, print_text, stderr
from kvframework.api.plugin import ByteSize
from kvframework.client import StatusSource, quiet_connection, server_endpoint
from kvframework.errors import KVFrameworkError
from kvframework.status import Drain

app = typer.Typer()
LONGEST_S = 3600.0
_UNITS = {"ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}


def drain_time(text: object) -> float:
    """Return the seconds of a time such as 60s. Raises `typer.BadParameter`."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(ms|s|m|h)?", str(text))
    seconds = float(found[1]) * _UNITS[found[2] or "s"] if found else -1.0
    if not 0 <= seconds <= LONGEST_S:
        raise typer.BadParameter(f"{text!r} is not a time from 0s to 1h, such as 60s or 5m")
    return seconds


@app.command(
    epilog=examples(
        "kvframework drain                     for a minute at most",
        "kvframework drain --timeout 10m       for a large L1, or a slow tier",
    )
)
def drain(
    timeout: Annotated[
        float, typer.Option(metavar="TIME", parser=drain_time, help="Longest time for writing, such as 60s or 5m.")
    ] = 60.0,
    endpoint: Endpoint = None,
    config: EndpointConfig = None,
    as_json: AsJson = False,
) -> None:
    """Make a running server write the objects that no tier has to its tiers, and end.

    Engines load until the end; stores find no room any more. The objects used last are written first. A second drain
    joins the first one, and may only shorten it. Exit status 1: objects are left, which end with L1.
    """
    quiet_connection()
    columns = (TextColumn("drain"), BarColumn(), TextColumn("{task.description}", markup=False))
    # Before rich 14.3 even a disabled Progress writes an empty line where there is no terminal.
    terminal = stderr if stderr.is_terminal else Console(quiet=True)
    seen: Drain | None = None
    with (
        closing(StatusSource(server_endpoint(endpoint, config), 5.0, name="drain")) as source,
        Progress(*columns, console=terminal, transient=True, disable=terminal.quiet) as progress,
    ):
        bar = progress.add_task("", total=None)
        try:
            while seen is None or not seen.done:
                seen = msgspec.json.decode(source.drain(timeout), type=Drain)
                amount = f"{counted(seen.left, 'objects')} ({ByteSize(seen.left_bytes)}) left, {seen.left_s:.0f} s"
                total = seen.written + seen.left or None
                progress.update(bar, completed=seen.written, total=total, description=amount)
        except KVFrameworkError:
            if seen is None:
                raise
    _report(seen, as_json=as_json)


def _report(end: Drain, *, as_json: bool) -> None:
    """Print what was written and what is left. Raises `typer.Exit` if anything is."""
    if as_json:
        print_document(msgspec.structs.asdict(end))
    else:
        print_text(f"the server wrote {counted(end.written, 'objects')} to its tiers, and ends")
        if not end.done:
            print_text("the server ended before the drain: after a signal or by a takeover, which keeps L1")
        if end.left:
            print_text(f"not written: {counted(end.left, 'objects')}, {ByteSize(end.left_bytes)}")
            for line in end.tiers or ["no tier accepts objects of L1"]:
                print_text(f"  {line}")
    if end.left or not end.done:
        raise typer.Exit(EXIT_FOUND)
