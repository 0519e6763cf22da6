"""Callers that wait send and receive by themselves: each gets its own answer, whoever received it; none waits on. What
ends a caller's wait from within (a signal's handler that raises, or that closes) harms nobody else's. A handler runs
between any two steps of the main thread. Here it is planted into one of them."""

from __future__ import annotations

import _thread
import contextlib
import random
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import pytest

from kvf_dev.testing.kit import together
from kvframework.api.plugin import Message
from kvframework.errors import DeadlineExceeded, MessageTooLarge, ServerGone, ShuttingDown, UnknownRequest
from kvframework.messaging import frames_io
from kvframework.messaging.client.connection import Connection
from kvframework.messaging.client.link import Link, Request
from kvframework.wire.frames import MAX_PAYLOAD_BYTES, Envelope
from tests.core.messaging.lab import Lab, Text, ask, connected
from tests.support.waiting import wait_until

# Far above what an answer takes, far below the deadlines here: who was not woken is found out by it.
SOON_S = 20.0


def waiting(connection: Connection, name: str, text: str = "", timeout: float = 60.0) -> str:
    began = time.monotonic()
    answer = connection.ask(f"test.{name}", Text(text), timeout=timeout)
    assert isinstance(answer, Text)
    assert time.monotonic() - began < SOON_S, "it was there long before"
    return answer.text


def test_an_answer_and_every_kind_of_failure(lab: Lab) -> None:
    with connected(lab.endpoint) as connection:
        assert waiting(connection, "ECHO", "a") == "a"
        with pytest.raises(UnknownRequest):
            connection.ask("test.NOTHING", Text(), timeout=60)
        with pytest.raises(MessageTooLarge):
            waiting(connection, "ECHO", "x" * MAX_PAYLOAD_BYTES)
        assert waiting(connection, "ECHO", "b") == "b"
    with pytest.raises(ServerGone):
        waiting(connection, "ECHO")


def test_the_deadline_is_kept_and_the_server_in_doubt_until_it_answers(lab: Lab) -> None:
    with connected(lab.endpoint, ping_every_s=0.05) as connection:
        began = time.monotonic()
        with pytest.raises(DeadlineExceeded, match=r"0\.1 s"):
            waiting(connection, "DEFERRED", "a", timeout=0.1)
        assert 0.1 <= time.monotonic() - began < SOON_S
        assert connection.wait_up(20)
        assert waiting(connection, "ECHO", "on") == "on"


def test_what_comes_too_late_is_given_to_whom_it_was_promised(lab: Lab) -> None:
    late: list[object] = []
    with connected(lab.endpoint, ping_every_s=0.05) as connection:
        with pytest.raises(DeadlineExceeded):
            connection.ask("test.DEFERRED", Text("a"), timeout=0.1, on_late=late.append)
        assert connection.wait_up(20)
        lab.work.resolve("a")
        wait_until(lambda: late == [Text("a")], what="the late answer")


def test_the_requests_of_a_thread_keep_their_order_however_each_is_sent(lab: Lab) -> None:
    with connected(lab.endpoint, ping_every_s=60) as connection:
        for number in range(100):
            text = str(number)
            sent = ask(connection, "DEFERRED", text)
            waiting(connection, "ECHO")
            assert text in lab.work.open, "ECHO was sent after it"
            connection.cancel(sent)
            waiting(connection, "ECHO")
            assert lab.work.cancelled[-1:] == [text], "ECHO was sent after its CANCEL"


def test_many_threads_wait_send_and_get_their_own(lab: Lab) -> None:
    """Some wait, some only send and look later; whoever receives hands on what is not its own."""

    def work(connection: Connection, seed: int) -> None:
        chance = random.Random(seed)
        for number in range(150):
            text = f"{seed}.{number}." + "x" * chance.choice((0, 10, 100_000))
            if chance.random() < 0.3:
                assert ask(connection, "ECHO", text).result(20).payload.text == text
            else:
                assert waiting(connection, "ECHO", text) == text
            if chance.random() < 0.1:
                time.sleep(chance.random() * 0.005)

    with connected(lab.endpoint, ping_every_s=0.01) as connection:
        together([lambda seed=seed: work(connection, seed) for seed in range(8)], 60)
        assert connection.state == "up"


def test_who_receives_leaves_and_others_still_get_theirs(lab: Lab) -> None:
    """The first caller receives for the second as well, until it has its own answer."""
    got: list[str] = []
    with connected(lab.endpoint, ping_every_s=60) as connection:

        def second() -> None:
            wait_until(lambda: len(lab.work.open) == 1, what="the first request")
            got.append(waiting(connection, "DEFERRED", "second"))

        def server() -> None:
            wait_until(lambda: len(lab.work.open) == 2, what="both requests")
            lab.work.resolve("first")
            wait_until(lambda: got == ["first"], what="the first answer")
            lab.work.resolve("second")

        together([lambda: got.append(waiting(connection, "DEFERRED", "first")), second, server], 60)
        assert got == ["first", "second"]


def test_what_another_thread_takes_from_who_waits_wakes_it(lab: Lab) -> None:
    """As the I/O thread does, when a heartbeat is due."""
    with connected(lab.endpoint, ping_every_s=60) as connection:
        done = threading.Event()

        def take() -> None:
            link = connection._link
            assert link is not None
            while not done.is_set():
                link._receive()

        def wait() -> None:
            try:
                for number in range(200):
                    assert waiting(connection, "ECHO", str(number)) == str(number)
            finally:
                done.set()

        together([take, wait], 60)


def test_the_end_of_the_server_ends_every_wait(lab: Lab) -> None:
    with connected(lab.endpoint) as connection:

        def wait_for_nothing(text: str) -> None:
            with pytest.raises((ServerGone, ShuttingDown)):
                waiting(connection, "DEFERRED", text, timeout=60)

        def end() -> None:
            wait_until(lambda: len(lab.work.open) == 3, what="the requests")
            lab.stop()

        began = time.monotonic()
        together([*[lambda text=text: wait_for_nothing(text) for text in "abc"], end], 60)
        assert time.monotonic() - began < SOON_S


def test_a_connection_is_closed_while_a_caller_waits_also_by_what_it_receives(lab: Lab) -> None:
    by: list[str] = []
    with connected(lab.endpoint, ping_every_s=60) as connection:

        def wait_for_nothing() -> None:
            with pytest.raises(ServerGone):
                waiting(connection, "DEFERRED", "never", timeout=60)

        def close(_: object) -> None:
            by.append(threading.current_thread().name)
            connection.close()

        def server() -> None:
            wait_until(lambda: len(lab.work.open) == 1, what="the caller's request")
            ask(connection, "DEFERRED", "closes", 60).add_done_callback(close)
            wait_until(lambda: len(lab.work.open) == 2, what="both requests")
            lab.work.resolve("closes")

        together([wait_for_nothing, server], 60)
        assert connection.state == "down"
    assert by != ["kvf-link"], "the caller received it"
    wait_until(
        lambda: not [each for each in threading.enumerate() if each.name in ("kvf-link", "kvf-connection")],
        what="the connection's threads",
    )


def test_a_signal_ends_the_wait_and_the_session_with_all_that_was_granted(lab: Lab) -> None:
    with connected(lab.endpoint, ping_every_s=0.05) as connection:
        session = lab.server.sessions[0]

        def interrupt() -> None:
            wait_until(lambda: lab.work.open, what="the request")
            _thread.interrupt_main()

        threading.Thread(target=interrupt, daemon=True).start()
        with pytest.raises(KeyboardInterrupt):
            connection.ask("test.DEFERRED", Text("a"), timeout=60)
        wait_until(lambda: lab.work.ended == [session], what="the end of the session")
        assert connection.wait_up(20)
        assert waiting(connection, "ECHO", "on") == "on"


class Waiter:
    """A thread that asks for what the server does not answer."""

    def __init__(self, connection: Connection, text: str = "other", timeout: float = 60.0) -> None:
        self.error: BaseException | None = None
        self.late: list[object] = []
        self._ask = lambda: connection.ask(
            "test.DEFERRED", Text(text), timeout=timeout, urgent=True, on_late=self.late.append
        )
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def _run(self) -> None:
        try:
            self._ask()
        except BaseException as error:  # noqa: BLE001  looked at by the test
            self.error = error

    def ended(self) -> BaseException | None:
        self.thread.join(SOON_S)
        assert not self.thread.is_alive(), "it waits on"
        return self.error


def link_of(connection: Connection) -> Link:
    assert connection._link is not None
    return connection._link


def planted(where: Any, name: str, handler: Callable[[], object], monkeypatch: pytest.MonkeyPatch) -> None:
    """The first call of `where.name` by this thread has `handler` run within it."""
    original, here, left = getattr(where, name), threading.get_ident(), [handler]

    def call(*args: Any, **named: Any) -> Any:
        if threading.get_ident() == here and left:
            left.pop()()
        return original(*args, **named)

    monkeypatch.setattr(where, name, call)


def interrupt() -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize("step", ["half a message", "lead", "follow", "receive"])
def test_a_handler_that_raises_ends_the_link_for_all_and_it_comes_back(
    lab: Lab, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    with connected(lab.endpoint, ping_every_s=60) as connection:
        dealer, send = link_of(connection)._dealer, frames_io.send
        lead, other = dealer.lead, None

        def half(socket: frames_io.Socket, frames: Any) -> None:
            socket.send(frames[0], frames_io._MORE)
            monkeypatch.setattr(frames_io, "send", send)
            raise KeyboardInterrupt

        def led() -> bool:
            """It has become the leader and does not know it yet."""
            lead()
            monkeypatch.setattr(dealer, "lead", lead)
            raise KeyboardInterrupt

        if step == "half a message":
            other = Waiter(connection)
            wait_until(lambda: lab.work.open, what="the other's request")
            monkeypatch.setattr(frames_io, "send", half)
        elif step == "lead":
            monkeypatch.setattr(dealer, "lead", led)
        else:
            planted(dealer, step, interrupt, monkeypatch)
        with pytest.raises(KeyboardInterrupt):
            connection.ask("test.ECHO", Text("a"), timeout=60)
        assert other is None or isinstance(other.ended(), ServerGone)
        wait_until(lambda: connection.state == "up" and link_of(connection)._dealer is not dealer, what="a new link")
        assert connection.ask("test.ECHO", Text("on"), timeout=60) == Text("on")


def test_the_answer_of_another_that_was_in_hand(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is lost, but its caller is told."""
    others: list[Waiter] = []
    with connected(lab.endpoint, ping_every_s=60) as connection:

        def others_answer_comes() -> None:
            wait_until(lambda: "mine" in lab.work.open, what="the request of who receives")
            others.append(Waiter(connection))
            wait_until(lambda: "other" in lab.work.open, what="the other's request")
            lab.work.resolve("other")

        threading.Thread(target=others_answer_comes, daemon=True).start()
        answer, here = Request.answer, threading.get_ident()

        def interrupted(item: Request, envelope: Envelope) -> Message:
            if threading.get_ident() == here:
                raise KeyboardInterrupt
            return answer(item, envelope)

        monkeypatch.setattr(Request, "answer", interrupted)
        with pytest.raises(KeyboardInterrupt):
            connection.ask("test.DEFERRED", Text("mine"), timeout=60)
        assert isinstance(others[0].ended(), ServerGone)


def test_what_comes_while_its_caller_gives_up_is_late_once(lab: Lab) -> None:
    """One thread receives what another gives up just now."""
    with connected(lab.endpoint, ping_every_s=60) as connection:
        leader = Waiter(connection, "leader")
        wait_until(lambda: lab.work.open, what="the leader's request")
        link = link_of(connection)
        notify = link.watch.changed

        def given_up() -> None:
            link.watch.changed = notify
            lab.work.resolve("late")
            for _ in range(3):  # the I/O thread has seen to all that came before
                ask_urgently(connection)

        link.watch.changed = given_up
        late = Waiter(connection, "late", timeout=0.2)
        assert isinstance(late.ended(), DeadlineExceeded)
        wait_until(lambda: late.late, what="the late answer")
        assert late.late == [Text("late")]
        lab.work.resolve("leader")
        assert leader.ended() is None


def ask_urgently(connection: Connection) -> None:
    connection.begin("test.ECHO", Text(), timeout=60, urgent=True).result(20)


@pytest.mark.parametrize("step", ["send", "wait", "receive"])
def test_a_handler_closes_the_connection_that_its_thread_asks(
    lab: Lab, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    """As one of SIGTERM may, in the middle of whatever the main thread does, also with a lock in its hands."""
    with connected(lab.endpoint, ping_every_s=60) as connection:
        other = Waiter(connection) if step == "send" else None
        planted(link_of(connection)._dealer if step == "wait" else frames_io, step, connection.close, monkeypatch)
        began = time.monotonic()
        with contextlib.suppress(ServerGone):
            connection.ask("test.DEFERRED" if step == "wait" else "test.ECHO", Text("a"), timeout=60)
        assert time.monotonic() - began < SOON_S
        if other is not None:
            assert isinstance(other.ended(), ServerGone)
        assert connection.state == "down"


@pytest.mark.parametrize("step", ["append", "send"])
def test_a_handler_closes_the_connection_whose_thread_sends_without_waiting(
    lab: Lab, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    with connected(lab.endpoint, ping_every_s=60) as connection:
        here, closes = threading.get_ident(), [connection.close]

        class Outbox(deque[Request]):
            def append(self, item: Request) -> None:
                if threading.get_ident() == here and closes:
                    closes.pop()()
                super().append(item)

        if step == "send":
            planted(frames_io, "send", connection.close, monkeypatch)
            connection.post("test.ECHO", Text("a"))
        else:
            monkeypatch.setattr(link_of(connection), "_outbox", Outbox())
            with pytest.raises(ServerGone):
                connection.begin("test.ECHO", Text("a"), timeout=60).result(SOON_S)
        assert connection.state == "down"
