"""The options of `kvframework serve`, and their quick reading: a keeper starts a server again within a second, and the
imports that a whole command line needs are a tenth of it. The standard library only."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple


class Level(str, enum.Enum):
    debug = "debug"
    info = "info"
    warning = "warning"
    error = "error"


class Format(str, enum.Enum):
    human = "human"
    json = "json"


class ServeOptions(NamedTuple):
    """What `kvframework.cli.serve` documents."""

    config: Path | None = None
    overrides: Sequence[str] = ()
    log_level: Level | None = None
    log_format: Format | None = None
    takeover: bool = False


def plain_options(arguments: Sequence[str]) -> ServeOptions | None:
    """Return the options of a command line that is `serve` with options in their usual form; None for any other, wrong
    ones and --help included, which is for the whole command line to read."""
    if arguments[:1] != ["serve"]:
        return None
    overrides: list[str] = []
    options = ServeOptions(overrides=overrides)
    words = iter(arguments[1:])
    for word in words:
        if word == "--takeover":
            options = options._replace(takeover=True)
            continue
        name, equals, value = word.partition("=")
        if not equals:
            value = next(words, "")
        if not value or value.startswith("-"):
            return None
        if name == "--config":
            options = options._replace(config=Path(value))
        elif name == "--set":
            overrides.append(value)
        elif name == "--log-level" and value in Level.__members__:
            options = options._replace(log_level=Level[value])
        elif name == "--log-format" and value in Format.__members__:
            options = options._replace(log_format=Format[value])
        else:
            return None
    return options
