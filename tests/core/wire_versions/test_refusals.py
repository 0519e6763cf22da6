"""What is kept and told of refusals: enough to find the client, never a flood. Pure, with a clock of its own."""

from __future__ import annotations

import msgspec
import pytest

from kvframework.errors import InvalidPayload, UnknownRequest, VersionMismatch
from kvframework.messaging.server.sessions import MAX_KEPT, TELL_AGAIN_S, TELL_NEXT_S, ClientSession, Refusals
from kvframework.wire.frames import Envelope
from kvframework.wire.messages import Hello

ERROR = VersionMismatch("the client speaks protocol versions 2 to 3", available="1 to 1")


class World:
    def __init__(self) -> None:
        self.now = 100.0
        self.refusals = Refusals(lambda: self.now)

    def hello(self, client: str = "engine", pid: int = 7) -> None:
        payload = msgspec.msgpack.encode(Hello(client, pid, 2, 3, client_version="0.9"))
        self.refusals.hello(Envelope(1, "HELLO", payload, ()), ERROR)


def test_a_client_that_comes_again_is_one_entry_and_one_line_a_minute(caplog: pytest.LogCaptureFixture) -> None:
    world = World()
    for _ in range(int(3 * TELL_AGAIN_S / 2)):  # a refused client tries every two seconds
        world.hello()
        world.now += 2
    reason = "the client speaks protocol versions 2 to 3; expected: 1 to 1"
    line = f"'engine' (process 7, kvframework 0.9) was refused: [protocol.version] {reason}"
    assert [record.getMessage() for record in caplog.records] == [line] * 3
    assert world.refusals.report() == [
        {
            "client": "engine",
            "pid": 7,
            "client_version": "0.9",
            "versions": "2 to 3",
            "what": "HELLO",
            "code": "protocol.version",
            "reason": reason,
            "count": int(3 * TELL_AGAIN_S / 2),
            "ago_s": 2.0,
        }
    ]


def test_many_clients_are_told_one_a_second_and_the_latest_are_kept(caplog: pytest.LogCaptureFixture) -> None:
    world = World()
    for pid in range(3 * MAX_KEPT):
        world.hello(pid=pid)
        world.now += TELL_NEXT_S / 4
    assert len(caplog.records) == 3 * MAX_KEPT // 4
    assert [each["pid"] for each in world.refusals.report()] == list(range(3 * MAX_KEPT - 1, 2 * MAX_KEPT - 1, -1))


def test_one_that_was_not_told_for_others_is_told_when_it_comes_again(caplog: pytest.LogCaptureFixture) -> None:
    world = World()
    world.hello(pid=1)
    world.hello(pid=2)
    assert len(caplog.records) == 1
    world.now += 2
    world.hello(pid=2)
    assert "(process 2," in caplog.records[-1].getMessage()


def test_of_a_hello_that_cannot_be_read_what_can_is_told() -> None:
    world = World()
    for payload in (b"\xc1", b"", msgspec.msgpack.encode({"client": 5}), msgspec.msgpack.encode({"pid": 8})):
        world.refusals.hello(Envelope(1, "HELLO", payload, ()), InvalidPayload("bad"))
    assert {(each["client"], each["pid"]) for each in world.refusals.report()} == {("?", 0), ("?", 8)}


def test_texts_are_cut(caplog: pytest.LogCaptureFixture) -> None:
    world = World()
    session = ClientSession(1, 7, "n" * 128, 0.0)
    world.hello("c" * 100_000)
    world.now += 2
    world.refusals.of(session, "server", "x" * 100_000, "y" * 100_000)
    world.now += 2
    world.refusals.request(session, "LOOKUP2", UnknownRequest("z" * 100_000))
    assert len(caplog.text) < 3000
    assert len(str(world.refusals.report())) < 5000
    assert "refuses this server" in caplog.text
    assert "was refused 'LOOKUP2'" in caplog.text
