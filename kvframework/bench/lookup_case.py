"""Owns one timed LOOKUP, whose answer is checked: a failed one would be a fast one."""

from __future__ import annotations

import time

from kvframework.bench.errors import BenchFailed
from kvframework.bench.interleave import Case
from kvframework.client import RequestHashes, SchedulerAdapter


def lookup_case(scheduler: SchedulerAdapter, request: RequestHashes, expected: int) -> Case:
    """One LOOKUP that finds `expected` tokens in L1. Raises `BenchFailed` if it does not, or failed."""

    def run() -> float:
        failures = scheduler.failures
        started = time.perf_counter()
        result = scheduler.lookup(request)
        seconds = time.perf_counter() - started
        scheduler.free(result)
        # A failed lookup reads as a miss, and would make a fast one.
        if (result.hit_tokens, result.pending, scheduler.failures) != (expected, False, failures):
            raise BenchFailed(
                f"a lookup found {result.hit_tokens} tokens",
                available=f"{expected} were expected",
                hint="the log above says why a lookup failed" if scheduler.failures > failures else "",
            )
        return seconds

    return run
