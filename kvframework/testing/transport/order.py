"""Owns the transport kit's tests of order: copies against the engine's own work, cancel, and the engine's thread."""

from __future__ import annotations

import threading
import time

import pytest

from kvframework.api.futures import Future
from kvframework.api.transport import StoreOutcome
from kvframework.testing.transport.cases import PAGED
from kvframework.testing.transport.kit import MakeEngine, TransportKit
from kvframework.testing.transport.node import PATIENCE_S, wait_until
from kvframework.testing.transport.rig import TransportRig

NHD = PAGED["nhd"]


class Order(TransportKit):
    """What happens before what."""

    def test_a_store_holds_what_was_written_before_its_event(self, make_engine: MakeEngine) -> None:
        engine = make_engine(NHD)
        request = engine.request()
        event = engine.overwrite(later=True)
        assert engine.store(request, engine.source(), event=event).result(PATIENCE_S).ok
        assert engine.load(request, engine.target()).result(PATIENCE_S).ok
        engine.expect_loaded(engine.snapshot(), engine.source(), engine.target())
        assert engine.differences() == []

    def test_a_load_comes_after_what_its_event_stands_for(self, make_engine: MakeEngine) -> None:
        """The blocks are still written by work that the engine had queued: the load is not to be overwritten by it."""
        engine = make_engine(NHD)
        request = engine.request()
        assert engine.store(request, engine.source()).result(PATIENCE_S).ok
        stored = engine.snapshot()
        event = engine.overwrite(later=True)
        assert engine.load(request, engine.target(), event=event).result(PATIENCE_S).ok
        engine.expect_loaded(stored, engine.source(), engine.target())
        assert engine.differences() == []

    def test_blocks_are_free_once_their_store_is_done(self, make_engine: MakeEngine) -> None:
        engine = make_engine(NHD)
        for _ in range(3):
            request = engine.request()
            assert engine.store(request, engine.source()).result(PATIENCE_S).ok
            stored = engine.snapshot()
            engine.overwrite()
            assert engine.load(request, engine.target()).result(PATIENCE_S).ok
            engine.expect_loaded(stored, engine.source(), engine.target())
            assert engine.differences() == []

    def test_nothing_is_answered_while_a_copy_stands_still(self, rig: TransportRig, make_engine: MakeEngine) -> None:
        self.needs_asynchronous(rig)
        engine = make_engine(NHD)
        request = engine.request()
        with self.holding(rig) as held:
            future = engine.store(request, engine.source())
            wait_until(rig.held, "a copy that is held")
            with pytest.raises(TimeoutError):
                future.result(0.2)
            assert engine.hit(request) == 0, "nothing is published before it is there"
            held.leave()
            assert future.result(PATIENCE_S).ok

    def test_a_submit_does_not_wait_for_copies(self, rig: TransportRig, make_engine: MakeEngine) -> None:
        self.needs_asynchronous(rig)
        engine = make_engine(NHD)
        requests = [engine.request() for turn in range(8)]
        assert engine.store(requests[0], engine.source()).result(PATIENCE_S).ok
        with self.holding(rig) as held:
            first = engine.store(requests[1], engine.source())
            wait_until(rig.held, "a copy that is held")
            took, futures = [], [first]
            for request in requests[2:]:
                started = time.perf_counter()
                futures.append(engine.store(request, engine.source()))
                took.append(time.perf_counter() - started)
            # The median: any single one may be interrupted by the machine.
            assert sorted(took)[len(took) // 2] < self.submit_budget_s
            held.leave()
            assert all(future.result(PATIENCE_S) for future in futures)

    def test_a_cancelled_store_is_never_published(self, rig: TransportRig, make_engine: MakeEngine) -> None:
        self.needs_asynchronous(rig)
        engine = make_engine(NHD)
        request = engine.request()
        with self.holding(rig) as held:
            future = engine.store(request, engine.source())
            wait_until(rig.held, "a copy that is held")
            future.cancel()
            with pytest.raises(TimeoutError):
                future.result(0.2)
            held.leave()
            assert not future.result(PATIENCE_S).ok
        # From here on the blocks are the engine's again, at once.
        engine.overwrite()
        assert engine.hit(request) == 0
        assert engine.store(request, engine.source()).result(PATIENCE_S).ok
        assert engine.load(request, engine.target()).result(PATIENCE_S).ok
        engine.expect_loaded(engine.snapshot(), engine.source(), engine.target())
        assert engine.differences() == []

    def test_a_cancelled_load_touches_nothing_once_it_is_answered(
        self, rig: TransportRig, make_engine: MakeEngine
    ) -> None:
        self.needs_asynchronous(rig)
        engine = make_engine(NHD)
        request = engine.request()
        assert engine.store(request, engine.source()).result(PATIENCE_S).ok
        with self.holding(rig) as held:
            future = engine.load(request, engine.target())
            wait_until(rig.held, "a copy that is held")
            future.cancel()
            with pytest.raises(TimeoutError):
                future.result(0.2)
            held.leave()
            assert not future.result(PATIENCE_S).ok
        engine.overwrite()
        # A load behind it has come past everything that could still be under way.
        other = engine.request()
        assert engine.store(other, engine.source()).result(PATIENCE_S).ok
        assert engine.differences() == []

    def test_a_waiting_transfer_is_cancelled(self, rig: TransportRig, make_engine: MakeEngine) -> None:
        self.needs_asynchronous(rig)
        engine = make_engine(NHD)
        request = engine.request()
        event = engine.overwrite(later=True)
        future = engine.store(request, engine.source(), event=event)
        future.cancel()
        assert not future.result(PATIENCE_S).ok
        assert engine.hit(request) == 0
        assert engine.differences() == []

    def test_a_submit_does_not_wait_for_the_engines_work(self, rig: TransportRig, make_engine: MakeEngine) -> None:
        self.needs_asynchronous(rig)
        engine = make_engine(NHD)
        request = engine.request()
        futures: list[Future[StoreOutcome]] = []
        with self.entered(rig.holding_writes()) as held:
            event = engine.overwrite(later=True)
            submitting = threading.Thread(
                target=lambda: futures.append(engine.store(request, engine.source(), event=event))
            )
            submitting.start()
            submitting.join(self.patience_s)
            returned = not submitting.is_alive()
            under_way = [not future.query() for future in futures]
            held.leave()
            submitting.join(PATIENCE_S)
        assert returned, "a submit returned only after the engine's work was done"
        assert under_way == [True], "a store was answered before its event was reached"
        assert futures[0].result(PATIENCE_S).ok
        assert engine.differences() == []

    def test_a_transfer_does_not_wait_for_another_ones_event(self, rig: TransportRig, make_engine: MakeEngine) -> None:
        self.needs_asynchronous(rig)
        engine, other = make_engine(NHD), make_engine(NHD)
        reached = engine.overwrite(later=True)
        assert engine.store(engine.request(), engine.source(), event=reached).result(PATIENCE_S).ok
        with self.entered(rig.holding_writes()) as held:
            event = other.overwrite(later=True)
            waiting = engine.store(engine.request(), engine.source(), event=event)
            ready = engine.store(engine.request(), engine.source(), event=reached)
            try:
                stored = ready.result(self.patience_s)
            except TimeoutError:
                stored = None
            held.leave()
            assert stored is not None, "a transfer whose event is reached stood behind one whose event is not"
            assert waiting.result(PATIENCE_S).ok
            assert ready.result(PATIENCE_S).ok

    def test_what_waits_is_cancelled_while_another_copy_stands_still(
        self, rig: TransportRig, make_engine: MakeEngine
    ) -> None:
        """The copier answers at any time: it waits for no copy, neither when it is launched nor behind it."""
        self.needs_asynchronous(rig)
        engine, other = make_engine(NHD), make_engine(NHD)
        with self.holding(rig) as copies, self.entered(rig.holding_writes()) as writes:
            event = engine.overwrite(later=True)
            standing = other.store(other.request(), other.source())
            wait_until(rig.held, "a copy that is held")
            waiting = engine.store(engine.request(), engine.source(), event=event)
            waiting.cancel()
            try:
                answered = waiting.result(self.patience_s)
            except TimeoutError:
                answered = None
            writes.leave()
            copies.leave()
            assert answered is not None, "the copier did not answer while a copy was under way"
            assert standing.result(PATIENCE_S).ok
