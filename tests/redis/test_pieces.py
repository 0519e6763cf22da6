"""Values above the maximum size: stored in pieces, and never put together from pieces that do not belong together."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import redis
from kvf_dev.testing.tier import TierConformance
from kvf_redis.commands import (
    MAX_PIECES,
    TRAILER_BYTES,
    Command,
    Count,
    Get,
    Set,
    Tail,
    Trailer,
    new_trailer,
    parse_trailer,
    spans,
)
from kvf_redis.resp import Reply
from kvf_redis.values import Borrowed, Reading, Writing, other_pieces
from kvframework.api.tier import Outcome, Tier
from tests.support.received import outcomes_of
from tests.support.redis_server import RedisServer
from tests.support.redis_tier import get, open_redis_tier, put, soon

FOUND, MISSING, STORED = Outcome.FOUND, Outcome.MISSING, Outcome.STORED
DELETED, DAMAGED = Outcome.DELETED, Outcome.DAMAGED

LIMIT = 64 << 10
ROOM = LIMIT - TRAILER_BYTES
KEY = b"key"


# Pure: a dict stands for the store, and calls take turns command by command


class Store(dict[bytes, bytes]):
    """Carries out commands as Redis would; stands for the wire they read from."""

    _reply = b""

    def run(self, command: Command) -> None:
        command.reset()
        if isinstance(command, Set):
            self[command.key] = b"".join(bytes(part) for part in command._parts)
            command.outcome = STORED
        elif isinstance(command, Count):
            assert b"UNLINK" in command._bytes
            command.outcome = MISSING if self.pop(command.key, None) is None else DELETED
        else:
            assert isinstance(command, Get | Tail)
            value = self.get(command.key)
            if isinstance(command, Tail):
                value = (value or b"")[-TRAILER_BYTES:]
            self._reply = value or b""
            command._take(Reply("$", -1 if value is None else len(value)), self, 0.0)  # type: ignore[arg-type]
        command.answered = True

    def value_into(self, parts: list[memoryview], nbytes: int, deadline: float) -> None:
        assert nbytes == len(self._reply) <= sum(part.nbytes for part in parts)
        at = 0
        for part in parts:
            piece = self._reply[at : at + part.nbytes]
            part[: len(piece)] = piece
            at += len(piece)

    def drain(self, nbytes: int, deadline: float) -> None:
        assert nbytes == len(self._reply)


Call = Iterator[Command]


def writing(value: bytes, max_bytes: int, key: bytes = KEY) -> Call:
    with Borrowed([memoryview(value)]) as borrowed:
        mine = Writing(key, borrowed, max_bytes=max_bytes, ttl_s=0)
        yield from mine.pieces
        assert mine.ready()
        yield mine.before
        yield mine.first
        yield from [Count(each, b"UNLINK", DELETED) for each in mine.remains()]


def deleting(key: bytes = KEY) -> Call:
    tail = Tail(key)
    yield tail
    yield Count(key, b"UNLINK", DELETED)
    yield from [Count(each, b"UNLINK", DELETED) for each in other_pieces(tail)]


def reading(nbytes: int, read: list[tuple[Outcome, bytes]], key: bytes = KEY) -> Call:
    buffer = bytearray(b"\xee" * nbytes)
    with Borrowed([memoryview(buffer)[: nbytes // 3], memoryview(buffer)[nbytes // 3 :]]) as borrowed:
        mine = Reading(key, borrowed)
        while True:
            yield mine.first
            yield from mine.rest()
            if not mine.torn():
                break
    received = mine.received
    # Never what the first piece alone held.
    assert isinstance(received, Outcome) or received <= nbytes
    read.append((outcomes_of([received])[0], bytes(buffer)))


def to_the_end(store: Store, call: Call) -> None:
    for command in call:
        store.run(command)


def read_back(store: Store, nbytes: int) -> tuple[Outcome, bytes]:
    read: list[tuple[Outcome, bytes]] = []
    to_the_end(store, reading(nbytes, read))
    return read[0]


@given(st.binary(max_size=400), st.integers(1, 120), st.integers(0, 60))
@example(b"x" * 53, 5, 0)
def test_a_value_in_pieces_comes_back_into_any_room_that_is_large_enough(value: bytes, room: int, spare: int) -> None:
    store = Store()
    to_the_end(store, writing(value, room + TRAILER_BYTES))
    assert all(len(each) <= room + TRAILER_BYTES for each in store.values())
    outcome, found = read_back(store, len(value) + spare)
    assert outcome is FOUND
    assert found[: len(value)] == value
    if value:
        assert read_back(store, len(value) - 1)[0] is DAMAGED
    to_the_end(store, deleting())
    assert not store


@given(st.lists(st.tuples(st.integers(0, 300), st.integers(1, 90)), min_size=1, max_size=6))
def test_a_value_that_is_replaced_leaves_nothing(sizes: list[tuple[int, int]]) -> None:
    store = Store()
    for index, (nbytes, room) in enumerate(sizes):
        to_the_end(store, writing(bytes([index]) * nbytes, room + TRAILER_BYTES))
    nbytes, room = sizes[-1]
    assert read_back(store, nbytes) == (FOUND, bytes([len(sizes) - 1]) * nbytes)
    assert sum(len(each) for each in store.values()) <= nbytes + len(store) * TRAILER_BYTES
    to_the_end(store, deleting())
    assert not store


@given(
    st.lists(st.tuples(st.sampled_from(["write", "write", "read", "delete"]), st.integers(0, 7)), max_size=6),
    st.lists(st.integers(0, 5), max_size=120),
    st.integers(0, 40),
)
@settings(max_examples=300)
def test_calls_that_take_turns_see_whole_values(plan: list[tuple[str, int]], turns: list[int], lost_at: int) -> None:
    """Every writer has a length and bytes of its own; what is left of the plan when the turns are over never runs, as
    if those processes had died."""
    store, read = Store(), list[tuple[Outcome, bytes]]()
    whole = {b"\xff" * 20}
    to_the_end(store, writing(b"\xff" * 20, 5 + TRAILER_BYTES))
    calls: list[Call] = []
    for index, (kind, size) in enumerate(plan):
        if kind == "write":
            value = bytes([index]) * (8 + 6 * size)
            whole.add(value)
            calls.append(writing(value, 7 + TRAILER_BYTES))
        else:
            calls.append(deleting() if kind == "delete" else reading(60, read))
    for turn, chosen in enumerate(turns):
        if calls and (command := next(calls[chosen % len(calls)], None)) is not None:
            store.run(command)
        pieces = [key for key in store if key != KEY]
        if turn == lost_at and pieces:
            del store[pieces[lost_at % len(pieces)]]  # evicted
    for outcome, found in [*read, read_back(store, 60)]:
        assert outcome in (FOUND, MISSING, DAMAGED)
        assert outcome is not FOUND or any(found.startswith(value) and _ends(found, value) for value in whole)


def _ends(found: bytes, value: bytes) -> bool:
    """The bytes behind the value are no more of it."""
    return found[len(value) : len(value) + 1] != value[:1]


@given(st.lists(st.integers(0, 3), max_size=80), st.integers(0, 4), st.integers(0, 4))
def test_writers_that_die_leave_the_old_value_or_the_new_one(turns: list[int], one: int, two: int) -> None:
    """Nothing is evicted here, so nothing may be damaged."""
    store, read = Store(), list[tuple[Outcome, bytes]]()
    to_the_end(store, writing(b"\xff" * 20, 5 + TRAILER_BYTES))
    values = [bytes([number]) * (9 + 4 * size) for number, size in ((1, one), (2, two))]
    calls = [*(writing(value, 7 + TRAILER_BYTES) for value in values), reading(30, read), reading(30, read)]
    for chosen in turns:
        if (command := next(calls[chosen], None)) is not None:
            store.run(command)
    for outcome, found in [*read, read_back(store, 30)]:
        assert outcome is FOUND
        assert any(found.startswith(value) for value in [*values, b"\xff" * 20])


def test_a_value_that_looks_like_pieces_is_one_value() -> None:
    trailer = Trailer(b"g" * 16, 1000, 4)
    for value in (trailer.bytes_of(0), b"some bytes" + trailer.bytes_of(0), b"x" * 500 + trailer.bytes_of(1)):
        for max_bytes in (60, 200, 5000):
            store = Store()
            to_the_end(store, writing(value, max_bytes))
            assert read_back(store, len(value) + 9)[1].startswith(value)
            assert read_back(store, len(value)) == (FOUND, value)


numbers = st.tuples(st.integers(0, 600), st.integers(0, 9), st.integers(0, 2)).map(
    lambda each: Trailer(b"g" * 16, each[0], each[1]).bytes_of(each[2])
)
noise = st.binary(min_size=TRAILER_BYTES - 16, max_size=TRAILER_BYTES - 16).map(
    lambda rest: Trailer(b"g" * 16, 1, 1).bytes_of(0)[:16] + rest
)


@given(st.one_of(numbers, noise), st.integers(0, 500))
@example(Trailer(b"g" * 16, 10, 2).bytes_of(0), 0)
@example(Trailer(b"g" * 16, 10, 1).bytes_of(0), 9)
@example(Trailer(b"g" * 16, 0, 1).bytes_of(0), 0)
@example(Trailer(b"g" * 16, 9, 1).bytes_of(0), 10)
def test_any_trailer_is_read_without_harm(tail: bytes, nbytes: int) -> None:
    """No other piece is there: FOUND is only a whole value, or one that is all in its first piece."""
    store = Store({KEY: b"v" * nbytes + tail})
    outcome, found = read_back(store, 400)
    trailer = parse_trailer(tail)
    whole = nbytes + TRAILER_BYTES <= 400 if trailer is None else trailer.total == nbytes <= 400 and trailer.pieces == 1
    assert outcome is (FOUND if whole else DAMAGED)
    assert outcome is DAMAGED or found[:nbytes] == b"v" * nbytes
    to_the_end(store, deleting())
    assert not store


def test_more_pieces_than_anybody_reads_are_not_written() -> None:
    assert new_trailer(MAX_PIECES * 7, 7) is not None
    assert new_trailer(MAX_PIECES * 7 + 1, 7) is None
    with Borrowed([memoryview(bytes(MAX_PIECES + 1))]) as value:
        impossible = Writing(KEY, value, max_bytes=TRAILER_BYTES + 1, ttl_s=0)
        assert not impossible.ready()
        assert impossible.first.outcome is Outcome.FAILED
    assert parse_trailer(Trailer(b"g" * 16, 1 << 40, MAX_PIECES + 1).bytes_of(0)) is None


def test_every_piece_but_the_last_is_full() -> None:
    assert [*spans(10, 4)] == [0, 4, 8]
    assert [*spans(8, 4)] == [0, 4]


# Against a real server


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with RedisServer(tmp_path_factory.mktemp("redis"), unix=True) as server:
        yield server


@pytest.fixture
def client(server: RedisServer) -> Iterator[Any]:
    with server.client() as client:
        client.flushall()
        yield client


@pytest.fixture
def tier(server: RedisServer, client: redis.Redis) -> Iterator[Tier]:
    tier = open_redis_tier(server.url, max_value_bytes=LIMIT, ttl_s=500)
    yield tier
    tier.close()


@pytest.mark.redis
class TestInPieces(TierConformance):
    use = "redis"
    examples = 10

    @pytest.fixture
    def tier_options(self, server: RedisServer) -> Mapping[str, object]:
        return {"url": server.url, "max_value_bytes": "64KiB"}


@pytest.mark.redis
@pytest.mark.parametrize(
    ("nbytes", "pieces"), [(LIMIT, 1), (LIMIT + 1, 2), (2 * ROOM, 2), (2 * ROOM + 1, 3), (5 * LIMIT, 6)]
)
def test_pieces_are_as_large_as_allowed_and_leave_together(tier: Tier, client: Any, nbytes: int, pieces: int) -> None:
    value = os.urandom(nbytes)
    assert put(tier, KEY, value) is STORED
    assert client.dbsize() == pieces
    assert max(client.strlen(key) for key in client.keys()) <= LIMIT  # noqa: SIM118
    assert get(tier, KEY, nbytes=nbytes) == ([FOUND], [value])
    assert get(tier, KEY, nbytes=nbytes - 1)[0] == [DAMAGED]
    assert get(tier, KEY, nbytes=nbytes + 100)[1][0][:nbytes] == value
    assert tier.contains([KEY], deadline=soon()) == [FOUND]
    assert tier.delete([KEY, KEY], deadline=soon()) == [DELETED, MISSING]
    assert client.dbsize() == 0


@pytest.mark.redis
def test_another_limit_reads_and_replaces_what_is_there(tier: Tier, client: Any, server: RedisServer) -> None:
    other = open_redis_tier(server.url, max_value_bytes=LIMIT * 2, ttl_s=500)
    value, smaller = os.urandom(LIMIT * 5), os.urandom(1000)
    assert put(tier, KEY, value) is STORED
    assert get(other, KEY, nbytes=len(value)) == ([FOUND], [value])
    assert put(other, KEY, value[::-1]) is STORED
    assert client.dbsize() == 3
    assert get(tier, KEY, nbytes=len(value)) == ([FOUND], [value[::-1]])
    assert put(tier, KEY, smaller) is STORED
    assert client.dbsize() == 1
    assert get(other, KEY, nbytes=len(value))[1][0][:1000] == smaller
    other.close()


@pytest.mark.redis
def test_all_pieces_live_as_long_as_the_value(tier: Tier, client: Any) -> None:
    assert put(tier, KEY, bytes(3 * LIMIT)) is STORED
    ttls = {key: client.ttl(key) for key in client.keys()}  # noqa: SIM118
    assert len(ttls) == 4
    assert all(ttl > 490 for ttl in ttls.values())
    assert min(ttls.values()) == ttls[b"kvf:key"], "the first piece goes first"
    for key in ttls:
        client.expire(key, 5)
    tier.touch([b"unknown", KEY], deadline=soon())
    assert all(client.ttl(key) > 490 for key in ttls)


@pytest.mark.redis
@pytest.mark.parametrize("harm", ["gone", "other writing", "truncated", "longer", "flipped trailer", "wrong type"])
@pytest.mark.parametrize("victim", [1, -1])
def test_a_harmed_piece_is_damage_that_can_be_deleted(tier: Tier, client: Any, harm: str, victim: int) -> None:
    assert put(tier, b"other", os.urandom(3 * LIMIT)) is STORED
    others = sorted(client.keys())
    assert put(tier, KEY, os.urandom(3 * LIMIT)) is STORED
    mine = sorted(set(client.keys()) - set(others))
    piece = client.get(mine[victim])
    if harm == "gone":
        client.delete(mine[victim])
    elif harm == "wrong type":
        client.delete(mine[victim])
        client.lpush(mine[victim], b"x")
    else:
        client.set(
            mine[victim],
            {
                "other writing": client.get(others[victim]),
                "truncated": piece[:-1],
                "longer": piece + b"x",
                "flipped trailer": piece[:-5] + bytes([piece[-5] ^ 1]) + piece[-4:],
            }[harm],
        )
    outcomes, _ = get(tier, KEY, b"other", nbytes=3 * LIMIT)
    assert outcomes == [DAMAGED, FOUND]
    assert tier.delete([KEY], deadline=soon()) == [DELETED]
    assert sorted(client.keys()) == others


@pytest.mark.redis
@pytest.mark.parametrize("harm", ["truncated", "flipped trailer", "another's first piece", "wrong type"])
def test_a_harmed_first_piece_is_never_found_with_wrong_bytes(tier: Tier, client: Any, harm: str) -> None:
    value = os.urandom(3 * LIMIT)
    assert put(tier, KEY, value) is STORED
    assert put(tier, b"other", os.urandom(3 * LIMIT)) is STORED
    name = b"kvf:key"
    first = client.get(name)
    if harm == "wrong type":
        client.delete(name)
        client.lpush(name, b"x")
    else:
        client.set(
            name,
            {
                "truncated": first[: len(first) // 2],
                "flipped trailer": first[:-30] + bytes([first[-30] ^ 1]) + first[-29:],
                "another's first piece": client.get(b"kvf:other"),
            }[harm],
        )
    (outcome,), _ = get(tier, KEY, nbytes=3 * LIMIT)
    # A first piece that was cut has no trailer: a shorter value, which the core's header tells from the right one.
    assert outcome is (FOUND if harm == "truncated" else DAMAGED)


@pytest.mark.redis
def test_a_full_server_leaves_no_pieces_behind(tier: Tier, client: Any) -> None:
    assert put(tier, b"before", b"value") is STORED
    client.config_set("maxmemory", str(client.info()["used_memory"] + 5 * LIMIT))
    try:
        assert put(tier, KEY, bytes(40 * LIMIT)) is Outcome.FAILED
        assert client.keys() == [b"kvf:before"]
        assert ["full" in each for each in tier.problems()] == [True]
    finally:
        client.config_set("maxmemory", "0")
    assert put(tier, KEY, bytes(40 * LIMIT)) is STORED
    assert tier.problems() == []


@given(st.binary(min_size=1, max_size=400), st.integers(1, 120), st.integers(0, 60))
def test_the_bytes_of_all_pieces_count_and_their_trailers_do_not(value: bytes, room: int, spare: int) -> None:
    store = Store()
    to_the_end(store, writing(value, room + TRAILER_BYTES))
    buffer = bytearray(len(value) + spare)
    with Borrowed([memoryview(buffer)]) as borrowed:
        mine = Reading(KEY, borrowed)
        store.run(mine.first)
        for piece in mine.rest():
            store.run(piece)
        assert not mine.torn()
        assert mine.received == len(value)
