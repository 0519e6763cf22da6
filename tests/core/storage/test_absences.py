"""What a tier lacked, against a model: nothing that was written here is taken for absent, nothing is for long."""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvframework.storage.l2.tier_calls import Absences

HOLD_S = 2.0
MOST = 6
KEYS = [bytes([number]) * 72 for number in range(9)]
some_keys = st.lists(st.sampled_from(KEYS), unique=True, max_size=5)


class AbsencesMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.absences = Absences(HOLD_S, MOST)
        self.now = 0.0
        # The turn in which each key was last written here, in which each question began, and of each answer its time.
        self.turn = 0
        self.written: dict[bytes, int] = {}
        self.under_way: list[tuple[int, int]] = []
        self.told: dict[bytes, tuple[int, float]] = {}

    @rule(seconds=st.sampled_from([0.5, 1.0, 2.0, 7.0]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds

    @rule()
    def ask(self) -> None:
        self.turn += 1
        self.under_way.append((self.absences.writes, self.turn))

    @precondition(lambda self: self.under_way)
    @rule(which=st.integers(0, 1 << 16), missing=some_keys)
    def answer(self, which: int, missing: list[bytes]) -> None:
        writes, began = self.under_way.pop(which % len(self.under_way))
        self.absences.answered(missing, writes, self.now)
        for key in missing:
            if self.written.get(key, -1) < began:
                self.told[key] = (began, self.now)

    @rule(keys=some_keys)
    def write(self, keys: list[bytes]) -> None:
        self.turn += 1
        self.absences.written(keys)
        for key in keys:
            self.written[key] = self.turn
            self.told.pop(key, None)

    @rule(missing=some_keys)
    def one_answer_is_remembered_at_once(self, missing: list[bytes]) -> None:
        self.turn += 1
        self.absences.answered(missing, self.absences.writes, self.now)
        for key in missing:
            self.told[key] = (self.turn, self.now)
            assert self.absences.lacked(key, self.now)

    @invariant()
    def what_is_remembered_was_told_lately(self) -> None:
        for key in KEYS:
            if self.absences.lacked(key, self.now):
                began, at = self.told[key]
                assert self.written.get(key, -1) < began
                assert self.now < at + HOLD_S
        assert len(self.absences) <= MOST


TestAbsences = AbsencesMachine.TestCase
