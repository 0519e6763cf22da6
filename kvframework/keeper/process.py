"""The process of `kvframework hold`, from its start: it imports the standard library and this package."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from typing import NoReturn

from kvframework.keeper.holder import EXIT_REFUSED, Holder, Lines
from kvframework.keeper.place import AlreadyHeldError

# Not with -m, and without an empty path: the working directory is no place for modules.
PATHS = "import sys; sys.path[:] = filter(None, sys.path); "
_PROGRAM = PATHS + "from kvframework.keeper.process import main; sys.exit(main(sys.argv[1]))"


def become_holder(command: Sequence[str], base: str, log_form: str, environ: Mapping[str, str]) -> NoReturn:
    """Replace this process by one that holds, with the arguments of `Holder`: none of the command line's modules stays
    in it. Raises `OSError`."""
    argument = json.dumps({"command": command, "base": base, "log_form": log_form})
    os.execve(sys.executable, [sys.executable, "-c", _PROGRAM, argument], dict(environ))  # noqa: S606


def main(argument: str) -> int:
    """Hold, and return the exit status."""
    options = json.loads(argument)
    lines = Lines(options["log_form"])
    try:
        return Holder(options["command"], options["base"], lines).run()
    except AlreadyHeldError as error:
        lines.error(f"another `kvframework hold`, process {error}, keeps the server at this endpoint; --status asks it")
    except OSError as error:
        lines.error(f"{options['base']}: {error}")
    return EXIT_REFUSED
