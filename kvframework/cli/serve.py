"""Owns `kvframework serve`: one server in the foreground, until SIGINT or SIGTERM."""

from __future__ import annotations

import logging
import signal
from pathlib import Path
from typing import Annotated

import typer

from kvframework.config import load_config
from kvframework.server import Server

CONFIG_HELP = "The TOML file; without it $KVFRAMEWORK_CONFIG, then the embedded default."


def register(app: typer.Typer) -> None:
    app.command("serve")(serve)


def serve(
    config: Annotated[Path | None, typer.Option("--config", help=CONFIG_HELP)] = None,
    overrides: Annotated[
        list[str] | None, typer.Option("--set", metavar="TABLE.KEY=VALUE", help="Overrides one value of the TOML.")
    ] = None,
    log_level: Annotated[str, typer.Option(help="debug, info, warning or error.")] = "info",
) -> None:
    """Run the server of this node in the foreground."""
    levels = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}
    if log_level not in levels:
        raise typer.BadParameter(f"{log_level!r} is none of {', '.join(levels)}", param_hint="--log-level")
    logging.basicConfig(level=levels[log_level], format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    server = Server(load_config(config, overrides or ()))
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda _number, _frame: server.stop())
    try:
        server.bind()
    except BaseException:
        server.close()
        raise
    server.serve_forever()
