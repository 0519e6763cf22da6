"""What the commands share and what needs no rich: exit statuses, options, and the form of help texts.

A command's module holds its options alone and imports its work when it runs, so that help and completion are quick.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

if TYPE_CHECKING:
    from kvframework.api.plugin import ByteSize

T = TypeVar("T")

EXIT_UNFORESEEN = 1
EXIT_FOUND = 1  # a check that found a problem
EXIT_ERROR = 2

CONFIG_HELP = "The TOML file; without it $KVFRAMEWORK_CONFIG, then the embedded default."


def size_of(text: str) -> int:
    """Parses an option that is a size."""
    return _parsed(parsed_size, text)


def parsed_size(text: str) -> ByteSize:
    """Return the bytes of a size such as `64MiB` or `3GB`, one at least. Raises `ValueError` with the expected form."""
    from kvframework.api.plugin import ByteSize

    size = ByteSize.parse(text)
    if not size:
        raise ValueError(f"expected a size such as 512MiB or 4TB, found {text!r}")
    return size


def seconds_of(text: str) -> float:
    """Parses an option that is a time."""
    from kvframework.text import parsed_duration

    return _parsed(parsed_duration, text)


def count_of(text: str) -> float:
    """Parses an option that is a positive number, perhaps of thousands."""
    from kvframework.text import parsed_count

    return _parsed(parsed_count, text)


def _parsed(parse: Callable[[str], T], text: str) -> T:
    try:
        return parse(text)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None


ConfigFile = Annotated[Path | None, typer.Option("--config", help=CONFIG_HELP)]
Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="TABLE.KEY=VALUE", help="Override one value of the TOML; repeatable."),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print a JSON document.")]
