"""What a tier lacked a moment ago: a prompt that is looked up again, or by several requests at once, is not asked for
each time. A pure state machine: no I/O, no clock, no lock (its caller serialises).

An answer is remembered for `hold_s` at most, since other nodes write to a shared tier; what this server writes is
forgotten at once, also by questions that were under way at that time.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from kvframework.api.keys import PackedKey

# What another node writes is seen this much later at worst; the connector of vLLM holds a miss for as long by itself.
HOLD_S = 0.5
MOST = 1 << 14


class Question:
    """One question to the tier that is under way, and what was written meanwhile."""

    def __init__(self) -> None:
        self.written: set[PackedKey] = set()


class Absences:
    """The keys that the tier lacked, at most `most` of them: the oldest answers are forgotten first."""

    def __init__(self, hold_s: float = HOLD_S, most: int = MOST) -> None:
        self._hold_s = hold_s
        self._most = most
        # The time until which each holds, the soonest first.
        self._until: dict[PackedKey, float] = {}
        self._under_way: set[Question] = set()

    def __len__(self) -> int:
        return len(self._until)

    def lacked(self, key: PackedKey, now: float) -> bool:
        """Whether the tier lacked the key a moment ago, and nothing was written here since."""
        return self._until.get(key, now) > now

    def ask(self) -> Question:
        """Begin a question; `answered` ends it."""
        question = Question()
        self._under_way.add(question)
        return question

    def answered(self, question: Question, missing: Iterable[PackedKey], now: float) -> None:
        """End a question, to which the tier answered now that it lacks `missing`; () if it did not answer."""
        self._under_way.discard(question)
        while self._until and self._until[oldest := next(iter(self._until))] <= now:
            del self._until[oldest]
        for key in missing:
            if key not in question.written:
                self._until.pop(key, None)
                self._until[key] = now + self._hold_s
        while len(self._until) > self._most:
            del self._until[next(iter(self._until))]

    def written(self, keys: Sequence[PackedKey]) -> None:
        """The tier may have these now."""
        for key in keys:
            self._until.pop(key, None)
        for question in self._under_way:
            question.written.update(keys)
