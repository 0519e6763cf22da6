"""The profile of a call: its hottest functions, and no waiting."""

from __future__ import annotations

import time

from benchmarks.tests.processor_time import spin
from kvframework_bench.contention.profile import Entry, hottest, profiled
from tests.support.waiting import wait_until


def test_the_hottest_functions_are_those_with_most_own_time() -> None:
    here, elsewhere = spin.__code__, wait_until.__code__
    entries = [Entry(here, 4, 0.002), Entry("<built-in method len>", 8, 0.006), Entry(elsewhere, 1, 0.5)]
    spots = hottest(entries, 2, top=2, without=(elsewhere.co_filename,))
    assert [(spot.function, spot.calls, spot.share) for spot in spots] == [
        ("built-in method len", 4, 0.75),
        ("tests/processor_time.py: spin", 2, 0.25),
    ]
    assert [round(spot.own_us) for spot in spots] == [3000, 1000]
    assert len(hottest(entries, 2, top=1, without=())) == 1


def test_the_profiler_counts_work_and_no_waiting() -> None:
    def call() -> None:
        time.sleep(0.1)
        spin(0.003)

    entries = profiled(call, 3)
    own = {entry.code: entry for entry in entries}
    assert own[call.__code__].calls == 3
    assert not any("Profiler" in str(code) for code in own)
    assert 0.008 < sum(entry.own_s for entry in entries) < 0.2
