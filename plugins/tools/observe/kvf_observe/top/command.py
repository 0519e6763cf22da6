"""`kvframework top`: the options of the command."""

from __future__ import annotations

import enum
import io
import sys
from typing import Annotated

import typer

from kvframework.api.command import Endpoint, EndpointConfig, examples

_EPILOG = examples(
    "kvframework top                            until Ctrl-C",
    "kvframework top --view tenants --interval 5",
    "kvframework top --once --view models       one picture as text",
    "kvframework top --frames 10 > top.txt",
)
app = typer.Typer()


class View(str, enum.Enum):
    """The names of the views."""

    overview = "overview"
    models = "models"
    tenants = "tenants"
    namespaces = "namespaces"
    engines = "engines"
    tiers = "tiers"


@app.command("top", epilog=_EPILOG)
def top(
    endpoint: Endpoint = None,
    config: EndpointConfig = None,
    view: Annotated[View, typer.Option(help="The view to show.")] = View.overview,
    interval: Annotated[float, typer.Option(min=0.1, max=3600, help="Seconds between two updates.")] = 1.0,
    frames: Annotated[int | None, typer.Option(min=1, help="Print this number of pictures as text, and end.")] = None,
    once: Annotated[bool, typer.Option("--once", help="Print one picture as text, and end.")] = False,
    timeout: Annotated[float, typer.Option(min=0.01, max=3600, help="Seconds to wait for an answer.")] = 3.0,
) -> None:
    """Show the load, hit rates and tiers of a running server live, with rates over the last minute.

    The screen goes on through restarts of the server, until Ctrl-C. Without a terminal one picture is printed; a first
    picture without a known past takes an interval, for its rates.
    """
    if once and frames is not None:
        raise typer.BadParameter("--once and --frames cannot be given together", param_hint="--once")
    from kvf_observe.top.picture import has_screen, print_frames, watch
    from kvframework.client import StatusSource, quiet_connection, server_endpoint

    quiet_connection()
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # question marks for letters that the locale has not
    source = StatusSource(server_endpoint(endpoint, config), timeout, name="top")
    if frames is None and not once and has_screen():
        watch(source, interval, view.value)
    elif not print_frames(source, interval, view.value, frames or 1):
        raise typer.Exit(2)
