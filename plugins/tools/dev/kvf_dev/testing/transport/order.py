"""The transport kit's tests of order: copies against the engine's own work, cancel, the engine's thread, and streams
that wait for a transfer while that thread goes on; and of processes killed at the worst moment."""

from __future__ import annotations

import contextlib
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest

from kvf_dev.testing.kit import wait_until
from kvf_dev.testing.transport.engine import (
    CASES,
    CHUNK,
    NHD,
    PATIENCE_S,
    KitEngine,
    MemoryModel,
    must_be_under_way,
    must_miss,
    must_succeed,
    registry_for,
)
from kvf_dev.testing.transport.node import Program, Reads, TransportKit, endpoint_in, status_of
from kvframework.api.futures import Future
from kvframework.api.transport import LoadOutcome, StoreOutcome
from kvframework.client import KVClient

_A_WHILE_S = 0.2


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

    def test_without_an_event_it_comes_after_the_threads_current_stream(self, engine: KitEngine) -> None:
        """`event=None` stands for all work that is queued there when the engine submits."""
        request, whole = engine.request(), engine.chunks * CHUNK
        engine.model = MemoryModel(engine.groups, engine.model.blocks, seed=1)
        for name, image in engine.model.images.items():
            self.rig.write_behind(engine.tensors[name], bytes(image))
        must_succeed(engine.worker.submit_store(request, 0, whole, engine.source()), "A store without an event")
        engine.must_load(
            request, what="A store without an event read memory before the work that was queued in the current stream"
        )

    @pytest.mark.parametrize("case", ["nhd", "hybrid"])
    def test_nothing_is_answered_while_a_copy_stands_still(self, case: str) -> None:
        """Also where copies of the same transfer pass it, on other streams or on one without order."""
        engine = self.make_engine(CASES[case])
        request = engine.request()
        with self.in_mid_copy(lambda: engine.store(request, engine.source())) as (future, go_on):
            must_be_under_way(future)
            assert engine.hit(request) == 0, "A store was published before its copy had ended"
            go_on()
            must_succeed(future)

    def test_a_submit_does_not_wait_for_copies(self, engine: KitEngine) -> None:
        engine.stored()
        with self.in_mid_copy(lambda: engine.store(engine.request(), engine.source())) as (future, go_on):
            futures, took = [future], []
            for request in [engine.request() for turn in range(6)]:
                started = time.perf_counter()
                futures.append(engine.store(request, engine.source()))
                took.append(time.perf_counter() - started)
            # The median: the machine may interrupt any single one.
            median = sorted(took)[len(took) // 2]
            self.must_take("A submit during a copy", median, self.submit_budget_s)
            go_on()
            for future in futures:
                must_succeed(future, "A store after one that was paused")

    @pytest.mark.parametrize("of", ["the same instance", "another"])
    def test_a_load_does_not_wait_for_a_store_that_stands_still(self, of: str) -> None:
        engine = self.make_engine(NHD)
        other = self.make_engine(NHD) if of == "another" else engine
        request = engine.stored()
        with self.in_mid_copy(lambda: other.store(other.request(), other.source())) as (standing, go_on):
            loading = engine.load(request, engine.target())
            passed = loading.wait(self.patience_s)
            go_on()
            assert passed, "A load waited for a store: give loads and stores a stream each"
            must_succeed(loading, "A load during a paused store")
            must_succeed(standing, "A paused store")
        engine.must_have_loaded()

    @pytest.mark.parametrize("what", ["store", "load"])
    def test_what_is_cancelled_is_answered_once_it_touches_nothing(self, engine: KitEngine, what: str) -> None:
        request = engine.stored() if what == "load" else engine.request()
        with self.in_mid_copy(lambda: engine.submit(what, request)) as (future, go_on):
            future.cancel()
            must_be_under_way(future)
            go_on()
            must_miss(future)
        # From here on the blocks belong to the engine again, at once.
        engine.overwrite()
        if what == "load":
            # A store behind it has passed everything that could still be under way.
            engine.stored()
            engine.must_be_right()
        else:
            assert engine.hit(request) == 0, "A cancelled store was published; it must publish nothing"
            engine.must_load(engine.stored(request))

    def test_a_submit_does_not_wait_for_the_engines_work(self, engine: KitEngine) -> None:
        futures: list[Future[StoreOutcome]] = []
        with self.rig.holding_writes():
            event = engine.overwrite(later=True)
            submitting = threading.Thread(
                target=lambda: futures.append(engine.store(engine.request(), engine.source(), event=event))
            )
            submitting.start()
            submitting.join(self.patience_s)
            returned = not submitting.is_alive()
            under_way = [not future.query() for future in futures]
        submitting.join(PATIENCE_S)
        assert returned, "A submit waited for the engine's work; it must return at once"
        assert under_way == [True], "A store ended before its event was reached; it must wait"
        must_succeed(futures[0])
        engine.must_be_right()

    def test_a_transfer_does_not_wait_for_another_ones_event(self) -> None:
        engine, other = self.make_engine(NHD), self.make_engine(NHD)
        reached = engine.overwrite(later=True)
        must_succeed(engine.store(engine.request(), engine.source(), event=reached))
        with self.rig.holding_writes():
            event = other.overwrite(later=True)
            waiting = engine.store(engine.request(), engine.source(), event=event)
            ready = engine.store(engine.request(), engine.source(), event=reached)
            answered = ready.wait(self.patience_s)
        assert answered, "A ready transfer waited for another whose event is not reached"
        must_succeed(waiting)
        must_succeed(ready)

    def test_what_waits_is_cancelled_while_another_copy_stands_still(self) -> None:
        engine, other = self.make_engine(NHD), self.make_engine(NHD)
        with (
            self.rig.holding_writes(),
            self.in_mid_copy(lambda: other.store(other.request(), other.source())) as (standing, _),
        ):
            waiting = engine.store(engine.request(), engine.source(), event=engine.overwrite(later=True))
            waiting.cancel()
            answered = waiting.wait(self.patience_s)
        assert answered, "A cancel waited for another transfer's copy; it must be answered at once"
        must_succeed(standing)

    def test_close_waits_for_a_copy_under_way(self, engine: KitEngine) -> None:
        with self.in_mid_copy(lambda: engine.store(engine.request(), engine.source())) as (future, go_on):
            closing = threading.Thread(target=engine.close)
            closing.start()
            closing.join(_A_WHILE_S)
            early = not closing.is_alive() or future.query()
            go_on()
            closing.join(PATIENCE_S)
        assert not early, "`close` returned, or the transfer ended, while its copy was paused: it still touches blocks"
        assert not closing.is_alive(), "`close` did not return after the last copy had ended"
        assert future.wait(self.patience_s), "A transfer did not end with `close`"


class Streams(TransportKit):
    """Work on the engine's own streams behind a transfer."""

    @pytest.mark.parametrize("which", ["its own", "the current"])
    def test_a_stream_waits_for_a_load_and_the_engines_thread_does_not(self, engine: KitEngine, which: str) -> None:
        stream = self.rig.stream() if which == "its own" else None
        request = engine.stored()
        with self.in_mid_copy(lambda: engine.load(request, engine.target())) as (future, go_on):
            reads = self._read_behind(future, engine, stream, go_on)
            until = time.monotonic() + _A_WHILE_S
            while time.monotonic() < until:
                assert not any(read() is not None for read in reads), (
                    "A read ran before the load that its stream waits for"
                )
                time.sleep(0.005)
            go_on()
            must_succeed(future)
        self.must_go_on(reads)
        engine.expect_loaded(engine.snapshot(), engine.source(), engine.target())
        late = sum(read() != bytes(engine.model.images[name]) for read, name in zip(reads, engine.tensors, strict=True))
        assert not late, f"{late} tensors were read before the load, for which the stream waits, had written them"

    def test_what_is_no_stream_is_not_taken_for_the_current_one(self, engine: KitEngine) -> None:
        """Without a stream that can wait the engine's thread waits, which is safe."""
        self.rig.stream()
        request = engine.stored()
        with self.in_mid_copy(lambda: engine.load(request, engine.target())) as (future, go_on):
            waiting = threading.Thread(target=lambda: future.to_cuda_future().wait(object()), daemon=True)
            waiting.start()
            waiting.join(_A_WHILE_S)
            returned = not waiting.is_alive()
            go_on()
            waiting.join(self.patience_s)
            assert not returned, "An object that is not a stream was accepted: raise DeviceError"
            must_succeed(future)

    @pytest.mark.parametrize("how", ["is cancelled", "fails"])
    def test_a_stream_goes_on_after_a_load_that_did_not_succeed(self, how: str) -> None:
        """The users of the blocks must check their content; but no stream may wait for ever."""
        streams = [self.rig.stream() for _ in range(2)]
        # The load waits for an event of other memory: nothing but the load precedes the read here.
        engine, other = self.make_engine(NHD), self.make_engine(NHD)
        request = engine.stored()
        if how == "fails":
            self.rig.fail_copy()
        with contextlib.ExitStack() as held:
            held.enter_context(self.rig.holding_writes())
            future = engine.load(request, engine.target(), event=other.overwrite(later=True))
            reads = [read for stream in streams for read in self._read_behind(future, engine, stream, held.close)]
            if how == "is cancelled":
                future.cancel()
        must_miss(future, f"A load that {how} was answered as a hit")
        self.must_go_on(reads)

    def _read_behind(
        self, future: Future[LoadOutcome], engine: KitEngine, stream: object | None, go_on: Callable[[], None]
    ) -> Reads:
        """Queue reads behind the transfer. It is waited for in this thread, since it may be that thread's stream; held
        work is released if the call does not return."""
        watchdog = threading.Timer(self.patience_s, go_on)
        watchdog.start()
        future.to_cuda_future().wait(stream)
        watchdog.cancel()
        watchdog.join()
        assert not future.query(), "The engine's thread waited for the transfer; only its stream may wait"
        return engine.read_later(stream)


class Life(TransportKit):
    """The state that remains after the death of a process."""

    def test_engine_processes_share_what_one_server_process_keeps(self) -> None:
        with tempfile.TemporaryDirectory(prefix="kvf-") as directory, ExitStack() as stack:
            endpoint = endpoint_in(Path(directory))
            stack.callback(Program("server", self.recipe, endpoint).close)
            engines = []
            for instance_id in (1, 2):
                engines.append(Program("engine", self.recipe, endpoint, str(instance_id), "hybrid"))
                stack.callback(engines[-1].close)
            for number, (one, other) in enumerate((engines, engines[::-1]), start=1):
                assert one.ask("store", number) is True, "A store in a second process failed"
                assert other.ask("load", number) is True, "One process missed KV that another process had stored"
            assert not engines[1].ask("check", 1), "A second process loaded wrong bytes"
            assert engines[0].ask("store", 1) is True, "A store of present objects failed; it must succeed"

    def test_after_the_end_of_an_instance_nothing_is_open(self) -> None:
        self.make_engine(NHD).close()  # what keeps its streams for the next instance has them from here on
        before, events, streams = self.rig.open_elsewhere(), self.rig.events(), self.rig.streams()
        engine = self.make_engine(NHD)
        for _ in range(3):
            event = engine.overwrite(later=True)
            must_succeed(engine.store(engine.request(), engine.source(), event=event))
        must_succeed(engine.load(engine.stored(), engine.target()))
        engine.close()
        left = self.rig.open_elsewhere() - before
        assert not left, f"{left} allocations are still open: close memory before unregistering is answered"
        left = self.rig.events() - events
        assert not left, f"{left} events are left: close and destroy each with its instance"
        ended = "all streams of a closed instance to be released"
        wait_until(lambda: self.rig.streams() == streams, ended, self.patience_s)

    @pytest.mark.parametrize(("what", "hit"), [("store", 0), ("load", 3 * 16)], ids=["store", "load"])
    def test_an_engine_killed_in_mid_copy_leaves_nothing(self, engine: KitEngine, what: str, hit: int) -> None:
        seed = 900 + hit
        open_before, instances_before = self.rig.open_elsewhere(), _instances(self.client)
        doomed = Program("engine", self.recipe, self.server.endpoint, str(90_000 + seed), "nhd")
        try:
            if what == "load":
                assert doomed.ask("store", seed) is True, "A store in a second process failed"
            with self.rig.holding_copies():
                doomed.send("begin", what, seed)
                wait_until(self.rig.held, "a copy that is held")
                doomed.kill()
                wait_until(lambda: _instances(self.client) <= instances_before, "the server to drop the killed engine")
        finally:
            doomed.close()
        self.must_be_given_back("an engine that was killed")
        wait_until(lambda: self.rig.open_elsewhere() == open_before, "the killed engine's mappings to be closed")
        found = engine.hit(engine.request(seed))
        assert found == hit, f"{found} tokens hit after an engine died during a {what}; expected {hit}"
        engine.stored()
        engine.must_be_right()

    def test_a_server_killed_in_mid_copy_is_a_miss(self) -> None:
        with self.doomed() as (server, client, engine), ExitStack() as stack:
            request = engine.stored(engine.request(1))
            self._kill_in_mid_load(server, engine)
            # The blocks may have any content now, but no copy writes to them any more.
            engine.overwrite()
            stack.callback(Program("server", self.recipe, server.endpoint).close)
            wait_until(lambda: client.usable and _instances(client) == {1}, "the engine to register at the new server")
            engine.must_be_right()
            must_miss(engine.load(request, engine.target()), "A load from a new, empty server succeeded")
            engine.must_load(engine.stored(request))
            engine.close()

    def _kill_in_mid_load(self, server: Program, engine: KitEngine) -> None:
        answered: list[bool] = []

        def load() -> None:
            answered.append(engine.load(engine.request(1), engine.target()).result(PATIENCE_S).ok)

        with ExitStack() as held:
            held.enter_context(self.rig.holding_copies())
            loading = threading.Thread(target=load)
            loading.start()
            wait_until(self.rig.held, "a copy that is held")
            server.kill()
            if getattr(registry_for(self.rig).resolve("transport", self.rig.transport), "create_server", None) is None:
                # The copy goes on in the engine, into blocks that are not the engine's until it is over.
                loading.join(_A_WHILE_S)
                assert not answered, "The load ended while its copy was paused"
                held.close()
            loading.join(PATIENCE_S)
        assert answered != [True], "The load ended while its copy was paused: `reached` was true too early"
        assert answered == [False], "The load did not end after its server had died"


def _instances(client: KVClient) -> set[int]:
    found = status_of(client)["instances"]
    assert isinstance(found, list)
    return {instance["instance_id"] for instance in found}
