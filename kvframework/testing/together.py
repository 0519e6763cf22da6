"""Concurrent calls for the kits, with their errors raised in the test's own thread."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence


def together(works: Sequence[Callable[[], object]], within_s: float) -> None:
    """Run `works` at the same time. Raises the first error that one of them raised; fails if one does not end."""
    raised: list[BaseException] = []

    def run(work: Callable[[], object]) -> None:
        try:
            work()
        except BaseException as error:  # noqa: BLE001  raised again in the test's own thread
            raised.append(error)

    threads = [threading.Thread(target=run, args=(work,), daemon=True) for work in works]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + within_s
    for thread in threads:
        thread.join(max(deadline - time.monotonic(), 0.0))
    if raised:
        raise raised[0]
    assert not any(thread.is_alive() for thread in threads), "a call does not end"
