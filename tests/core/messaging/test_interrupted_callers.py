"""What ends a caller's wait from within (a signal's handler that raises, or that closes) harms nobody else's.

A handler runs between any two steps of the main thread. Here it is planted into one of them.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import pytest

from kvframework.api.plugin import Message
from kvframework.errors import DeadlineExceeded, ServerGone
from kvframework.messaging import frames_io
from kvframework.messaging.client.connection import Connection
from kvframework.messaging.client.link import Link, Request
from kvframework.wire.frames import Envelope
from tests.core.messaging.lab import Lab, Text, connected
from tests.support.waiting import wait_until

SOON_S = 20.0


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
