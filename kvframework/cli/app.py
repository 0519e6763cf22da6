"""The tree of commands and their global options."""

from __future__ import annotations

from typing import Annotated

import typer

from kvframework import __version__
from kvframework.api.command import examples
from kvframework.cli.commands import CommandGroup

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


def run(flags: dict[str, bool]) -> None:
    """Run the command line. Ends by `SystemExit`, or raises. `flags` gets the values of the global options."""
    app(obj=flags, prog_name=NAME)


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
    context.ensure_object(dict)["debug"] = debug
