"""Requests that go well and requests that go wrong, through a real socket."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest

from kvframework import errors
from kvframework.api.futures import Future
from kvframework.api.requests import Reply
from kvframework.messaging.server import loop as server
from kvframework.status import COUNTERS
from kvframework.wire.frames import MAX_PAYLOAD_BYTES
from kvframework.wire.messages import Cancel, CancelReply, Pong
from tests.core.messaging.lab import Lab, Text, ask, connected
from tests.support.waiting import wait_until


def test_buffers_travel_both_ways_and_come_as_views(lab: Lab) -> None:
    big = bytearray(b"ab") * 500_000
    with connected(lab.endpoint) as connection:
        future = connection.begin("test.BUFFERS", Text("t"), [b"", b"small", big, memoryview(big)[5:70_000]], timeout=5)
        future.result(20)
        assert isinstance(future.result().buffers, list)
        assert [type(buffer) for buffer in future.result().buffers] == [memoryview] * 4
        assert [bytes(buffer) for buffer in future.result().buffers] == [
            b"",
            b"small",
            bytes(big),
            bytes(big[5:70_000]),
        ]


def test_what_cannot_be_sent_fails_at_once_and_harms_nothing(lab: Lab) -> None:
    with connected(lab.endpoint) as connection:
        strided = memoryview(bytearray(200_000))[::2]
        for future, error in [
            (connection.begin("test.BUFFERS", Text(), [b"x" * 70_000, strided], timeout=60), errors.InvalidPayload),
            (connection.begin("test.NOTHING", Text(), timeout=60), errors.UnknownRequest),
            (connection.begin("test.ECHO", Text("x" * MAX_PAYLOAD_BYTES), timeout=60), errors.MessageTooLarge),
            (connection.begin("test.ECHO", Text("\ud800"), timeout=60), errors.InvalidPayload),
        ]:
            assert isinstance(future.exception(), error)
        with pytest.raises(errors.MalformedFrames):
            connection.begin("test.BUFFERS", Text(), [b""] * 5, timeout=60).result(20)
        assert ask(connection, "ECHO", "on").result(20).payload.text == "on"


def test_a_deferred_result_may_come_from_any_thread(lab: Lab) -> None:
    with connected(lab.endpoint) as connection:
        future = ask(connection, "DEFERRED", "a")
        assert ask(connection, "ECHO", "meanwhile").result(20).payload.text == "meanwhile"
        assert not future.query()
        threading.Thread(target=lab.work.resolve, args=["a"]).start()
        assert future.result(20).payload.text == "a"


def test_pooled_handlers_do_not_hold_the_loop_up(lab: Lab) -> None:
    with connected(lab.endpoint) as connection:
        future = ask(connection, "POOLED", "p")
        assert ask(connection, "ECHO", "meanwhile").result(20).payload.text == "meanwhile"
        lab.work.gate.set()
        assert future.result(20).payload.text.startswith("p kvf-worker")


def test_ordered_handlers_of_one_client_run_one_after_the_other(lab: Lab) -> None:
    texts = ["a", "b", "defer c", "d", "e"]
    with connected(lab.endpoint) as connection, connected(lab.endpoint) as other:
        futures = [ask(connection, "ORDERED", text) for text in texts]
        wait_until(lambda: "defer c" in lab.work.open)
        assert ask(other, "ORDERED", "other").result(20).payload.text == "other"
        assert lab.work.begun == ["a", "a done", "b", "b done", "defer c", "other", "other done"]
        lab.work.resolve("defer c")
        assert [future.result(20).payload.text for future in futures] == texts
        assert lab.work.begun[-4:] == ["d", "d done", "e", "e done"]


def test_many_ordered_calls_behind_one(lab: Lab) -> None:
    with connected(lab.endpoint) as connection:
        futures = [ask(connection, "ORDERED", "defer"), *(ask(connection, "ORDERED", str(n)) for n in range(300))]
        wait_until(lambda: lab.work.open)
        lab.work.resolve("defer")
        assert [future.result(20).payload.text for future in futures[1:]] == [str(n) for n in range(300)]


def raises(error: BaseException) -> object:
    raise error


def recurses() -> object:
    return recurses()


@pytest.mark.parametrize("name", ["FAILS", "FAILS_POOLED"])
@pytest.mark.parametrize(
    ("fails", "error", "match"),
    [
        (lambda: raises(ZeroDivisionError("a secret")), errors.HandlerFailed, "ZeroDivisionError in the handler"),
        (
            lambda: Future.failed(ZeroDivisionError("a secret")),
            errors.HandlerFailed,
            "ZeroDivisionError in the handler",
        ),
        (
            lambda: raises(errors.BadRange("bad", where="here", hint="a better one")),
            errors.BadRange,
            r"here: bad\s+hint: a better one",
        ),
        (lambda: raises(SystemExit(3)), errors.HandlerFailed, "SystemExit"),
        (recurses, errors.HandlerFailed, "RecursionError"),
        (lambda: None, errors.HandlerFailed, "NoneType, not Text"),
        (lambda: Pong(b"not a Text"), errors.HandlerFailed, "Pong, not Text"),
        (lambda: Text("\ud800"), errors.HandlerFailed, "UnicodeEncodeError"),
        (lambda: Text("x" * MAX_PAYLOAD_BYTES), errors.MessageTooLarge, "payload"),
        (lambda: Reply(Text(), [memoryview(bytearray(200_000))[::2]]), errors.InvalidPayload, "contiguous"),
    ],
)
def test_a_handler_that_fails_is_a_typed_error_long_before_any_deadline(
    lab: Lab, name: str, fails: Callable[[], object], error: type[Exception], match: str
) -> None:
    lab.work.fails = fails
    with connected(lab.endpoint) as connection:
        with pytest.raises(error, match=match) as told:
            ask(connection, name, timeout=600).result(20)
        assert "a secret" not in str(told.value)
        assert lab.server.counters["errors"] == 1
        assert ask(connection, "ECHO", "on").result(20).payload.text == "on"


def test_the_clients_deadline_makes_the_connection_suspect_until_a_ping_is_answered(
    lab: Lab, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    with connected(lab.endpoint) as connection:
        with pytest.raises(errors.DeadlineExceeded):
            ask(connection, "DEFERRED", "a", timeout=0.1).result(20)
        assert connection.wait_up(20)
        lab.work.resolve("a")
        assert ask(connection, "ECHO", "on").result(20).payload.text == "on"
    assert "answer" not in caplog.text, "the server was there: one answer was late"


def test_a_client_that_leaves_is_no_trouble(lab: Lab) -> None:
    with connected(lab.endpoint) as connection:
        ask(connection, "ECHO", "a").result(20)
        for _ in range(100):
            ask(connection, "ECHO", "b")
    wait_until(lambda: not lab.server.sessions)
    with connected(lab.endpoint) as another:
        ask(another, "ECHO", "c").result(20)
    unroutable = COUNTERS["messaging.counters.unroutable"]
    assert not unroutable.trouble, "a client may leave while its last answers are on their way"
    assert not [name for name in lab.server.counters if name.startswith("errors.")]


@pytest.mark.parametrize("name", ["SHORT", "POOLED_SHORT"])
def test_the_servers_deadline_answers_at_once_and_the_late_result_is_dropped(lab: Lab, name: str) -> None:
    with connected(lab.endpoint) as connection:
        with pytest.raises(errors.DeadlineExceeded, match=r"0\.2 s"):
            ask(connection, name, "a").result(20)
        assert lab.server.counters["late"] == 0
        lab.work.gate.set()
        if name == "SHORT":
            lab.work.resolve("a")
        wait_until(lambda: lab.server.counters["late"] == 1)
        assert connection.state == "up"


def test_an_overdue_call_that_has_not_begun_never_does(lab: Lab) -> None:
    with connected(lab.endpoint) as connection:
        futures = [ask(connection, "POOLED_SHORT", str(n)) for n in range(5)]
        for future in futures:
            with pytest.raises(errors.DeadlineExceeded):
                future.result(20)
        begun = list(lab.work.begun)
        assert len(begun) <= 2, "there are two workers"
        lab.work.gate.set()
        wait_until(lambda: lab.server.counters["late"] == len(begun))
        assert ask(connection, "POOLED", "last").result(20).payload.text.startswith("last")
        assert lab.work.begun == [*begun, "last"]


@pytest.mark.parametrize("name", ["DEFERRED", "SHORT"])
def test_cancel_is_answered_only_after_the_future_resolves_even_behind_its_deadline(lab: Lab, name: str) -> None:
    with connected(lab.endpoint) as connection:
        future = ask(connection, name, "a")
        wait_until(lambda: "a" in lab.work.open)
        if name == "SHORT":
            with pytest.raises(errors.DeadlineExceeded):
                future.result(20)
        answer = connection.cancel(future)
        wait_until(lambda: lab.work.cancelled == ["a"])
        assert ask(connection, "ECHO", "a round trip later").result(20)
        assert not answer.query()
        assert future.query() == (name == "SHORT")
        lab.work.resolve("a")
        assert answer.result(20).payload == CancelReply(found=True)
        assert isinstance(future.exception(), errors.DeadlineExceeded if name == "SHORT" else errors.Cancelled)
        assert connection.cancel(future).result(20).payload == CancelReply(found=False)


def test_a_futures_own_cancel(lab: Lab) -> None:
    with connected(lab.endpoint) as connection:
        future = ask(connection, "DEFERRED", "a")
        wait_until(lambda: "a" in lab.work.open)
        future.cancel()
        wait_until(lambda: lab.work.cancelled == ["a"])
        lab.work.resolve("a")
        with pytest.raises(errors.Cancelled, match="stopped"):
            future.result(20)


def test_cancelling_what_waits_its_turn(lab: Lab) -> None:
    with connected(lab.endpoint) as connection:
        first, second, third = (ask(connection, "ORDERED", text) for text in ("defer", "never", "third"))
        wait_until(lambda: "defer" in lab.work.open)
        assert connection.cancel(second).result(20).payload == CancelReply(found=True)
        assert isinstance(second.exception(), errors.Cancelled)
        lab.work.resolve("defer")
        assert first.result(20).payload.text == "defer"
        assert third.result(20).payload.text == "third"
        assert "never" not in lab.work.begun


def test_nobody_cancels_the_calls_of_another(lab: Lab) -> None:
    with connected(lab.endpoint) as connection, connected(lab.endpoint) as other:
        future = ask(connection, "DEFERRED", "a")
        wait_until(lambda: "a" in lab.work.open)
        stranger = other.begin("CANCEL", Cancel(future.request_id), timeout=60)  # type: ignore[attr-defined]
        assert stranger.result(20).payload == CancelReply(found=False)
        assert not lab.work.cancelled
        lab.work.resolve("a")
        assert future.result(20).payload.text == "a"


def test_stop_lets_calls_in_flight_finish_and_refuses_new_ones(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    with connected(lab.endpoint) as connection:
        kept, lost = ask(connection, "DEFERRED", "kept"), ask(connection, "DEFERRED", "lost")
        wait_until(lambda: len(lab.work.open) == 2)
        lab.server.stop(60.0)
        with pytest.raises(errors.ShuttingDown):
            ask(connection, "ECHO").result(20)
        lab.work.resolve("kept")
        assert kept.result(20).payload.text == "kept"
        monkeypatch.setattr(lab.server, "_clock", lambda: time.monotonic() + 60.0)  # its grace has passed
        with pytest.raises((errors.ShuttingDown, errors.ServerGone)):
            lost.result(20)
        wait_until(lambda: connection.state == "down")
        wait_until(lambda: len(lab.work.ended) == 1)
        assert lab.work.cancelled == ["lost"]


def test_pings_and_ticks_are_served(lab: Lab) -> None:
    with connected(lab.endpoint, ping_every_s=0.01):
        wait_until(lambda: lab.server.counters["requests"] > 20)
        wait_until(lambda: lab.work.ticks > 3)


def test_very_many_sessions_do_not_keep_the_servers_end(
    lab: Lab, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with connected(lab.endpoint), connected(lab.endpoint):
        monkeypatch.setattr(server, "SESSIONS_END_S", 0.0)
        lab.stop()
        assert lab.work.ended == []
        assert "2 client sessions end" in caplog.text
