"""The tree of commands, their global options, and the form in which errors reach the user.

Exit statuses: 0; 1 for an unforeseen error, or as a command documents; 2 for an error with a code and for wrong usage;
130 after an interrupt.
"""

from __future__ import annotations

import os
import sys
from typing import Annotated, NoReturn

import typer

from kvframework import __version__
from kvframework.api.command import EXIT_ERROR, EXIT_UNFORESEEN, examples
from kvframework.cli.commands import CommandGroup
from kvframework.errors import KVFrameworkError
from kvframework.overdue import bounded

NAME = "kvframework"

app = typer.Typer(
    cls=CommandGroup,
    help="A server that keeps the KV cache of LLM inference engines.",
    epilog=examples(
        "kvframework demo                          see it work, nothing is downloaded",
        "kvframework serve --config kvf.toml       run the server of this node",
        "kvframework top                           look at it",
        "kvframework --install-completion          complete with TAB",
    ),
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)


class Settings:
    """The values of the global options; the context object of every command."""

    debug = False


def run() -> None:
    """Run the command line. Ends by `SystemExit`, after one line for an error, or with its traceback under
    `--debug`."""
    settings = Settings()
    try:
        with bounded(_end_at_once):
            app(obj=settings, prog_name=NAME)
    except Exception as error:  # noqa: BLE001 - the last handler: the user gets one line for any error
        end_with(error, debug=settings.debug)


def end_with(error: Exception, *, debug: bool = False) -> NoReturn:
    """End by `SystemExit` after one line for an error, or its traceback."""
    from kvframework.api.console import print_error

    if debug:
        import traceback

        traceback.print_exception(error)
    else:
        print_error(error)
    sys.exit(EXIT_ERROR if isinstance(error, KVFrameworkError) else EXIT_UNFORESEEN)


def _end_at_once(error: KVFrameworkError) -> None:
    """End the process although its main thread waits, for a plugin that does not return."""
    from kvframework.api.console import print_error

    sys.stdout.flush()
    print_error(error)
    os._exit(EXIT_ERROR)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"{NAME} {__version__}")
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
