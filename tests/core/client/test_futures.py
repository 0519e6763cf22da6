"""Futures and plans in every state: resolved twice, cancelled while they are resolved, aborted, badly answered."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

from kvframework.api.futures import Future, Promise
from kvframework.api.transport import ArenaRange, LoadOutcome, LoadPlan, StoreOutcome, StorePlan
from kvframework.client.session import mapped
from kvframework.errors import Cancelled, DeadlineExceeded, ServerGone
from kvframework.messaging.client.link import Answer
from kvframework.wire import messages as m

ANSWER = Answer(m.Empty())
RANGES = (ArenaRange(0, 0, 0, 64), ArenaRange(1, 0, 64, 64))


class ResolvedMeanwhile(Promise[int]):
    """Another thread resolves it just after its `cancel` has seen that there is a hook."""

    @property
    def _cancel_hook(self) -> Callable[[], None] | None:  # type: ignore[override]
        hook, self.hook = self.hook, None
        return hook

    @_cancel_hook.setter
    def _cancel_hook(self, hook: Callable[[], None] | None) -> None:
        self.hook = hook


def test_the_first_of_two_results_stays_and_callbacks_run_once() -> None:
    seen: list[object] = []
    promise: Promise[int] = Promise()
    promise.add_done_callback(seen.append)
    assert promise.set_result(1)
    assert not promise.set_result(2)
    assert not promise.set_exception(ServerGone("gone"))
    promise.cancel()
    assert (promise.result(0), promise.exception(), seen) == (1, None, [promise])


def test_a_promise_that_is_never_resolved_ends_a_wait_and_stays_pending() -> None:
    promise: Promise[int] = Promise()
    with pytest.raises(DeadlineExceeded):
        promise.result(0)
    assert not promise.wait(0)
    assert promise.set_result(3)
    assert promise.result(0) == 3


def test_a_future_that_is_resolved_while_it_is_cancelled_raises_nothing() -> None:
    called = threading.Event()
    promise = ResolvedMeanwhile(called.set)
    promise.cancel()
    assert called.is_set()


def rubbish(_answer: Answer) -> Any:
    raise ZeroDivisionError("unforeseen")


def test_an_answer_that_cannot_be_converted_fails_its_future() -> None:
    sent = Future.resolved(ANSWER)
    for future in (mapped(sent, rubbish), mapped(sent, rubbish, release=lambda _: None)):
        assert isinstance(future.exception(), ZeroDivisionError)
    assert mapped(sent, rubbish, failed=LoadOutcome.failed).result(0) == LoadOutcome(False, "unforeseen", "error")


def test_a_grant_that_comes_behind_its_cancel_is_given_back_once() -> None:
    sent: Promise[Answer] = Promise()
    given_back: list[str] = []
    future = mapped(sent, lambda _: "lease", release=given_back.append)
    future.cancel()
    assert isinstance(future.exception(), Cancelled)
    sent.set_result(ANSWER)
    future.cancel()
    assert given_back == ["lease"]


def store_plan(calls: list[str], ranges: tuple[ArenaRange, ...] = RANGES) -> StorePlan:
    def commit() -> Future[StoreOutcome]:
        calls.append("commit")
        return Future.resolved(StoreOutcome(stored=len(ranges), present=1))

    outcome = StoreOutcome(present=1)
    return StorePlan(memoryview(b""), ranges, outcome, commit=commit, abort=lambda: calls.append("abort"))


def load_plan(calls: list[str]) -> LoadPlan:
    def commit() -> Future[LoadOutcome]:
        calls.append("commit")
        return Future.resolved(LoadOutcome(True))

    def abort() -> None:
        calls.append("abort")

    return LoadPlan(memoryview(b""), RANGES, commit=commit, abort=abort, receive=lambda _: Future.resolved(()))


@pytest.mark.parametrize("make", [store_plan, load_plan])
def test_a_plan_ends_once(make: Callable[[list[str]], Any]) -> None:
    calls: list[str] = []
    with make(calls) as plan:
        plan.commit()
        plan.abort()
    assert calls == ["commit"]
    with make(calls) as plan:
        plan.abort()
        plan.abort()
    assert calls == ["commit", "abort"]
    with pytest.raises(KeyboardInterrupt), make(calls):
        raise KeyboardInterrupt
    assert calls == ["commit", "abort", "abort"]


def test_what_was_aborted_is_not_called_stored() -> None:
    calls: list[str] = []
    with store_plan(calls) as plan:
        plan.abort()
        assert plan.commit().result(0) == StoreOutcome(present=1, dropped=2)
    with load_plan(calls) as load:
        load.abort()
        assert not load.commit().result(0).ok
    assert calls == ["abort", "abort"]
    with store_plan(calls, ()) as nothing_to_write:
        assert nothing_to_write.commit().result(0) == StoreOutcome(present=1)
    assert calls == ["abort", "abort"]
