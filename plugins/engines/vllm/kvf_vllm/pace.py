"""What loads may take of an engine's steps, by what was learned: how long steps take, and how fast loads are copied.
Pure, with a clock."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

# The part of a step's own time by which loads may make it longer.
SHARE = 0.25
# How long a load may take within a step that would compute nothing else: no request waits for it but new ones.
IDLE_S = 0.05
_STEPS, _COPIES = 32, 16


class _Pace:
    """What both sides learn: how long steps take, and how fast loads are copied. Sizes are bytes or tokens, all of one
    unit. For one thread."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._steps: deque[float] = deque(maxlen=_STEPS)
        self._copied: deque[tuple[float, float]] = deque(maxlen=_COPIES)

    def copied(self, size: float, seconds: float) -> None:
        self._copied.append((size, seconds))

    def _took_s(self, size: float) -> float | None:
        """Return how long a load of this size will take to copy, None as long as nothing is known."""
        if not self._copied:
            return None
        copied = sum(each for each, _ in self._copied)
        return size * sum(seconds for _, seconds in self._copied) / max(copied, 1.0)


class LoadPace(_Pace):
    """Whether a load is short beside the next step, as the scheduler sees it. A step begins, computes, and ends; of
    several under way the first one ends first."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(clock)
        # When each step under way began, None for one that says nothing of how long steps take.
        self._begun: deque[float | None] = deque(maxlen=16)
        self._ended = 0.0
        # What the loads within the step that is planned now will take.
        self._planned_s = 0.0

    @property
    def has_planned(self) -> bool:
        return bool(self._planned_s)

    def begin_step(self, *, computes: bool, now: float | None = None) -> None:
        self._begun.append(now or self._clock() if computes and not self._planned_s else None)
        self._planned_s = 0.0

    def end_step(self, now: float | None = None) -> None:
        if not self._begun:
            return
        began, now = self._begun.popleft(), now or self._clock()
        if began is not None:
            # One that began during another waited for that.
            self._steps.append(now - max(began, self._ended))
        self._ended = now

    def is_short(self, size: float, *, idle: bool, prompt_s: float = 0.0) -> bool:
        """Whether such a load, and those that are planned already, fit within the next step; `idle`: that computes
        nothing else. `prompt_s` is how long the step computes what the request's prompt has behind the load. False as
        long as nothing is known."""
        took_s = self._took_s(size)
        if took_s is None or not (idle or self._steps):
            return False
        if idle:
            return self._planned_s + took_s <= IDLE_S
        # The shortest step computed no prompt, and no step computes more of one than the longest did.
        step_s = min(self._steps) + min(prompt_s, max(self._steps))
        return self._planned_s + took_s <= SHARE * step_s

    def plan(self, size: float) -> None:
        self._planned_s += self._took_s(size) or IDLE_S


class PiecePace(_Pace):
    """How much of the loads between steps, in bytes, a worker copies in one step, so that the requests that it computes
    hardly wait."""

    def __init__(self, clock: Callable[[], float]) -> None:
        super().__init__(clock)
        # The end of the last step's loads, None if it computed nothing.
        self._since: float | None = None
        self._begun = 0.0

    def begin(self) -> None:
        self._begun = self._clock()

    def room(self, *, computes: bool) -> int | None:
        """Return the bytes that loads may copy in this step, None for all: a step that computes nothing holds up no
        request. 0 means the smallest piece, when nothing is known yet, or the loads' start has taken the time."""
        if not computes:
            return None
        if self._since is not None:
            self._steps.append(self._begun - self._since)
        byte_s = self._took_s(1.0)
        if not self._steps or byte_s is None:
            return 0
        # The shortest: the others were those of a prefill, or an idle engine's.
        left_s = self._begun + SHARE * min(self._steps) - self._clock()
        return int(max(left_s, 0.0) / max(byte_s, 1e-15))

    def end(self, *, computes: bool) -> None:
        self._since = self._clock() if computes else None
