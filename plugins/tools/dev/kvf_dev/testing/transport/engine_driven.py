"""The transport kit's tests of transports that copy in the engine's process: what they do with ranges, buffers and
tensors that are lent to them, on both paths. They see it at the link to the server, and are skipped for others."""

from __future__ import annotations

import contextlib
import gc
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import msgspec
import pytest

from kvf_dev.testing.kit import held, must_refuse, wait_until
from kvf_dev.testing.transport.engine import CASES, NHD, KitEngine, must_miss, must_succeed, must_work
from kvf_dev.testing.transport.node import SOON_S, TransportKit, client_of
from kvf_layouts.paged import PagedLayout
from kvframework.api.futures import Future, Promise
from kvframework.api.layout import KVLayout
from kvframework.client import KVClient
from kvframework.errors import BadBlockIds, BadLayout, Cancelled, DeadlineExceeded, TransportMismatch


class EngineDriven(TransportKit):
    """Plans, buffers and tensors are the transport's for a while only."""

    @pytest.fixture
    def wire(self) -> None:
        """Hide the arena; skip the test for a transport that sends no bytes then."""
        self.patch.setattr(KVClient, "maps_arena", property(lambda _: False))
        with self.patch.context() as patch:
            sent = _seen(patch, hold=False)
            try:
                engine = self.make_engine(NHD)
            except TransportMismatch:
                pytest.skip("The transport works only where the engine maps the arena")
            engine.store(engine.request(), engine.source()).wait(SOON_S)
            engine.close()
        if not sent:
            pytest.skip("The transport moves no bytes over the wire")

    @contextmanager
    def planned(self, call: str, work: Callable[[Any], object] = lambda _: None) -> Iterator[None]:
        """A context in which `work` sees each plan first. At its end it skips a transport that makes no plans."""
        original, calls = getattr(KVClient, call), []

        def saw(done: Future[Any]) -> None:
            if done.exception() is None:
                calls.append(call)
                work(done.result(0))

        def prepared(client: Any, transfer: Any) -> Any:
            future = original(client, transfer)
            future.add_done_callback(saw)
            return future

        with self.patch.context() as patch:
            patch.setattr(KVClient, call, prepared)
            yield
        if not calls:
            pytest.skip("The transport copies nothing in the engine")

    def test_ranges_are_written_before_they_are_published(self, engine: KitEngine) -> None:
        """From its commit on, any other engine may load what lies there."""
        published: list[tuple[memoryview, bytes]] = []

        def watch(plan: Any) -> None:
            commit = plan._commit

            def committed() -> Any:
                pieces = [plan.arena[each.offset : each.offset + each.length] for each in plan.ranges]
                published.extend((piece, bytes(piece)) for piece in pieces)
                return commit()

            plan._commit = committed

        with self.planned("prepare_store", watch):
            must_succeed(engine.store(engine.request(), engine.source()))
        late = sum(piece != before for piece, before in published)
        published.clear()
        assert not late, f"{late} ranges were written after `commit` had published them"

    @pytest.mark.parametrize("what", ["store", "load"])
    def test_a_copy_in_the_engine_that_fails_is_one_miss(self, engine: KitEngine, what: str) -> None:
        """The arena refuses the copy: nothing is published, and ranges and pins are given back at once."""
        request = engine.stored() if what == "load" else engine.request()

        def refuse(plan: Any) -> None:
            plan.arena = memoryview(b"")
            plan.arena.release()

        with self.planned(f"prepare_{what}", refuse):
            future = engine.submit(what, request)
            future.wait(SOON_S)
        must_miss(future, f"A {what} whose copy failed was answered as a success")
        assert what == "load" or engine.hit(request) == 0, "The server published objects whose copy had failed"
        self.must_be_given_back(f"a {what} whose copy failed")
        engine.overwrite()
        must_work(engine, f"A transfer after a failed {what}")

    @pytest.mark.parametrize("end", ["is used", "is given back"])
    @pytest.mark.parametrize("what", ["store", "load"])
    def test_an_answer_that_comes_late(self, engine: KitEngine, what: str, end: str) -> None:
        """The engine's thread does not wait for it, and it is not lost; after a cancel it is given back."""
        request, late = engine.stored() if what == "load" else engine.request(), []
        prepare = getattr(KVClient, f"prepare_{what}")

        def prepared(self: Any, transfer: Any) -> Any:
            late.append(_Late(prepare(self, transfer)))
            return late[0]

        with self.patch.context() as patch:
            patch.setattr(KVClient, f"prepare_{what}", prepared)
            started = time.perf_counter()
            future = engine.submit(what, request)
            took = time.perf_counter() - started
        if not late:
            pytest.skip("The transport copies nothing in the engine")
        assert took < SOON_S, f"The engine's thread waited {took:.1f} s for the server: it must return at once"
        assert not future.wait(0.2), f"A {what} ended before the server's late answer: wait for the answer"
        if end == "is given back":
            future.cancel()
            must_miss(future, "A transfer cancelled while it waited for the server succeeded")
        late[0].arrive()
        if end == "is used":
            must_succeed(future, f"A {what} whose answer came late")
        self.must_be_given_back(f"a {what} whose answer came late")
        must_work(engine)

    def test_tensors_are_those_of_the_submit(self, engine: KitEngine) -> None:
        """An engine without stable memory passes other tensors each time; the former ones are not touched."""
        with self.planned("prepare_store"):
            first = engine.stored()
        stored, former = engine.snapshot(), engine.tensors
        engine.move()
        must_work(engine, "A transfer with other tensors than the first")
        engine.must_load(first, stored, what="A load into other tensors than the store's")
        engine.tensors, engine.model = former, stored
        engine.must_be_right("Tensors of an earlier transfer changed")

    def test_blocks_that_the_tensors_of_a_submit_lack_are_refused(self) -> None:
        """Where the declaration leaves the number of blocks open, the transport alone can hold ids against tensors."""
        describe = PagedLayout.describe

        def described(*arguments: Any, **named: Any) -> KVLayout:
            found = describe(*arguments, **named)
            groups = tuple(msgspec.structs.replace(group, strides=(), num_blocks=0) for group in found.groups)
            return msgspec.structs.replace(found, groups=groups, num_blocks=0)

        with self.patch.context() as patch:
            patch.setattr(PagedLayout, "describe", described)
            try:
                engine = self.make_engine(NHD)
            except BadLayout:
                pytest.skip("The transport refuses a layout without a number of blocks")
            with self.planned("prepare_store"):
                must_succeed(
                    engine.store(engine.request(), engine.source()), "A store with an unknown number of blocks"
                )
        request, known = engine.request(), engine.source()
        wrong = [[*known[0][:-1], engine.model.blocks[0]]]
        for name, submit in (("store", engine.store), ("load", engine.load)):
            what = f"A {name} with a block id beyond the tensors"
            must_refuse(what, partial(submit, request, wrong), BadBlockIds)
        engine.must_be_right("A refused transfer changed the tensors")

    @pytest.mark.parametrize("case", ["nhd", "hybrid", "dim_before_token"])
    @pytest.mark.usefixtures("wire")
    def test_the_wire_carries_the_same_as_the_arena(self, case: str) -> None:
        must_work(self.make_engine(CASES[case], chunks=24), "A request of 24 chunks over the wire")

    @pytest.mark.usefixtures("wire")
    def test_buffers_stay_as_they_are_until_they_are_answered(self, engine: KitEngine) -> None:
        """The server may read them as long as it has not answered: the next store needs other memory."""
        sent = _seen(self.patch, hold=True)
        futures = []
        for number in range(3):
            futures.append(engine.store(engine.request(), engine.source()))
            # It need not send a second store before the first is answered.
            until = time.monotonic() + 1.0
            while len(sent) <= number and time.monotonic() < until:
                time.sleep(0.01)
            engine.overwrite()
        changed = _changed(sent)
        for each in sent:
            each.answer()
        for future in futures:
            must_succeed(future)
        assert not changed, f"{changed} buffers were reused before the server had answered"

    @pytest.mark.usefixtures("wire")
    def test_buffers_are_never_written_again_after_a_failure(self, engine: KitEngine) -> None:
        """They may still be sent: what would arrive is another object's content."""
        with self.patch.context() as patch:
            sent = _seen(patch, hold=True)
            future = engine.store(engine.request(), engine.source())
            wait_until(lambda: sent, "a store over the wire")
            sent[0].future.set_exception(DeadlineExceeded("the server did not answer"))
            must_miss(future, "A store that the server never answered succeeded")
        engine.overwrite()
        for _ in range(3):
            must_succeed(engine.store(engine.request(), engine.source()), "A store after an unanswered one")
        changed = _changed(sent)
        assert not changed, f"{changed} buffers of an unanswered store were reused"

    def test_it_registers_only_where_it_can_move_bytes(self) -> None:
        """Where the arena is not mapped, a transport that needs it leaves the engine to the next one."""
        with self.patch.context() as patch:
            patch.setattr(self.client, "_arena", None)
            with contextlib.suppress(TransportMismatch):
                engine = self.make_engine(NHD)
                stored = engine.store(engine.request(), engine.source())
                assert stored.wait(SOON_S), "A store without a mapped arena did not end"
                moved = stored.result().ok
                engine.close()
                assert moved, "The transport registered without a mapped arena: `on_registered` must refuse that"

    def test_what_was_lent_is_let_go(self) -> None:
        """After `close` neither the context nor its module refers to tensors, plans or the arena: all would stay."""
        lent: dict[str, list[weakref.ref[Any]]] = {"tensors": [], "plans": [], "the arena": []}
        with client_of(self.rig, self.server.endpoint) as client:
            engine = KitEngine(self.rig, client, 80_000, NHD)
            context = engine.worker._instance and engine.worker._instance.transfer
            with contextlib.ExitStack() as stack:
                for call in ("prepare_store", "prepare_load"):
                    stack.enter_context(self.planned(call, lambda plan: lent["plans"].append(weakref.ref(plan))))
                must_work(engine)
            assert client.arena is not None
            lent["the arena"].append(weakref.ref(client.arena.view.obj))
            lent["tensors"] += map(weakref.ref, engine.tensors.values())
            engine.close()
        del engine, client

        def kept() -> list[str]:
            gc.collect()
            return [what for what, each in lent.items() if any(one() is not None for one in each)]

        with contextlib.suppress(pytest.fail.Exception):  # a thread may end a moment later
            wait_until(lambda: not kept(), "the end of all", SOON_S)
        assert not kept(), f"After `close` the transport still refers to {', '.join(kept())}"
        del context

    @pytest.mark.parametrize("path", ["arena", "wire"])
    def test_close_gives_threads_and_files_back(self, request: pytest.FixtureRequest, path: str) -> None:
        """The first instance opens what the client keeps; the second one leaves nothing."""
        if path == "wire":
            request.getfixturevalue("wire")
        for _ in range(2):
            before = held()
            engine = self.make_engine(NHD)
            must_work(engine, "A transfer")
            engine.close()
        with contextlib.suppress(pytest.fail.Exception):  # a stream's thread may end a moment later
            wait_until(lambda: held() <= before, "the end of all", SOON_S)
        left = sorted(held() - before)
        assert not left, f"`close` left open: {', '.join(left)}"


class _Late(Promise[Any]):
    """The plan of `sent`, which arrives when it is told to; after a cancel it is given back, as by the link."""

    def __init__(self, sent: Future[Any]) -> None:
        super().__init__(self._cancelled)
        self._sent = sent

    def _cancelled(self) -> None:
        self.set_exception(Cancelled("the request was cancelled"))

    def arrive(self) -> None:
        plan = self._sent.result(SOON_S)
        if not self.set_result(plan):
            plan.abort()


class _Sent:
    """A call of `store_chunks`: its buffers, what they were, and the answer that the transport waits for."""

    def __init__(self, buffers: Sequence[Any], answered: Future[Any]) -> None:
        self.buffers = [(memoryview(each), bytes(each)) for each in buffers]
        self.future: Promise[Any] = Promise()
        self._answered = answered

    def answer(self) -> None:
        self._answered.add_done_callback(self._resolve)

    def _resolve(self, answered: Future[Any]) -> None:
        self.future.set_result(answered.result(0))


def _seen(patch: pytest.MonkeyPatch, *, hold: bool) -> list[_Sent]:
    """Return the calls of `store_chunks` from now on; those that are held are answered by `answer` alone."""
    sent: list[_Sent] = []
    original = KVClient.store_chunks

    def store_chunks(self: Any, transfer: Any, objects: Any, buffers: Any) -> Any:
        answered = original(self, transfer, objects, buffers)
        sent.append(_Sent(buffers, answered))
        return sent[-1].future if hold else answered

    patch.setattr(KVClient, "store_chunks", store_chunks)
    return sent


def _changed(sent: Sequence[_Sent]) -> int:
    return sum(view != before for each in sent for view, before in each.buffers)
