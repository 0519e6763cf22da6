"""The transport kit's tests of order: copies against the engine's own work, cancel, and the engine's thread."""

from __future__ import annotations

import threading
import time

import pytest

from kvf_dev.testing.kit import wait_until
from kvf_dev.testing.transport.cases import NHD
from kvf_dev.testing.transport.engine import (
    PATIENCE_S,
    KitEngine,
    must_be_under_way,
    must_miss,
    must_succeed,
    must_work,
)
from kvf_dev.testing.transport.kit import MakeEngine, TransportKit
from kvf_dev.testing.transport.rig import TransportRig
from kvframework.api.futures import Future
from kvframework.api.transport import StoreOutcome

asynchronous = pytest.mark.usefixtures("asynchronous")


class Order(TransportKit):
    """The order of copies and of the engine's own work."""

    def test_a_store_holds_what_was_written_before_its_event(self, engine: KitEngine) -> None:
        request = engine.request()
        event = engine.overwrite(later=True)
        must_succeed(engine.store(request, engine.source(), event=event))
        engine.must_load(request)

    def test_a_load_comes_after_what_its_event_stands_for(self, engine: KitEngine) -> None:
        """The blocks are still being written by the engine's queued work: that work must not overwrite the load."""
        request, stored = engine.stored(), engine.snapshot()
        engine.must_load(request, stored, event=engine.overwrite(later=True))

    def test_blocks_are_free_once_their_store_is_done(self, engine: KitEngine) -> None:
        for _ in range(3):
            request, stored = engine.stored(), engine.snapshot()
            engine.overwrite()
            engine.must_load(request, stored)

    @asynchronous
    def test_nothing_is_answered_while_a_copy_stands_still(self, rig: TransportRig, engine: KitEngine) -> None:
        request = engine.request()
        with self.holding(rig) as held:
            future = engine.store(request, engine.source())
            wait_until(rig.held, "a copy that is held")
            must_be_under_way(future, "blocks are still touched")
            assert engine.hit(request) == 0, "nothing is published before it is there"
            held.close()
            must_succeed(future)

    @asynchronous
    def test_a_submit_does_not_wait_for_copies(self, rig: TransportRig, engine: KitEngine) -> None:
        engine.stored()
        with self.holding(rig) as held:
            futures, took = [engine.store(engine.request(), engine.source())], []
            wait_until(rig.held, "a copy that is held")
            for request in [engine.request() for turn in range(6)]:
                started = time.perf_counter()
                futures.append(engine.store(request, engine.source()))
                took.append(time.perf_counter() - started)
            # The median: the machine may interrupt any single one.
            median = sorted(took)[len(took) // 2]
            assert median < self.submit_budget_s, (
                f"a submit takes {median * 1000:.0f} ms while a copy is under way: it waits for the copy"
            )
            held.close()
            for future in futures:
                must_succeed(future, "a store behind one that was held")

    @asynchronous
    def test_a_load_does_not_wait_for_a_store_that_stands_still(
        self, rig: TransportRig, make_engine: MakeEngine
    ) -> None:
        """Loads and stores have a stream each."""
        engine, other = make_engine(NHD), make_engine(NHD)
        request = engine.stored()
        with self.holding(rig) as held:
            standing = other.store(other.request(), other.source())
            wait_until(rig.held, "a copy that is held")
            loading = engine.load(request, engine.target())
            passed = loading.wait(self.patience_s)
            held.close()
            assert passed, "a load stood behind a store: create_stream gives one stream for loads and one for stores"
            must_succeed(loading, "a load beside a store that stands still, for which no call waits,")
            must_succeed(standing, "a store that stood still")
        engine.must_have_loaded()

    @asynchronous
    @pytest.mark.parametrize("what", ["store", "load"])
    def test_what_is_cancelled_is_answered_once_it_touches_nothing(
        self, rig: TransportRig, engine: KitEngine, what: str
    ) -> None:
        request = engine.stored() if what == "load" else engine.request()
        with self.holding(rig) as held:
            future: Future[object] = (
                engine.load(request, engine.target()) if what == "load" else engine.store(request, engine.source())  # type: ignore[assignment]
            )
            wait_until(rig.held, "a copy that is held")
            future.cancel()
            must_be_under_way(future, "blocks are still touched")
            held.close()
            must_miss(future)
        # From here on the blocks belong to the engine again, at once.
        engine.overwrite()
        if what == "load":
            # A store behind it has passed everything that could still be under way.
            engine.stored()
            engine.must_be_right()
        else:
            assert engine.hit(request) == 0, "a cancelled store was published"
            must_work(engine, request=request)

    @asynchronous
    def test_a_submit_does_not_wait_for_the_engines_work(self, rig: TransportRig, engine: KitEngine) -> None:
        futures: list[Future[StoreOutcome]] = []
        with self.entered(rig.holding_writes()) as held:
            event = engine.overwrite(later=True)
            submitting = threading.Thread(
                target=lambda: futures.append(engine.store(engine.request(), engine.source(), event=event))
            )
            submitting.start()
            submitting.join(self.patience_s)
            returned = not submitting.is_alive()
            under_way = [not future.query() for future in futures]
            held.close()
            submitting.join(PATIENCE_S)
        assert returned, "a submit returned only after the engine's work was done"
        assert under_way == [True], "a store was answered before its event was reached"
        must_succeed(futures[0])
        engine.must_be_right()

    @asynchronous
    def test_a_transfer_does_not_wait_for_another_ones_event(self, rig: TransportRig, make_engine: MakeEngine) -> None:
        engine, other = make_engine(NHD), make_engine(NHD)
        reached = engine.overwrite(later=True)
        must_succeed(engine.store(engine.request(), engine.source(), event=reached))
        with self.entered(rig.holding_writes()) as held:
            event = other.overwrite(later=True)
            waiting = engine.store(engine.request(), engine.source(), event=event)
            ready = engine.store(engine.request(), engine.source(), event=reached)
            answered = ready.wait(self.patience_s)
            held.close()
            assert answered, "a transfer whose event is reached stood behind one whose event is not"
            must_succeed(waiting)
            must_succeed(ready)

    @asynchronous
    def test_what_waits_is_cancelled_while_another_copy_stands_still(
        self, rig: TransportRig, make_engine: MakeEngine
    ) -> None:
        """The copier answers at any time: it waits for no copy, neither at a launch nor after it."""
        engine, other = make_engine(NHD), make_engine(NHD)
        with self.holding(rig) as copies, self.entered(rig.holding_writes()) as writes:
            event = engine.overwrite(later=True)
            standing = other.store(other.request(), other.source())
            wait_until(rig.held, "a copy that is held")
            waiting = engine.store(engine.request(), engine.source(), event=event)
            waiting.cancel()
            answered = waiting.wait(self.patience_s)
            writes.close()
            copies.close()
            assert answered, "the copier did not answer while a copy was under way"
            must_succeed(standing)
