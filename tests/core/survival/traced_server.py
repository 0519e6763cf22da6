"""`kvframework serve`, traced. With the arguments of the transport kit's programs it is that one, traced.

What has a bound is full at once: else its growth up to there would pass for a leak.
"""

from __future__ import annotations

import sys

from kvframework.logs import process_log
from kvframework.service import recent_requests, usage_counts
from tests.core.survival import traced


def main() -> None:
    if "serve" in sys.argv:
        from kvframework.cli.main import main as serve
    else:
        from kvf_dev.testing.transport.node import main as serve
    recent_requests.MOST = process_log.RECENT = usage_counts.ENTRIES = 16
    usage_counts.MOST = 32
    traced.start()
    serve()


if __name__ == "__main__":
    main()
