"""The `kvframework` console script: the server at once, or the tree of commands; and how errors reach the user.

Exit statuses: 0; 1 for an unforeseen error, or as a command documents; 2 for an error with a code and for wrong usage;
130 after an interrupt. Imports nothing heavy, so that even a Ctrl-C during the imports ends without a traceback."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvframework.errors import KVFrameworkError

EXIT_UNFORESEEN, EXIT_ERROR, EXIT_INTERRUPTED = 1, 2, 130


def main() -> None:
    _open_standard_streams()
    flags = {"debug": False}
    try:
        from kvframework.bounded_calls import bounded
        from kvframework.cli.serving import plain_options, run_server

        options = plain_options(sys.argv[1:])
        with bounded(_end_at_once):
            if options is not None:
                run_server(options)
            else:
                from kvframework.cli.commands import run

                run(flags)
    except KeyboardInterrupt:
        sys.exit(EXIT_INTERRUPTED)
    except Exception as error:  # noqa: BLE001 - the last handler: the user gets one line for any error
        sys.exit(_shown(error, debug=flags["debug"]))


def _end_at_once(error: KVFrameworkError) -> None:
    """End the process although its main thread waits, for a plugin that does not return."""
    from kvframework.logs.process_log import end_logging

    end_logging()
    sys.stdout.flush()
    os._exit(_shown(error))


def _shown(error: Exception, *, debug: bool = False) -> int:
    """Print an error, or its traceback. Return the exit status."""
    from kvframework.errors import KVFrameworkError

    if debug:
        import traceback

        traceback.print_exception(error)
    else:
        from kvframework.api.console import print_error

        print_error(error)
    return EXIT_ERROR if isinstance(error, KVFrameworkError) else EXIT_UNFORESEEN


def _open_standard_streams() -> None:
    """Open /dev/null for closed standard streams: a socket with such a number would get what libraries print."""
    for number in (0, 1, 2):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # gets the lowest number that is free


if __name__ == "__main__":
    main()
