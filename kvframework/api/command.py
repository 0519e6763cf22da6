"""The parts that all commands share and that do not need rich: exit statuses, options, and the form of help texts.

A command's module holds its options alone and imports its work when it runs, so that help and completion are quick.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from typer.core import TyperGroup

if TYPE_CHECKING:
    from typer._click.core import Context  # typer has its own click, and gives this type no other name

__all__ = ["AsJson", "ConfigFile", "Endpoint", "EndpointConfig", "Overrides", "QuickGroup", "examples", "read_file"]

EXIT_UNFORESEEN = 1
EXIT_FOUND = 1  # a check that found a problem
EXIT_ERROR = 2
MAX_FILE = 16 << 20

CONFIG_HELP = "The TOML file; default: $KVFRAMEWORK_CONFIG, else the embedded default."
ConfigFile = Annotated[Path | None, typer.Option("--config", help=CONFIG_HELP)]
Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="TABLE.KEY=VALUE", help="Override one value of the TOML; repeatable."),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print a JSON document.")]

Endpoint = Annotated[str | None, typer.Option(help="The endpoint; default: $KVFRAMEWORK_ENDPOINT, else as configured.")]
EndpointConfig = Annotated[Path | None, typer.Option("--config", help="Take the endpoint from this TOML file.")]


def examples(*lines: str) -> str:
    """Return the end of a help text. The mark keeps it from being wrapped."""
    return "\b\nExamples:\n" + "\n".join(f"  {line}" for line in lines)


def read_file(path: Path, where: str) -> bytes:
    """Return the content of the file that a command was given, `-`: standard input; of at most 16 MiB. Blocking. Raises
    `RequestError` with `where`, the option's name, for a larger file or one that cannot be read."""
    from kvframework.errors import RequestError

    try:
        with sys.stdin.buffer if path == Path("-") else path.open("rb") as file:
            content = file.read(MAX_FILE + 1)
    except OSError as error:
        raise RequestError(f"{path} cannot be read: {error.strerror}", where=where) from None
    if len(content) > MAX_FILE:
        raise RequestError(f"{path} is too large", where=where, available=f"at most {MAX_FILE} bytes")
    return content


class QuickGroup(TyperGroup):
    """A group of commands whose absent options cost nothing: typer imports pydantic, 0.1 s, to convert one."""

    def parse_args(self, ctx: Context, args: list[str]) -> list[str]:
        """Parse without the group's options if a command comes first."""
        own = self.params
        if args and args[0] in self.commands:  # no option of the group itself is given
            ctx.params.update({str(each.name): each.default for each in own if each.expose_value})
            self.params = []
        for parameter in self.get_params(ctx):
            if getattr(parameter, "is_flag", False) and parameter.default is None:
                parameter.default = False
        try:
            return super().parse_args(ctx, args)
        finally:
            self.params = own
