"""Where Mooncake's own answers differ from those of a tier: replaced, leased and empty values, and a full store."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing

import pytest

from kvf_mooncake import MooncakeOptions, kvf_tiers
from kvframework.api.plugin import TableContext
from kvframework.api.tier import Outcome, Tier
from tests.mooncake.real.store import MooncakeStore

MIB = 1 << 20


def soon() -> float:
    return time.monotonic() + 60.0


def key(name: str) -> bytes:
    return name.encode().ljust(72, b".")


@pytest.fixture
def tier(store: MooncakeStore) -> Iterator[Tier]:
    (provider,) = kvf_tiers()
    tier = provider.create(MooncakeOptions(master=store.address), TableContext(where="[[l2]] #1"))
    yield tier
    tier.close()


def put(tier: Tier, name: str, value: bytes) -> Outcome:
    (outcome,) = tier.put([key(name)], [[memoryview(value)]], deadline=soon())
    return outcome


def get(tier: Tier, name: str, room: int) -> bytes | Outcome:
    buffer = bytearray(room)
    (answer,) = tier.get_into([key(name)], [[memoryview(buffer)]], deadline=soon())
    return answer if isinstance(answer, Outcome) else bytes(buffer[:answer])


def test_a_leased_value_is_replaced_and_deleted(tier: Tier) -> None:
    for value in (b"first", b"other", b"", b"longer than any"):
        assert put(tier, "k", value) is Outcome.STORED
        assert tier.contains([key("k")], deadline=soon()) == [Outcome.FOUND]
        assert get(tier, "k", 32) == value
    assert get(tier, "k", 4) is Outcome.DAMAGED
    assert tier.delete([key("k")], deadline=soon()) == [Outcome.DELETED]
    assert tier.contains([key("k")], deadline=soon()) == [Outcome.MISSING]


def test_a_full_store_makes_room_or_refuses(tier: Tier) -> None:
    """The store has 64 MiB. Each value that it says it has stored it has, or has evicted: never another one's bytes."""
    outcomes = {n: put(tier, str(n), bytes([n]) * (4 * MIB)) for n in range(40)}
    assert set(outcomes.values()) <= {Outcome.STORED, Outcome.FAILED}
    assert outcomes[0] is Outcome.STORED
    found = {n: get(tier, str(n), 4 * MIB) for n in outcomes}
    assert all(each in (bytes([n]) * (4 * MIB), Outcome.MISSING) for n, each in found.items())
    assert any(isinstance(each, bytes) for each in found.values())
    assert put(tier, "larger than the store", bytes(80 * MIB)) is Outcome.FAILED


def test_a_value_of_a_stranger_is_damaged(store: MooncakeStore, tier: Tier) -> None:
    """Someone else's put under a key of ours, without the seal."""
    from mooncake.store import MooncakeDistributedStore

    stranger = MooncakeDistributedStore()
    assert stranger.setup("127.0.0.1", "P2PHANDSHAKE", 0, 16 << 20, "tcp", "", store.address) == 0
    try:
        for name, value in (("short", b"abc"), ("long", b"abc" * 1000)):
            assert stranger.put("kvf:" + key(name).hex(), value) == 0
            assert get(tier, name, 4096) is Outcome.DAMAGED
            assert put(tier, name, b"ours") is Outcome.STORED
            assert get(tier, name, 4096) == b"ours"
    finally:
        stranger.close()


def test_two_nodes_that_write_the_same_at_once_lose_no_room(store: MooncakeStore) -> None:
    """Of 64 MiB: a replacement of what the other one is writing would keep its room for minutes."""
    (provider,) = kvf_tiers()
    value = memoryview(bytes(range(256)) * (MIB // 256))
    with ExitStack() as stack, ThreadPoolExecutor(2) as threads:
        nodes = [
            stack.enter_context(
                closing(provider.create(MooncakeOptions(master=store.address), TableContext(where="[[l2]] #1")))
            )
            for _ in range(2)
        ]
        for number in range(12):
            keys = [key(f"{number}-{index}") for index in range(8)]
            puts = [threads.submit(tier.put, keys, [[value]] * 8, deadline=soon()) for tier in nodes]
            assert [put.result() for put in puts] == [[Outcome.STORED] * 8] * 2
            rooms = [memoryview(bytearray(MIB)) for _ in keys]
            assert nodes[0].get_into(keys, [[room] for room in rooms], deadline=soon()) == [MIB] * 8
            assert rooms == [value] * 8
            assert nodes[1].delete(keys, deadline=soon()) == [Outcome.DELETED] * 8
