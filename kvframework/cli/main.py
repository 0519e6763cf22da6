"""Owns the `kvframework` command: its commands, its global options, and how errors leave it."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Annotated

import typer

from kvframework import __version__
from kvframework.cli import config, demo, plugins, serve, status
from kvframework.cli.console import print_error, stdout
from kvframework.errors import KVFrameworkError

EXIT_ERROR = 2

app = typer.Typer(
    help="A server that keeps the KV cache of LLM inference engines.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

for command in (serve, demo, status, plugins, config):
    command.register(app)


@dataclass
class Settings:
    """What the global options say; the context object of every command."""

    debug: bool = False


def main() -> None:
    """The console script. A `KVFrameworkError` is printed without a traceback and ends with exit status 2."""
    settings = Settings()
    try:
        app(obj=settings)
    except KVFrameworkError as error:
        if settings.debug:
            raise
        print_error(error)
        sys.exit(EXIT_ERROR)


def _print_version(wanted: bool) -> None:
    if wanted:
        stdout.print(f"kvframework {__version__}")
        raise typer.Exit


@app.callback()
def _global_options(
    context: typer.Context,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
    _version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    context.ensure_object(Settings).debug = debug


if __name__ == "__main__":
    main()
