"""What the commands share and what needs no rich: exit statuses, options, and the form of help texts.

A command's module holds its options alone and imports its work when it runs, so that help and completion are quick.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, TypeVar

import typer

T = TypeVar("T")

EXIT_UNFORESEEN = 1
EXIT_FOUND = 1  # a check that found a problem
EXIT_ERROR = 2

CONFIG_HELP = "The TOML file; without it $KVFRAMEWORK_CONFIG, then the embedded default."


def size_of(text: str) -> int:
    """Parses an option that is a size."""
    from kvframework.cli.numbers import parsed_size

    return _parsed(parsed_size, text)


def seconds_of(text: str) -> float:
    """Parses an option that is a time."""
    from kvframework.cli.numbers import parsed_duration

    return _parsed(parsed_duration, text)


def count_of(text: str) -> float:
    """Parses an option that is a positive number, perhaps of thousands."""
    from kvframework.cli.numbers import parsed_count

    return _parsed(parsed_count, text)


def _parsed(parse: Callable[[str], T], text: str) -> T:
    try:
        return parse(text)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None


def examples(*lines: str) -> str:
    """Return the end of a help text. The mark keeps it from being wrapped."""
    return "\b\nExamples:\n" + "\n".join(f"  {line}" for line in lines)


ConfigFile = Annotated[Path | None, typer.Option("--config", help=CONFIG_HELP)]
Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="TABLE.KEY=VALUE", help="Override one value of the TOML; repeatable."),
]
Endpoint = Annotated[str | None, typer.Option(help="Without it $KVFRAMEWORK_ENDPOINT, then that of the configuration.")]
EndpointConfig = Annotated[Path | None, typer.Option("--config", help="Take the endpoint from this TOML file.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print a JSON document.")]
