"""Whether a load is short beside the engine's step, by what was learned: how long steps take, and how fast loads are
copied. Pure, with a clock."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

# The part of a step's own time by which loads within it may make it longer.
SHARE = 0.25
# How long a load may take within a step that would compute nothing else: no request waits for it but new ones.
IDLE_S = 0.05
_STEPS, _LOADS = 32, 16


class Pace:
    """The engine's. A step begins, computes, and ends; of several under way the first one ends first. For one
    thread."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        # When each step under way began, None for one that says nothing of how long steps take.
        self._begun: deque[float | None] = deque(maxlen=16)
        self._ended = 0.0
        self._steps: deque[float] = deque(maxlen=_STEPS)
        self._copied: deque[tuple[int, float]] = deque(maxlen=_LOADS)
        # What the loads within the step that is planned now will take.
        self._planned_s = 0.0

    @property
    def has_planned(self) -> bool:
        """Whether a load will be within the next step."""
        return bool(self._planned_s)

    def begin_step(self, *, computes: bool) -> None:
        self._begun.append(self._clock() if computes and not self._planned_s else None)
        self._planned_s = 0.0

    def end_step(self) -> None:
        if not self._begun:
            return
        began, now = self._begun.popleft(), self._clock()
        if began is not None:
            # One that began during another waited for that.
            self._steps.append(now - max(began, self._ended))
        self._ended = now

    def copied(self, nbytes: int, seconds: float) -> None:
        """Load of a worker have taken so long to copy."""
        self._copied.append((nbytes, seconds))

    def is_short(self, nbytes: int, *, idle: bool) -> bool:
        """Whether such a load, and those that are planned already, fit within the next step; `idle`: that computes
        nothing else. False as long as nothing is known."""
        took_s = self._took_s(nbytes)
        if took_s is None or not (idle or self._steps):
            return False
        # The shortest: the others were those of a prefill.
        return self._planned_s + took_s <= (IDLE_S if idle else SHARE * min(self._steps))

    def plan(self, nbytes: int) -> None:
        """A load will be within the next step."""
        self._planned_s += self._took_s(nbytes) or IDLE_S

    def _took_s(self, nbytes: int) -> float | None:
        if not self._copied:
            return None
        copied, seconds = sum(each[0] for each in self._copied), sum(each[1] for each in self._copied)
        return nbytes * seconds / max(copied, 1)
