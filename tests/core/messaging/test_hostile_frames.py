"""Truncated, oversized, unknown, doubled and random frames: answered, or dropped and counted. Nobody else notices."""

from __future__ import annotations

import pytest

from kvframework.api.requests import Handler, RequestSpec
from kvframework.errors import HelloRequired
from kvframework.wire.frames import ERROR_TYPE, MAX_BUFFERS, MAX_PAYLOAD_BYTES
from kvframework.wire.messages import PROTOCOL_VERSION, Cancel, Empty, Hello, HelloReply
from tests.core.messaging.lab import HASHER, Lab, RawClient, Text, Work, ask, connected
from tests.support.waiting import wait_until

ID = (7).to_bytes(8, "little")
EMPTY_MAP = b"\x80"


@pytest.mark.parametrize(
    ("frames", "code"),
    [
        ([ID], "protocol.frames"),
        ([ID, b"test.ECHO"], "protocol.frames"),
        ([ID, b"", EMPTY_MAP], "protocol.frames"),
        ([ID, b"x" * 65, EMPTY_MAP], "protocol.frames"),
        ([ID, b"\xff\xfe", EMPTY_MAP], "protocol.frames"),
        ([ID, b"test.ECHO", EMPTY_MAP, b"a buffer too many"], "protocol.frames"),
        ([ID, b"test.ECHO", EMPTY_MAP, *([b""] * MAX_BUFFERS)], "protocol.frames"),
        ([ID, b"test.ECHO", EMPTY_MAP, *([b""] * (MAX_BUFFERS + 1))], "protocol.too_large"),
        ([ID, b"test.ECHO", b"x" * (MAX_PAYLOAD_BYTES + 1)], "protocol.too_large"),
        ([ID, b"test.ECHO", b""], "protocol.payload"),
        ([ID, b"test.ECHO", b"\xc1"], "protocol.payload"),
        ([ID, b"test.ECHO", b"\x81\xa4text\x07"], "protocol.payload"),
        ([ID, b"test.ECHO", b"\x91" * 100_000], "protocol.payload"),
        ([ID, b"NOTHING", EMPTY_MAP], "protocol.unknown_request"),
        ([ID, b"\0\n", EMPTY_MAP], "protocol.unknown_request"),
        ([ID, b"ERROR", EMPTY_MAP], "protocol.unknown_request"),
        ([ID, b"HELLO", EMPTY_MAP], "protocol.payload"),
    ],
)
def test_a_usable_request_id_gets_a_typed_answer(lab: Lab, frames: list[bytes], code: str) -> None:
    with RawClient(lab.endpoint) as raw:
        raw.send(frames)
        answer = raw.receive()
        assert answer[:2] == (7, ERROR_TYPE)
        assert answer[2].code == code
        assert len(answer[2].fact) + len(answer[2].available) < 500
        assert raw.ask(8, "test.ECHO", Text("on"))[1].text == "on"
    assert lab.server.counters[f"errors.{code}"] == 1


@pytest.mark.parametrize("frames", [[b""], [b"short"], [b"x" * 9, b"test.ECHO", EMPTY_MAP], [b"", b"", b"", b""]])
def test_without_a_request_id_a_message_is_dropped_and_counted(lab: Lab, frames: list[bytes]) -> None:
    with RawClient(lab.endpoint) as raw:
        raw.send(frames)
        assert raw.ask(8, "test.ECHO", Text("on"))[1].text == "on"
    assert lab.server.counters["malformed"] == lab.server.counters["unanswerable"] == 1


def test_a_doubled_request_id_is_refused_and_the_first_unharmed(lab: Lab) -> None:
    with RawClient(lab.endpoint) as raw:
        raw.post(7, "test.DEFERRED", Text("first"))
        raw.post(7, "test.DEFERRED", Text("second"))
        answer = raw.receive()
        assert answer[2].code == "protocol.frames"
        assert list(lab.work.open) == ["first"]
        lab.work.resolve("first")
        answer = raw.receive()
        assert answer[:2] == (7, "test.DEFERRED")
        assert raw.ask(7, "test.ECHO", Text("the id is free again"))[0] == "test.ECHO"


def test_cancel_of_itself_and_of_nothing(lab: Lab) -> None:
    with RawClient(lab.endpoint) as raw:
        for target in (5, 99, 2**64 - 1, -1):
            assert raw.ask(5, "CANCEL", Cancel(target), Empty)[0] == "CANCEL"


def test_nothing_goes_before_hello(lab: Lab) -> None:
    with RawClient(lab.endpoint, hello=False) as raw:
        for name in ("test.ECHO", "CANCEL", "PING", "NOTHING"):
            kind, error = raw.ask(3, name, Empty())
            assert (kind, error.code) == (ERROR_TYPE, HelloRequired.code)
    assert not lab.server.sessions


def test_hellos_that_are_refused_open_no_session(lab: Lab, caplog: pytest.LogCaptureFixture) -> None:
    newer = Hello("raw", 1, min_version=PROTOCOL_VERSION + 1, max_version=PROTOCOL_VERSION + 9)
    refusals = {
        "protocol.version": [newer, Hello("raw", 1, hasher="another")],
        "protocol.hello_required": [Hello("raw", 1, session=b"x" * 16), Hello("raw", 1, session=b"?")],
    }
    with RawClient(lab.endpoint, hello=False) as raw:
        for code, hellos in refusals.items():
            for hello in hellos:
                kind, error = raw.ask(3, "HELLO", hello)
                assert (kind, error.code) == (ERROR_TYPE, code)
        assert not lab.server.sessions
        kind, reply = raw.ask(3, "HELLO", Hello("n" * 10_000, 1, hasher=HASHER), HelloReply)
        assert (kind, reply.version) == ("HELLO", PROTOCOL_VERSION)
        assert [len(session.name) for session in lab.server.sessions] == [128]
    assert lab.server.counters["hello_refused"] == 2
    assert "'raw' (process 1) was refused: [protocol.version] the client speaks protocol versions" in caplog.text


def test_a_welcome_that_raises_leaves_no_session(endpoint: str) -> None:
    lab = Lab(endpoint, welcome=lambda *_: 1 / 0)
    try:
        with RawClient(endpoint, hello=False) as raw:
            kind, error = raw.ask(3, "HELLO", Hello("raw", 1))
            assert (kind, error.code) == (ERROR_TYPE, "run.handler")
            wait_until(lambda: len(lab.work.ended) == 1)
            assert not lab.server.sessions
    finally:
        lab.stop()


def test_hello_twice_and_a_second_connection_of_one_session(lab: Lab) -> None:
    with RawClient(lab.endpoint) as raw, RawClient(lab.endpoint, hello=False) as second:
        assert raw.ask(2, "HELLO", Hello("raw", 1), HelloReply)[1].session == raw.welcome.session
        joined = second.ask(2, "HELLO", Hello("raw", 1, session=raw.welcome.session), HelloReply)[1]
        assert joined.session == raw.welcome.session
        assert len(lab.server.sessions) == 1
        raw.post(50, "test.DEFERRED", Text("a"))
        wait_until(lambda: lab.work.open)
        second.post(51, "CANCEL", Cancel(50))
        wait_until(lambda: lab.work.cancelled)
        lab.work.resolve("a")
        answer = second.receive()
        assert answer[:2] == (51, "CANCEL")


def test_a_session_that_replaces_another_ends_it_first(lab: Lab) -> None:
    with RawClient(lab.endpoint) as raw, RawClient(lab.endpoint, hello=False) as second:
        reply = second.ask(2, "HELLO", Hello("raw", 1, replaces=raw.welcome.session), HelloReply)[1]
        assert [session.token for session in lab.work.ended] == [raw.welcome.session]
        assert [session.token for session in lab.server.sessions] == [reply.session]
        assert raw.ask(3, "test.ECHO", Text("x"))[1].code == "protocol.hello_required"
        assert second.ask(3, "HELLO", Hello("raw", 1, replaces=b"nobody's"), HelloReply)[1].session == reply.session
        assert second.ask(4, "GOODBYE", Empty(), Empty)[0] == "GOODBYE"
        assert not lab.server.sessions


def test_too_many_requests_in_flight(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvframework.messaging.server.handlers.MAX_IN_FLIGHT", 10)
    with RawClient(lab.endpoint) as raw:
        for n in range(12):
            raw.post(100 + n, "test.DEFERRED", Text(str(n)))
        answers = [raw.receive(), raw.receive()]
        assert sorted(answer[0] for answer in answers if answer) == [110, 111]
        lab.work.resolve("0")
        assert raw.receive() is not None
        raw.post(112, "test.DEFERRED", Text("fits"))
        wait_until(lambda: "fits" in lab.work.open)


def test_too_many_bytes_in_flight(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvframework.messaging.server.handlers.MAX_BYTES_IN_FLIGHT", 25)
    work = Work(b"boot")
    spec = RequestSpec("test.HELD", Text, Text, buffers=4)
    lab = Lab(endpoint, handlers={spec.name: Handler(spec, work._defer)})
    try:
        with RawClient(endpoint) as raw, RawClient(endpoint) as other:
            raw.post(1, spec.name, Text("a"), [b"0123456789", b"0123456789"])
            raw.post(2, spec.name, Text("b"), [b"0123456789"])
            raw.post(3, spec.name, Text("c"), [b"01234"])
            answer = raw.receive()
            assert (answer[0], answer[2].code) == (2, "protocol.too_large")
            other.post(1, spec.name, Text("others"), [b"0123456789"])
            wait_until(lambda: set(work.open) == {"a", "c", "others"})
            work.open.pop("a").set_result(Text("done"))
            assert raw.receive() is not None
            raw.post(4, spec.name, Text("d"), [b"0123456789", b"0123456789"])
            wait_until(lambda: "d" in work.open)
    finally:
        lab.stop()


def test_replies_to_a_peer_that_never_reads_are_dropped(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvframework.messaging.frames_io.HIGH_WATER_MARK", 5)
    lab = Lab(endpoint)
    try:
        with connected(endpoint) as connection, RawClient(endpoint, rcvhwm=5) as deaf:
            for n in range(100):
                deaf.post(n + 10, "test.BUFFERS", Text(), [b"y" * 100_000])
            wait_until(lambda: lab.server.counters["dropped"] > 10)
            assert ask(connection, "ECHO", "on").result(20).payload.text == "on"
    finally:
        lab.stop()
