"""The `kvframework` console script, which only calls `kvframework.cli.app`.

Imports nothing heavy, so that even a Ctrl-C during the imports ends without a traceback.
"""

from __future__ import annotations

import sys

EXIT_INTERRUPTED = 130


def main() -> None:
    """Run the command and exit with its status."""
    try:
        from kvframework.cli.app import run

        run()
    except KeyboardInterrupt:
        sys.exit(EXIT_INTERRUPTED)


if __name__ == "__main__":
    main()
