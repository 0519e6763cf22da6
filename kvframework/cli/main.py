"""The `kvframework` console script, which only calls `kvframework.cli.app`, or the server at once.

Imports nothing heavy, so that even a Ctrl-C during the imports ends without a traceback.
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvframework.cli.serving import ServeOptions

EXIT_INTERRUPTED = 130


def main() -> None:
    """Run the command and exit with its status."""
    _open_standard_streams()
    try:
        from kvframework.cli.serving import plain_options

        options = plain_options(sys.argv[1:])
        if options is not None:
            _serve(options)
        else:
            from kvframework.cli.app import run

            run()
    except KeyboardInterrupt:
        sys.exit(EXIT_INTERRUPTED)


def _serve(options: ServeOptions) -> None:
    from kvframework.cli.serving import run_server

    try:
        run_server(options)
    except Exception as error:  # noqa: BLE001 - the last handler, as in `app`
        from kvframework.cli.app import end_with

        end_with(error)


def _open_standard_streams() -> None:
    """Give the numbers of closed standard streams to /dev/null: a socket under the number of one would get what a
    library prints."""
    for number in (0, 1, 2):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # gets the lowest number that is free


if __name__ == "__main__":
    main()
