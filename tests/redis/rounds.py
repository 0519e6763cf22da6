"""Rounds of stores and loads at a tier that is killed, frozen or replaced meanwhile. A value says over and over whose
it is, so that a foreign byte anywhere in it shows."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from kvframework.api.tier import Outcome, Tier
from kvframework.errors import TierError
from tests.support.redis_tier import get, soon
from tests.support.waiting import wait_until

PATIENCE_S = 60.0


@contextmanager
def rounds(tier: Tier, size: int, *, call_s: float, threads: int = 1) -> Iterator[Callable[..., None]]:
    """Run rounds of values of `size` bytes until the block ends; fail then if a byte was wrong. The yielded
    `progress(what, count=3)` waits for so many further rounds in which all was "found", or a call "failed"."""
    counts = {"found": 0, "failed": 0}
    wrong: list[bytes] = []
    done = threading.Event()

    def run(seed: int) -> None:
        turn = 0
        while not done.is_set():
            turn += 1
            keys = [b"%d/%d/%d" % (seed, turn % 3, index) for index in range(4)]
            values = [(b"<%b.%d>" % (key, turn) * size)[:size] for key in keys]
            try:
                tier.put(keys, [[memoryview(value)] for value in values], deadline=soon(call_s))
                outcomes, found = get(tier, *keys, nbytes=size, deadline=soon(call_s))
            except TierError:
                counts["failed"] += 1
                continue
            counts["found"] += outcomes == [Outcome.FOUND] * 4
            for key, value, outcome in zip(keys, found, outcomes, strict=True):
                unit = value[: value.find(b">") + 1]
                right = unit.startswith(b"<%b." % key) and value == (unit * size)[:size]
                if outcome is Outcome.FOUND and not right:
                    wrong.append(unit)

    def progress(what: str, count: int = 3) -> None:
        target = counts[what] + count
        wait_until(lambda: counts[what] >= target, PATIENCE_S, f"rounds {what}")

    running = [threading.Thread(target=run, args=(seed,)) for seed in range(threads)]
    for thread in running:
        thread.start()
    try:
        yield progress
    finally:
        done.set()
        for thread in running:
            thread.join()
    assert not wrong
