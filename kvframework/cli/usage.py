"""What the commands share and what needs no rich: exit statuses, options, and the form of help texts.

A command's module holds its options alone and imports its work when it runs, so that help and completion are quick.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

EXIT_UNFORESEEN = 1
EXIT_FOUND = 1  # a check that found a problem
EXIT_ERROR = 2

CONFIG_HELP = "The TOML file; without it $KVFRAMEWORK_CONFIG, then the embedded default."


ConfigFile = Annotated[Path | None, typer.Option("--config", help=CONFIG_HELP)]
Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="TABLE.KEY=VALUE", help="Override one value of the TOML; repeatable."),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print a JSON document.")]
