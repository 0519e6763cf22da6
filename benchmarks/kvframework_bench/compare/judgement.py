"""The judgement on one figure of two runs: faster, slower, or neither beyond the noise. Pure.

A spread is judged by its ranges: each median has to lie outside the other's range, and to differ by `threshold`. What
has no range of rounds needs a larger difference, `ALONE`, and a p99 a larger one still, `TAIL`.
"""

from __future__ import annotations

from typing import Literal

from kvframework_bench.compare.measured import Measured

Verdict = Literal["better", "same", "worse"]

THRESHOLD = 0.05
ALONE = 0.3
TAIL = 1.0


def gain(before: Measured, after: Measured) -> float:
    """Return how many times as good it is: above 1 is better, whatever the figure. 1 where nothing can be said: a
    figure of 0 or less has no ratio."""
    if before.value <= 0 or after.value <= 0:
        return 1.0
    change = after.value / before.value
    return change if before.reading.better == "more" else 1 / change


def judge(before: Measured, after: Measured, threshold: float = THRESHOLD) -> Verdict:
    """Return the verdict on `after`. Both are one figure of two runs."""
    ranged = not (before.low is None or before.high is None or after.low is None or after.high is None)
    needed = 1 + (threshold if ranged else max(threshold, TAIL if before.tail else ALONE))
    found = gain(before, after)
    if 1 / needed < found < needed:
        return "same"
    if _within(before.value, after) or _within(after.value, before):
        return "same"
    return "better" if found > 1 else "worse"


def _within(value: float, other: Measured) -> bool:
    return other.low is not None and other.high is not None and other.low <= value <= other.high
