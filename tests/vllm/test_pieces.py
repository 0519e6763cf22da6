"""Loads in pieces: how much of them a step of the engine's copies, in which order, and how they end."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from kvf_vllm.pace import SHARE
from kvf_vllm.step_messages import StepPlan
from kvf_vllm.worker import PATIENCE_S, WorkerSide
from kvframework.api.futures import Promise
from kvframework.api.transport import LoadOutcome
from tests.vllm.stand_ins import BLOCK, Clock, FakeInstance
from tests.vllm.test_worker_side import LOAD

# A load of so many bytes, in pieces of this many at least; a step takes STEP_S.
WHOLE, PIECE, STEP_S = 4000, 50, 0.1
BYTES_S = 10_000
BOUND = SHARE * STEP_S + 1e-6


class Copy:
    """A load that copies when its future is advanced, as an engine-driven transport does."""

    def __init__(self, clock: Clock) -> None:
        self.pieces: list[int] = []
        self.is_cancelled = False
        self._clock = clock
        self.future: Promise[LoadOutcome] = Promise(self._cancel, advance_hook=self._advance)

    def _advance(self, nbytes: int | None) -> int:
        left = WHOLE - sum(self.pieces)
        piece = left if nbytes is None else min(max(nbytes // PIECE * PIECE, PIECE), left)
        self._clock.now += piece / BYTES_S
        self.pieces.append(piece)
        if piece == left:
            self.future.set_result(LoadOutcome(True))
        return piece

    def _cancel(self) -> None:
        self.is_cancelled = True
        self.future.set_result(LoadOutcome(False))


class Engine:
    """Steps of a worker whose loads are copied so."""

    def __init__(self, copies: Callable[[Clock], list[Copy]]) -> None:
        self.clock = Clock()
        self.copies = copies(self.clock)
        left = [each.future for each in self.copies]
        self.instance = FakeInstance(lambda: left.pop(0))
        self.worker = WorkerSide(self.instance, block_size=BLOCK, clock=self.clock)

    def step(self, *requests: str, computes: bool = True, starting_s: float = 0.0) -> float:
        """One step, which starts these loads; returns how long its loads held it up."""
        if computes:
            self.clock.now += STEP_S
        began = self.clock.now
        if starting_s:
            answer = self.instance.answer

            def slowly() -> object:
                self.clock.now += starting_s
                return answer()

            self.instance.answer = slowly  # type: ignore[assignment]
        self.worker.load(StepPlan([replace(LOAD, request_id=each) for each in requests], computes=computes))
        return self.clock.now - began


def test_a_load_beside_computing_is_copied_in_pieces_within_their_share_of_a_step() -> None:
    engine = Engine(lambda clock: [Copy(clock)])
    engine.step()
    engine.step("a")
    assert engine.copies[0].pieces == [PIECE], "nothing is known of the speed: the smallest piece"
    while not engine.copies[0].future.query():
        assert engine.worker.finished_loads() == (set(), set())
        assert 0 < engine.step() <= BOUND
    assert sum(engine.copies[0].pieces) == WHOLE
    assert len(engine.copies[0].pieces) <= WHOLE / (SHARE * STEP_S * BYTES_S) + 2, "more steps than it takes"
    assert engine.worker.finished_loads() == ({"a"}, set())
    assert engine.worker.take_report().loaded == {"a": 1}


def test_a_load_that_holds_up_nobody_is_copied_at_once() -> None:
    engine = Engine(lambda clock: [Copy(clock)])
    engine.step("a", computes=False)
    assert engine.copies[0].pieces == [WHOLE]
    assert engine.worker.finished_loads() == ({"a"}, set())


def test_what_is_left_of_a_load_is_copied_once_nobody_waits() -> None:
    engine = Engine(lambda clock: [Copy(clock)])
    engine.step("a")
    engine.step()
    engine.step(computes=False)
    assert engine.copies[0].future.query()
    assert len(engine.copies[0].pieces) == 3


def test_loads_share_the_time_in_the_order_of_their_arrival() -> None:
    engine = Engine(lambda clock: [Copy(clock), Copy(clock), Copy(clock)])
    one, two, three = engine.copies
    engine.step()
    engine.step("a", "b")
    assert not two.pieces
    while not one.future.query():
        assert not two.pieces
        assert engine.step() <= BOUND
    # What the first one leaves of a step is the second one's.
    while not two.future.query():
        assert engine.step() <= BOUND
    assert not three.pieces


def test_an_idle_time_between_steps_is_no_step() -> None:
    """After an hour's pause a load beside computing is as bounded as before."""
    engine = Engine(lambda clock: [Copy(clock), Copy(clock)])
    engine.step()
    engine.step("a")
    engine.step()
    engine.step(computes=False)
    engine.step()
    engine.clock.now += 3600
    assert engine.step("b") <= BOUND


def test_the_start_of_loads_counts_as_their_time() -> None:
    engine = Engine(lambda clock: [Copy(clock), Copy(clock)])
    engine.step()
    engine.step("a")
    engine.step("b", starting_s=SHARE * STEP_S)
    assert engine.copies[0].pieces[-1] == PIECE


def test_a_load_whose_pins_will_not_last_has_no_bound() -> None:
    engine = Engine(lambda clock: [Copy(clock)])
    engine.step()
    engine.step("a")
    engine.clock.now += PATIENCE_S
    engine.step()
    assert engine.copies[0].future.query()


def test_a_load_within_a_step_is_not_in_pieces() -> None:
    asked: list[bool] = []

    class Instance(FakeInstance):
        def load(self, ops, *, in_pieces=False):  # type: ignore[no-untyped-def]
            asked.extend([in_pieces] * len(ops))
            return super().load(ops, in_pieces=in_pieces)

    for is_within in (True, False):
        WorkerSide(Instance(), block_size=BLOCK).load(StepPlan([replace(LOAD, is_within=is_within)]))
    assert asked == [False, True]


@pytest.mark.parametrize("block_size", [BLOCK, 0])
def test_a_load_whose_request_has_left_ends_and_is_no_failure(block_size: int) -> None:
    """vLLM frees the blocks at its end, and asks for nothing to be computed."""
    engine = Engine(lambda clock: [Copy(clock), Copy(clock)])
    engine.worker._block_size = block_size
    engine.step()
    engine.step("a", "b")
    assert engine.worker.finished_loads({"a", "never heard of"}) == ({"a"}, set())
    assert engine.copies[0].is_cancelled
    assert not engine.copies[1].is_cancelled
    assert engine.worker.take_failed_blocks() == set()
    report = engine.worker.take_report()
    assert (report.loaded, report.failed) == ({"a": 1}, set())
    assert engine.worker.tally.counts["failed_loads"] == 0
    assert engine.worker.finished_loads({"a"}) == (set(), set())


def test_an_engine_that_ends_ends_what_is_left_of_its_loads() -> None:
    engine = Engine(lambda clock: [Copy(clock)])
    engine.step("a")
    engine.worker.close()
    assert engine.copies[0].is_cancelled


def test_a_load_that_cannot_be_advanced_ends_and_those_behind_it_go_on() -> None:
    """Its request would wait for ever."""

    def broken(_: int | None) -> int:
        raise ValueError("a transport with a mistake")

    def cancelled() -> None:
        load.set_result(LoadOutcome(False))

    engine = Engine(lambda clock: [Copy(clock), Copy(clock)])
    load = engine.copies[0].future = Promise(cancelled, advance_hook=broken)
    left = [each.future for each in engine.copies]
    engine.instance.answer = lambda: left.pop(0)  # type: ignore[assignment]
    engine.step("a", "b")
    assert engine.worker.finished_loads() == ({"a"}, set())
    assert engine.worker.take_failed_blocks() == {2, 3, 4}
    assert engine.copies[1].pieces
