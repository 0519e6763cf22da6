"""Work whose cost is known."""

from __future__ import annotations

import time


def spin(seconds: float) -> None:
    """Spend `seconds` of processor time of this thread."""
    until = time.thread_time() + seconds
    while time.thread_time() < until:
        pass
