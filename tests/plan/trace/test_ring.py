"""The ring of lookups that a server keeps while somebody records: bounded, off without readers, and nothing is missing
that it does not say."""

from __future__ import annotations

from typing import Any

import pytest

from kvframework.api.keys import CacheKey
from kvframework.api.layout import GroupDesc, MemoryLayoutDesc
from kvframework.api.requests import ClientInfo
from kvframework.service import recent_requests
from kvframework.service.keys import KeyGrid
from kvframework.service.recent_requests import READER_S, UNDECIDED_S, Recording
from kvframework.wire import messages as m

_DESC = MemoryLayoutDesc(16, (GroupDesc((1,), "uint8"),))


class _Client(ClientInfo):
    def __init__(self, session_id: int) -> None:
        self.session_id = session_id
        self.pid, self.name, self.local = 1, "trace", True


class _World:
    def __init__(self, most_bytes: int = 1 << 20) -> None:
        self.now = 100.0
        self.ring = Recording(lambda: self.now, most_bytes)
        (handler,) = self.ring.handlers()
        self._call = handler.call

    def ask(self, after: int = -1, *, done: bool = False, session: int = 1) -> m.TraceReply:
        reply = self._call(_Client(session), m.Trace(after, done), ())
        assert isinstance(reply, m.TraceReply)
        return reply

    def look_up(self, chunks: int = 1, *, hit: int | None = 0, **fields: Any) -> int:
        key = CacheKey("m", 1, None, bytes(16), 0, chunks * 16, "r", digests=bytes(32) * chunks)
        grid = KeyGrid(_DESC, [0], [bytes(72)], [bytes(32)] * chunks)
        self.ring.count += 1
        number = self.ring.add(key, fields.get("grid", grid), self.now, 0)
        if number and hit is not None:
            self.ring.decided(number, hit)
        return number


@pytest.fixture(autouse=True)
def _own_user(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recent_requests, "check_own_user", lambda _client, _what: None)


def test_it_keeps_nothing_until_somebody_records() -> None:
    world = _World()
    assert not world.look_up()
    assert not world.ring.on
    assert world.ask() == m.TraceReply((), 1), "it has a number, and was not kept"
    assert world.ring.on
    world.look_up(2, hit=16)
    reply = world.ask(1)
    assert [(each.number, each.end, each.hit_tokens, len(each.digests)) for each in reply.records] == [(2, 32, 16, 64)]
    assert reply.last == 2


def test_what_a_reader_has_is_forgotten_once_every_reader_has_it() -> None:
    world = _World()
    world.ask(session=1)
    world.ask(session=2)
    for _ in range(3):
        world.look_up()
    assert [each.number for each in world.ask(0, session=1).records] == [1, 2, 3]
    assert world.ask(3, session=1).records == ()
    assert [each.number for each in world.ask(1, session=2).records] == [2, 3]
    assert [each.number for each in world.ask(1, session=2).records] == [2, 3]  # an answer that was lost
    world.ask(3, session=2)
    assert not world.ring._ring
    assert world.ring._bytes == 0


def test_a_full_ring_forgets_the_oldest_and_the_numbers_say_so() -> None:
    world = _World(most_bytes=2000)
    world.ask()
    for _ in range(10):
        world.look_up()
    assert world.ring._bytes <= 2000
    reply = world.ask(0)
    assert [each.number for each in reply.records] == [8, 9, 10]
    assert reply.last == 10


def test_prompts_that_cannot_be_kept_take_a_number() -> None:
    world = _World(most_bytes=1 << 30)
    world.ask()
    world.look_up(grid=None)
    world.look_up()
    assert world.look_up(recent_requests.MAX_DIGEST_BYTES // 32 + 1) == 0
    reply = world.ask(0)
    assert [each.number for each in reply.records] == [2]
    assert reply.last == 3


def test_a_lookup_waits_for_its_hit_but_not_for_ever() -> None:
    world = _World()
    world.ask()
    world.look_up()
    number = world.look_up(hit=None)
    world.look_up()
    reply = world.ask(0)
    assert [each.number for each in reply.records] == [1]
    assert (reply.last, reply.more) == (1, False)
    world.ring.decided(number, 16)
    assert [each.hit_tokens for each in world.ask(1).records] == [16, 0]
    world.look_up(hit=None)
    world.now += UNDECIDED_S
    assert [each.hit_tokens for each in world.ask(3).records] == [-1]
    world.look_up(hit=None)
    assert [each.hit_tokens for each in world.ask(4, done=True).records] == [-1]
    assert not world.ring.on


def test_an_answer_is_bounded_and_says_that_there_is_more() -> None:
    world = _World(most_bytes=1 << 30)
    world.ask()
    for _ in range(m.MAX_TRACED + 5):
        world.look_up()
    reply = world.ask(0, done=True)
    assert (len(reply.records), reply.last, reply.more) == (m.MAX_TRACED, m.MAX_TRACED, True)
    assert world.ring.on
    reply = world.ask(reply.last, done=True)
    assert (len(reply.records), reply.last, reply.more) == (5, m.MAX_TRACED + 5, False)
    assert not world.ring.on
    world.ask()
    for _ in range(4):
        world.look_up(recent_requests.MAX_DIGEST_BYTES // 32)
    reply = world.ask(reply.last)
    assert (len(reply.records), reply.more) == (2, True)


def test_a_reader_that_is_silent_or_gone_ends_the_recording() -> None:
    world = _World()
    world.ask(session=1)
    world.ask(session=2)
    world.look_up()
    world.now += READER_S - 1
    world.ask(0, session=2)
    world.now += 2
    world.ring.expire()
    assert world.ring.on
    world.ring.end_session(2)
    assert not world.ring.on
    assert not world.ring._ring
    assert world.ring._bytes == 0
    assert not world.look_up()
    world.ask(session=3)
    world.now += READER_S + 1
    world.ring.expire()
    assert not world.ring.on
    world.ring.end_session(3)


def test_a_number_of_a_server_before() -> None:
    world = _World()
    world.ask()
    world.look_up()
    assert world.ask(1000) == m.TraceReply((), 1)


def test_a_reader_that_was_forgotten_and_comes_back_sees_what_it_lacks() -> None:
    world = _World()
    world.ask()
    world.look_up()
    assert world.ask(0).last == 1
    world.now += READER_S + 1
    world.ring.expire()
    for _ in range(3):
        world.look_up()
    assert world.ask(1) == m.TraceReply((), 4), "3 are missing"
    world.look_up()
    assert [each.number for each in world.ask(4).records] == [5]
