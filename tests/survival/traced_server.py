"""`kvframework serve`, traced. With the arguments of the transport kit's server program it is that one, traced."""

from __future__ import annotations

import sys

from tests.survival import traced


def main() -> None:
    if "serve" in sys.argv:
        from kvframework.cli.main import main as serve
    else:
        from kvframework.testing.transport.server_program import main as serve
    traced.start()
    serve()


if __name__ == "__main__":
    main()
