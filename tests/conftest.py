"""What holds for every test: a run in the background is like one in the foreground."""

from __future__ import annotations

import signal


def pytest_configure() -> None:
    # Shells start background jobs with SIGINT ignored, and every process that a test starts would inherit that.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
