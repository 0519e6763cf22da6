"""One attached tier: codecs, room, latencies, and what it makes of outcomes."""

from __future__ import annotations

import os
import tracemalloc
import zlib
from collections.abc import Iterator, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvframework.api.codec import Codec
from kvframework.api.tier import Outcome, PackedKey, TierEntry, TierUsage
from kvframework.errors import TierError
from kvframework.storage.l2.sealed_tier import CodecTable, L2Store, Shares, Watermarks, victims
from kvframework.storage.namespaces import HEADER_BYTES
from tests.core.storage.memory import packed_key
from tests.core.storage.tier import MemoryTier, in_envelope

K = [packed_key(number) for number in range(64)]


class Zlib(Codec):
    name = "zlib"

    def encode(self, data: memoryview) -> Sequence[memoryview]:
        return [memoryview(zlib.compress(data, 1))]

    def decode_into(self, packed: memoryview, out: memoryview) -> None:
        try:
            data = zlib.decompress(packed)
        except zlib.error as error:
            raise ValueError(str(error)) from error
        if len(data) != out.nbytes:
            raise ValueError(f"{len(data)} bytes")
        out[:] = data


def store_of(tier: MemoryTier, codec: str = "none", *, allow: Sequence[str] = (), **options: object) -> L2Store:
    codecs = CodecTable(dict.fromkeys([*allow, codec], Zlib) if codec != "none" or allow else {})
    return L2Store(tier, timeout_s=5.0, codec=codec, codecs=codecs, **options)  # type: ignore[arg-type]


def read(store: L2Store, key: PackedKey, nbytes: int) -> bytes | None:
    place = bytearray(os.urandom(nbytes))
    return bytes(place) if store.get([key], [memoryview(place)]) == [True] else None


def test_what_a_codec_packed_comes_back_and_takes_less_room() -> None:
    tier = MemoryTier()
    store = store_of(tier, "zlib")
    value = b"kv" * 5000
    assert store.put(K[:1], [memoryview(value)]) == [True]
    assert len(tier.values[K[0]]) < 1000
    assert read(store, K[0], len(value)) == value
    assert (store.counters["bytes_written"], store.counters["bytes_read"]) == (10000, 10000)


def test_what_does_not_get_smaller_is_stored_as_it_is() -> None:
    tier = MemoryTier()
    value = os.urandom(1000)
    store_of(tier, "zlib").put(K[:1], [memoryview(value)])
    assert tier.values[K[0]][HEADER_BYTES:] == value
    assert read(store_of(tier), K[0], 1000) == value, "whoever reads needs no codec for it"


def test_servers_with_different_codecs_share_a_tier() -> None:
    tier = MemoryTier()
    packed, plain = b"a" * 4000, b"b" * 4000
    store_of(tier, "zlib").put(K[:1], [memoryview(packed)])
    store_of(tier).put(K[1:2], [memoryview(plain)])
    for store in (store_of(tier, "zlib"), store_of(tier, allow=["zlib"])):
        assert read(store, K[0], 4000) == packed
        assert read(store, K[1], 4000) == plain


def test_a_codec_that_is_not_allowed_is_a_miss_and_stays(caplog: pytest.LogCaptureFixture) -> None:
    tier = MemoryTier()
    store_of(tier, "zlib").put(K[:1], [memoryview(b"a" * 4000)])
    store = store_of(tier)
    assert read(store, K[0], 4000) is None
    assert read(store, K[0], 4000) is None
    assert (store.counters["foreign_codec"], store.counters["corrupt"]) == (2, 0)
    assert K[0] in tier.values, "another server's, and good"
    assert caplog.text.count("[codecs] allow") == 1


def test_a_codec_that_can_not_be_made_is_a_miss_not_an_error() -> None:
    def broken() -> Codec:
        raise ImportError("no such library")

    tier = MemoryTier()
    store_of(tier, "zlib").put(K[:1], [memoryview(b"a" * 4000)])
    store = L2Store(tier, timeout_s=5.0, codec="zlib", codecs=CodecTable({"zlib": broken}))
    assert read(store, K[0], 4000) is None
    assert store.put(K[1:2], [memoryview(b"a" * 4000)]) == [True]
    assert read(store, K[1], 4000) == b"a" * 4000


def test_what_unpacks_to_something_else_is_deleted() -> None:
    class Liar(Zlib):
        def encode(self, data: memoryview) -> Sequence[memoryview]:
            return [memoryview(zlib.compress(bytes(data) + b"more"))]

    tier = MemoryTier()
    L2Store(tier, timeout_s=5.0, codec="zlib", codecs=CodecTable({"zlib": Liar})).put(K[:1], [memoryview(b"a" * 99)])
    store = store_of(tier, "zlib")
    assert read(store, K[0], 99) is None
    assert (store.counters["corrupt"], tier.values) == (1, {})


@pytest.mark.parametrize("codec", ["none", "zlib"])
@pytest.mark.parametrize("lost", [1, 40, 900])
def test_a_truncated_value_is_damage_though_older_bytes_complete_it(codec: str, lost: int) -> None:
    """The tier lost its end, and the place still holds it from before; so it is for packed bytes, too."""
    tier, value = MemoryTier(), os.urandom(1000) + bytes(2000)
    store = store_of(tier, codec)
    store.put(K[:1], [memoryview(value)])
    whole = tier.values[K[0]]
    tier.values[K[0]] = whole[:-lost]
    place = bytearray(whole[HEADER_BYTES:].ljust(len(value), b"\0"))
    assert store.get(K[:1], [memoryview(place)]) == [False]
    assert (store.counters["corrupt"], tier.values) == (1, {}), "counted, and not found again"


def test_a_tier_that_does_not_tell_the_length_is_refused() -> None:
    class Old(MemoryTier):
        def get_into(
            self, keys: Sequence[PackedKey], parts: Sequence[Sequence[memoryview]], *, deadline: float
        ) -> list[int | Outcome]:
            super().get_into(keys, parts, deadline=deadline)
            return [Outcome.FOUND] * len(keys)

    store = store_of(Old({K[0]: in_envelope(K[0], b"value")}))
    with pytest.raises(TierError, match="how many bytes it received"):
        read(store, K[0], 5)


@pytest.mark.parametrize("outcome", [Outcome.FAILED, Outcome.DAMAGED])
def test_what_failed_stays_and_what_is_damaged_is_deleted(outcome: Outcome) -> None:
    class Answering(MemoryTier):
        def get_into(
            self, keys: Sequence[PackedKey], parts: Sequence[Sequence[memoryview]], *, deadline: float
        ) -> list[int | Outcome]:
            return [outcome] * len(keys)

    tier = Answering({K[0]: in_envelope(K[0], b"value")})
    store = store_of(tier)
    assert read(store, K[0], 5) is None
    assert (K[0] in tier.values) == (outcome is Outcome.FAILED)
    assert store.counters["corrupt"] == (outcome is Outcome.DAMAGED)
    assert store.counters["read_failed"] == (outcome is Outcome.FAILED)
    assert store.counters["misses"] == 0, "missing is another answer"


def test_damage_that_shows_without_reading_is_deleted_too() -> None:
    class Answering(MemoryTier):
        def contains(self, keys: Sequence[PackedKey], *, deadline: float) -> list[Outcome]:
            return [Outcome.DAMAGED, Outcome.FOUND, Outcome.FAILED]

    tier = Answering(dict.fromkeys(K[:3], b"value"))
    store = store_of(tier)
    assert store.contains(K[:3]) == [False, True, False]
    assert (list(tier.values), store.counters["corrupt"]) == (K[1:3], 1)


def test_without_a_codec_no_second_copy_of_an_object_is_made() -> None:
    """The tier of this test keeps a copy; what is measured is what the store itself needs."""

    class Nowhere(MemoryTier):
        def put(
            self, keys: Sequence[PackedKey], parts: Sequence[Sequence[memoryview]], *, deadline: float
        ) -> list[Outcome]:
            return [Outcome.STORED] * len(keys)

    store = store_of(Nowhere())
    arena = memoryview(bytearray(64 << 20))
    values = [arena[first : first + (4 << 20)] for first in range(0, len(arena), 4 << 20)]
    tracemalloc.start()
    try:
        store.put(K[: len(values)], values)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 1 << 20


class Faulty(Zlib):
    """Fails in its own way on what begins with a 0."""

    def encode(self, data: memoryview) -> Sequence[memoryview]:
        if data[0] == 0:
            raise RuntimeError("a bug in the plugin")
        return super().encode(data)

    def decode_into(self, packed: memoryview, out: memoryview) -> None:
        super().decode_into(packed, out)
        if out[0] == 1:
            raise RuntimeError("a bug in the plugin")


def test_a_codec_that_fails_costs_nothing_but_its_own_value(caplog: pytest.LogCaptureFixture) -> None:
    tier = MemoryTier()
    store = L2Store(tier, timeout_s=5.0, codec="zlib", codecs=CodecTable({"zlib": Faulty}))
    values = [bytes([first]) * 4000 for first in range(3)]
    assert store.put(K[:3], [memoryview(value) for value in values]) == [True] * 3
    places = [memoryview(bytearray(4000)) for _ in values]
    assert store.get(K[:3], places) == [True, False, True]
    assert [bytes(places[0]), bytes(places[2])] == [values[0], values[2]]
    assert set(tier.values) == set(K[:3]), "a bug of the codec says nothing about the value"
    assert store.counters["codec_failed"] == 1
    assert caplog.text.count("a bug in the plugin") == 2


# room


class Disk(MemoryTier):
    """Knows its capacity, and what was used when."""

    has = frozenset({"scan", "usage"})

    def __init__(self, capacity: int) -> None:
        super().__init__()
        self.capacity = capacity
        self.scans = 0

    def usage(self, *, deadline: float) -> TierUsage:
        return TierUsage(sum(map(len, self.values.values())), self.capacity)

    def scan(self, *, deadline: float) -> Iterator[TierEntry]:
        self.scans += 1
        for number, (key, value) in enumerate(self.values.items()):
            yield TierEntry(key, len(value), float(number))


def test_a_full_tier_loses_what_was_used_longest_ago() -> None:
    tier = Disk(10_000)
    store = store_of(tier, watermarks=Watermarks(0.9, 0.5))
    value = bytes(1000 - HEADER_BYTES)
    for key in K[:9]:
        store.put([key], [memoryview(value)])
    assert tier.scans == 0, "there was room"
    store.put(K[9:10], [memoryview(value)])
    assert list(tier.values) == K[5:10], "down to the low watermark, the new one included"
    assert (tier.scans, store.counters["evicted"]) == (1, 5)
    store.check()
    assert store.status()["usage"] == {"used_bytes": 5000, "capacity_bytes": 10_000}


def test_one_writer_makes_space_and_others_write_meanwhile() -> None:
    class Slow(Disk):
        def scan(self, *, deadline: float) -> Iterator[TierEntry]:
            if not self.scans:
                yield from super().scan(deadline=deadline)
                assert store.put(K[11:12], [value]) == [True], "into what is above the watermark"

    tier = Slow(10_000)
    store = store_of(tier, watermarks=Watermarks(0.9, 0.5))
    value = memoryview(bytes(900 - HEADER_BYTES))
    for key in K[:10]:
        assert store.put([key], [value]) == [True]
    assert tier.scans == 0
    assert store.put(K[10:11], [value]) == [True]
    assert list(tier.values) == [*K[6:10], K[11], K[10]]
    assert (tier.scans, store.counters["evicted"]) == (1, 6)


def test_a_codec_gives_flat_bytes_to_the_tier() -> None:
    class Shaped(Zlib):
        def encode(self, data: memoryview) -> Sequence[memoryview]:
            packed = b"".join(super().encode(data)).ljust(64, b"\0")
            return [memoryview(packed).cast("c", (2, len(packed) // 2))]

    class Strict(MemoryTier):
        def put(
            self, keys: Sequence[PackedKey], parts: Sequence[Sequence[memoryview]], *, deadline: float
        ) -> list[Outcome]:
            assert all((part.format, part.ndim) == ("B", 1) for each in parts for part in each)
            return super().put(keys, parts, deadline=deadline)

    tier = Strict()
    store = L2Store(tier, timeout_s=5.0, codec="zlib", codecs=CodecTable({"zlib": Shaped}))
    assert store.put(K[:1], [memoryview(bytes(5000))]) == [True]
    assert len(tier.values[K[0]]) == HEADER_BYTES + 64


def test_a_tier_that_fails_to_make_room_fails_the_write() -> None:
    class Broken(Disk):
        def scan(self, *, deadline: float) -> Iterator[TierEntry]:
            raise TierError("cannot list")

    tier = Broken(1000)
    store = store_of(tier)
    with pytest.raises(TierError, match="cannot list"):
        store.put(K[:2], [memoryview(bytes(600)), memoryview(bytes(600))])
    assert not tier.values


def test_what_a_tier_can_never_hold_pushes_nothing_out() -> None:
    tier = Disk(10_000)
    store = store_of(tier)
    store.put(K[:4], [memoryview(bytes(2000))] * 4)
    tier.refused.add(K[4])
    assert store.put(K[4:5], [memoryview(bytes(20_000))]) == [False]
    assert list(tier.values) == K[:4]


entries = st.lists(
    st.builds(TierEntry, st.sampled_from(K), st.integers(0, 50), st.integers(0, 5).map(float)), max_size=20
)


@given(entries, st.integers(1, 400))
def test_without_tenants_the_victims_are_a_smallest_beginning_by_age(found: list[TierEntry], nbytes: int) -> None:
    numbered = [TierEntry(bytes([index]) * 72, entry.nbytes, entry.used_at) for index, entry in enumerate(found)]
    chosen = victims(numbered, nbytes, 1000, Shares())
    by_key = {entry.key: entry for entry in numbered}
    picked = [by_key[key] for key in chosen]
    left = [entry for entry in numbered if entry.key not in set(chosen)]
    assert [entry.used_at for entry in picked] == sorted(entry.used_at for entry in picked)
    assert not left or not picked or picked[-1].used_at <= min(entry.used_at for entry in left)
    total = sum(entry.nbytes for entry in picked)
    assert total >= nbytes or not left
    assert not picked or total - picked[-1].nbytes < nbytes


def entry(tenant: int, number: int, nbytes: int, used_at: float) -> TierEntry:
    return TierEntry(bytes([tenant, number]) * 36, nbytes, used_at)


def chosen_of(found: list[TierEntry], nbytes: int, least: list[float], most: list[float]) -> list[tuple[int, int]]:
    shares = Shares(lambda key: key[0], least, most)
    return [(key[0], key[1]) for key in victims(found, nbytes, 100, shares)]


# Tenant 1 has 60 of 100 bytes, all older than the 30 of tenant 2.
SHARED = [entry(1, number, 10, float(number)) for number in range(6)] + [
    entry(2, number, 10, 10.0 + number) for number in range(3)
]


@pytest.mark.parametrize(
    ("least", "most", "expected"),
    [
        ([0, 0, 0], [1, 1, 1], [(1, 0), (1, 1), (1, 2)]),
        # What tenant 2 has beyond its most goes first, though it is younger.
        ([0, 0, 0], [1, 1, 0.15], [(2, 0), (2, 1), (1, 0)]),
        # Tenant 1 keeps half of the tier while tenant 2 has anything.
        ([0, 0.5, 0], [1, 1, 1], [(1, 0), (2, 0), (2, 1)]),
        # Room is made also where all is guaranteed.
        ([0, 0.6, 0.3], [1, 1, 1], [(1, 0), (1, 1), (1, 2)]),
    ],
)
def test_the_shares_of_tenants(least: list[float], most: list[float], expected: list[tuple[int, int]]) -> None:
    assert chosen_of(SHARED, 30, least, most) == expected


@given(
    st.lists(st.tuples(st.integers(0, 2), st.integers(0, 20), st.integers(0, 5).map(float)), max_size=25),
    st.integers(1, 200),
    st.lists(st.sampled_from([0.0, 0.1, 0.3]), min_size=3, max_size=3),
)
def test_room_is_made_and_least_shares_go_last(
    found: list[tuple[int, int, float]], nbytes: int, least: list[float]
) -> None:
    numbered = [entry(tenant, number, size, used) for number, (tenant, size, used) in enumerate(found)]
    sizes = {(each.key[0], each.key[1]): each.nbytes for each in numbered}
    chosen = chosen_of(numbered, nbytes, least, [1.0, 1.0, 1.0])
    assert len(set(chosen)) == len(chosen)
    assert sum(sizes[each] for each in chosen) >= min(nbytes, sum(sizes.values()))
    left = [sum(size for key, size in sizes.items() if key[0] == tenant and key not in chosen) for tenant in range(3)]
    had = [sum(size for key, size in sizes.items() if key[0] == tenant) for tenant in range(3)]
    if any(left[tenant] < min(had[tenant], least[tenant] * 100) - 20 for tenant in range(3)):
        assert all(left[tenant] <= least[tenant] * 100 for tenant in range(3))


def test_what_a_tier_does_not_have_is_a_miss_also_if_it_is_only_asked_for() -> None:
    tier = MemoryTier()
    store = store_of(tier)
    store.put(K[:1], [memoryview(b"value")])
    assert store.contains(K[:3]) == [True, False, False]
    assert (store.counters["hits"], store.counters["misses"]) == (0, 2)
    assert read(store, K[0], 5) == b"value"
    assert (store.counters["hits"], store.counters["misses"]) == (1, 2)


def test_why_values_are_not_stored_is_known_at_once_and_ends_with_a_write() -> None:
    class Full(MemoryTier):
        why: Sequence[str] = ()
        full = True

        def put(
            self, keys: Sequence[PackedKey], parts: Sequence[Sequence[memoryview]], *, deadline: float
        ) -> list[Outcome]:
            return [Outcome.FAILED] * len(keys) if self.full else super().put(keys, parts, deadline=deadline)

        def problems(self) -> Sequence[str]:
            return self.why if self.full else ()

    tier = Full()
    store = store_of(tier)
    assert store.put(K[:1], [memoryview(b"value")]) == [False]
    assert store.status()["problems"] == []
    assert store.status()["last_error"] == "the tier does not say why"
    tier.why = ["/mnt/kv: No space left on device"]
    assert store.put(K[:1], [memoryview(b"value")]) == [False]
    assert store.status()["problems"] == ["/mnt/kv: No space left on device"]
    assert store.status()["last_error"] == "/mnt/kv: No space left on device"
    tier.full = False
    assert store.put(K[:1], [memoryview(b"value")]) == [True]
    assert store.status()["problems"] == []
