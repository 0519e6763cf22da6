"""A time bound for calls that may not return, such as closing a plugin's object or unmapping memory."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping

log = logging.getLogger(__name__)


def call_within(timeout_s: float, calls: Mapping[str, Callable[[], object]]) -> list[str]:
    """Make all `calls` at once, each in its own daemon thread, and wait up to `timeout_s` seconds for them. Returns the
    names of the calls that have not returned, which continue to run. Errors of a call are logged.

    A call for which no thread can be started is skipped, and counts as one that has not returned.
    """
    threads: dict[str, threading.Thread | None] = {}
    for name, call in calls.items():
        thread = threading.Thread(target=_logged, args=(name, call), name=f"kvf-end-{name}", daemon=True)
        try:
            thread.start()
        except RuntimeError:
            threads[name] = None
        else:
            threads[name] = thread
    deadline = time.monotonic() + timeout_s
    for thread in filter(None, threads.values()):
        thread.join(max(deadline - time.monotonic(), 0.0))
    return [name for name, thread in threads.items() if thread is None or thread.is_alive()]


def _logged(name: str, call: Callable[[], object]) -> None:
    try:
        call()
    except Exception:
        log.exception("%s: its end failed", name)
