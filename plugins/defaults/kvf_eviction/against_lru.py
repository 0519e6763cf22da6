"""Whether `two_queues` finds more than LRU would, so that it gives way where it does not. Pure.

LRU holds what was used last, as many objects as L1 has: so it would have found an object that is used again at an age
up to that of its oldest one. A use of an older object that L1 has is a gain, and one of a younger object that is only a
ghost is a loss.
"""

from __future__ import annotations

from bisect import bisect_left

# Times of which the number of objects that were used last in them is known.
_TIMES = 256
# Losses for each object in L1 that end a trial, and at least as many as this share of what is asked for.
_LOSS, _LOSS_OF_USES = 0.05, 0.01
# Objects that come for each object in L1 until the next trial, at first and at most.
_PAUSE, _LONGEST_PAUSE = 8.0, 64.0


class AgainstLru:
    """`by_age` says that the order should be that of LRU for now; `reach` is the age of what LRU would evict next. Time
    and ages are in objects that came."""

    def __init__(self) -> None:
        self.by_age = False
        self.reach = 0
        # Gains minus losses of this trial, and the uses in it.
        self.balance = 0
        self.uses = 0
        # The ends of times, and the objects that were used last in each; the last time has not ended.
        self._ends: list[int] = []
        self._last_used = [0]
        self._pause = _PAUSE
        self._resumes_at = 0

    def began(self, objects: int) -> None:
        """Count objects that came or were used just now."""
        self._last_used[-1] += objects
        self.uses += objects

    def moved(self, at: int, objects: int = 1) -> None:
        """Count objects, used before at the time `at`, as used last just now, without a use."""
        if self._ends and at <= self._ends[-1]:
            self._last_used[bisect_left(self._ends, at)] -= objects
            self._last_used[-1] += objects

    def ended(self, at: int, now: int, *, here: bool, objects: int = 1) -> None:
        """Count the use of objects that were used before at the time `at`; `here` if L1 has them."""
        self._last_used[bisect_left(self._ends, at)] -= objects
        if here != (now - at <= self.reach):
            self.balance += objects if here else -objects

    def judge(self, now: int, held: int) -> None:
        """End a time, and decide the order of the next one."""
        self._ends.append(now)
        self._last_used.append(0)
        if len(self._ends) > _TIMES:
            del self._ends[0]
            self._last_used[:2] = [sum(self._last_used[:2])]
        youngest = 0
        self.reach = now
        for index in range(len(self._ends) - 1, -1, -1):
            youngest += self._last_used[index]
            if youngest >= held:
                self.reach = now - (self._ends[index - 1] if index else 0)
                break
        if self.by_age:
            if now >= self._resumes_at:
                self.by_age, self.balance, self.uses = False, 0, 0
        elif self.balance < -max(_LOSS * held, _LOSS_OF_USES * self.uses):
            self.by_age = True
            self._resumes_at = now + int(self._pause * held)
            self._pause = min(2 * self._pause, _LONGEST_PAUSE)
        elif self.uses > 8 * held:
            # What was long ago counts half.
            if self.balance > _LOSS * held:
                self._pause = _PAUSE
            self.balance, self.uses = self.balance // 2, self.uses // 2
