"""The transport kit's tests of order: copies against the engine's own work, cancel, and the engine's thread."""

from __future__ import annotations

import threading
import time

from kvf_dev.testing.transport.cases import PAGED
from kvf_dev.testing.transport.kit import MakeEngine, TransportKit
from kvf_dev.testing.transport.node import PATIENCE_S, wait_until
from kvf_dev.testing.transport.outcomes import must_be_under_way, must_miss, must_succeed, must_work
from kvf_dev.testing.transport.rig import TransportRig
from kvframework.api.futures import Future
from kvframework.api.transport import StoreOutcome

NHD = PAGED["nhd"]


class Order(TransportKit):
    """The order of copies and of the engine's own work."""

    def test_a_store_holds_what_was_written_before_its_event(self, make_engine: MakeEngine) -> None:
        engine = make_engine(NHD)
        request = engine.request()
        event = engine.overwrite(later=True)
        must_succeed(engine.store(request, engine.source(), event=event))
        must_succeed(engine.load(request, engine.target()))
        engine.expect_loaded(engine.snapshot(), engine.source(), engine.target())
        engine.must_be_right()

    def test_a_load_comes_after_what_its_event_stands_for(self, make_engine: MakeEngine) -> None:
        """The blocks are still being written by the engine's queued work: that work must not overwrite the load."""
        engine = make_engine(NHD)
        request = engine.request()
        must_succeed(engine.store(request, engine.source()))
        stored = engine.snapshot()
        event = engine.overwrite(later=True)
        must_succeed(engine.load(request, engine.target(), event=event))
        engine.expect_loaded(stored, engine.source(), engine.target())
        engine.must_be_right()

    def test_blocks_are_free_once_their_store_is_done(self, make_engine: MakeEngine) -> None:
        engine = make_engine(NHD)
        for _ in range(3):
            request = engine.request()
            must_succeed(engine.store(request, engine.source()))
            stored = engine.snapshot()
            engine.overwrite()
            must_succeed(engine.load(request, engine.target()))
            engine.expect_loaded(stored, engine.source(), engine.target())
            engine.must_be_right()

    def test_nothing_is_answered_while_a_copy_stands_still(self, rig: TransportRig, make_engine: MakeEngine) -> None:
        self.needs_asynchronous(rig)
        engine = make_engine(NHD)
        request = engine.request()
        with self.holding(rig) as held:
            future = engine.store(request, engine.source())
            wait_until(rig.held, "a copy that is held")
            must_be_under_way(future, "blocks are still touched")
            assert engine.hit(request) == 0, "nothing is published before it is there"
            held.leave()
            must_succeed(future)

    def test_a_submit_does_not_wait_for_copies(self, rig: TransportRig, make_engine: MakeEngine) -> None:
        self.needs_asynchronous(rig)
        engine = make_engine(NHD)
        requests = [engine.request() for turn in range(8)]
        must_succeed(engine.store(requests[0], engine.source()))
        with self.holding(rig) as held:
            first = engine.store(requests[1], engine.source())
            wait_until(rig.held, "a copy that is held")
            took, futures = [], [first]
            for request in requests[2:]:
                started = time.perf_counter()
                futures.append(engine.store(request, engine.source()))
                took.append(time.perf_counter() - started)
            # The median: the machine may interrupt any single one.
            median = sorted(took)[len(took) // 2]
            assert median < self.submit_budget_s, (
                f"a submit takes {median * 1000:.0f} ms while a copy is under way: it waits for the copy"
            )
            held.leave()
            for future in futures:
                must_succeed(future, "a store behind one that was held")

    def test_a_load_does_not_wait_for_a_store_that_stands_still(
        self, rig: TransportRig, make_engine: MakeEngine
    ) -> None:
        """Loads and stores have a stream each."""
        self.needs_asynchronous(rig)
        engine, other = make_engine(NHD), make_engine(NHD)
        request = engine.request()
        must_succeed(engine.store(request, engine.source()))
        with self.holding(rig) as held:
            standing = other.store(other.request(), other.source())
            wait_until(rig.held, "a copy that is held")
            loading = engine.load(request, engine.target())
            passed = loading.wait(self.patience_s)
            held.leave()
            assert passed, "a load stood behind a store: create_stream gives one stream for loads and one for stores"
            must_succeed(loading, "a load beside a store that stands still, for which no call waits,")
            must_succeed(standing, "a store that stood still")
        engine.expect_loaded(engine.snapshot(), engine.source(), engine.target())
        engine.must_be_right()

    def test_a_cancelled_store_is_never_published(self, rig: TransportRig, make_engine: MakeEngine) -> None:
        self.needs_asynchronous(rig)
        engine = make_engine(NHD)
        request = engine.request()
        with self.holding(rig) as held:
            future = engine.store(request, engine.source())
            wait_until(rig.held, "a copy that is held")
            future.cancel()
            must_be_under_way(future, "blocks are still touched")
            held.leave()
            must_miss(future)
        # From here on the blocks belong to the engine again, at once.
        engine.overwrite()
        assert engine.hit(request) == 0, "a cancelled store was published"
        must_work(engine, request=request)

    def test_a_cancelled_load_touches_nothing_once_it_is_answered(
        self, rig: TransportRig, make_engine: MakeEngine
    ) -> None:
        self.needs_asynchronous(rig)
        engine = make_engine(NHD)
        request = engine.request()
        must_succeed(engine.store(request, engine.source()))
        with self.holding(rig) as held:
            future = engine.load(request, engine.target())
            wait_until(rig.held, "a copy that is held")
            future.cancel()
            must_be_under_way(future, "blocks are still touched")
            held.leave()
            must_miss(future)
        engine.overwrite()
        # A load behind it has passed everything that could still be under way.
        other = engine.request()
        must_succeed(engine.store(other, engine.source()))
        engine.must_be_right()

    def test_a_waiting_transfer_is_cancelled(self, rig: TransportRig, make_engine: MakeEngine) -> None:
        self.needs_asynchronous(rig)
        engine = make_engine(NHD)
        request = engine.request()
        event = engine.overwrite(later=True)
        future = engine.store(request, engine.source(), event=event)
        future.cancel()
        must_miss(future)
        assert engine.hit(request) == 0, "a cancelled store was published"
        engine.must_be_right()

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
        must_succeed(futures[0])
        engine.must_be_right()

    def test_a_transfer_does_not_wait_for_another_ones_event(self, rig: TransportRig, make_engine: MakeEngine) -> None:
        self.needs_asynchronous(rig)
        engine, other = make_engine(NHD), make_engine(NHD)
        reached = engine.overwrite(later=True)
        must_succeed(engine.store(engine.request(), engine.source(), event=reached))
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
            must_succeed(waiting)
            must_succeed(ready)

    def test_what_waits_is_cancelled_while_another_copy_stands_still(
        self, rig: TransportRig, make_engine: MakeEngine
    ) -> None:
        """The copier answers at any time: it waits for no copy, neither at a launch nor after it."""
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
            must_succeed(standing)
