"""The faults of a tier: each kind takes place, follows its seed, and ends."""

from __future__ import annotations

import time

import pytest

from kvf_dev.testing.faults import TIER_FAULTS, FaultyTier
from kvframework.api.tier import Outcome, Tier
from kvframework.errors import TierError
from tests.dev.kits.memory_tier import MemoryTier, Store

KEY = b"k" * 72
VALUE = bytes(range(256)) * 20


def soon() -> float:
    return time.monotonic() + 20.0


def put(tier: Tier, value: bytes = VALUE) -> list[Outcome]:
    half = memoryview(value)[: len(value) // 2], memoryview(value)[len(value) // 2 :]
    return tier.put([KEY], [list(half)], deadline=soon())


def get(tier: Tier, nbytes: int = len(VALUE)) -> tuple[int | Outcome, bytes]:
    out = bytearray(nbytes)
    parts = [memoryview(out)[:1000], memoryview(out)[1000:]]
    return tier.get_into([KEY], [parts], deadline=soon())[0], bytes(out)


@pytest.fixture
def inner() -> MemoryTier:
    return MemoryTier(Store())


def test_without_faults_a_faulty_tier_is_the_tier(inner: MemoryTier) -> None:
    tier = FaultyTier(inner, 1, rate=1.0)
    tier.stop()
    assert tier.name == inner.name
    assert put(tier) == [Outcome.STORED]
    assert get(tier) == (len(VALUE), VALUE)
    assert tier.contains([KEY], deadline=soon()) == [Outcome.FOUND]
    tier.touch([KEY], deadline=soon())
    tier.ping(deadline=soon())
    assert tier.usage(deadline=soon()) == inner.usage(deadline=soon())
    assert [entry.nbytes for entry in tier.scan(deadline=soon())] == [len(VALUE)]
    assert tier.delete([KEY], deadline=soon()) == [Outcome.DELETED]
    assert not +tier.injected
    tier.close()
    assert inner.closed


def test_a_read_flips_one_bit(inner: MemoryTier) -> None:
    put(inner)
    outcome, found = get(FaultyTier(inner, 2, ("flip",), rate=1.0))
    assert outcome == len(VALUE)
    assert sum((one ^ other).bit_count() for one, other in zip(found, VALUE, strict=True)) == 1


def test_a_stored_value_has_one_bit_flipped(inner: MemoryTier) -> None:
    assert put(FaultyTier(inner, 2, ("flip",), rate=1.0)) == [Outcome.STORED]
    found = inner.store.values[KEY].data
    assert sum((one ^ other).bit_count() for one, other in zip(found, VALUE, strict=True)) == 1


def test_a_short_read_leaves_the_rest_as_it_was(inner: MemoryTier) -> None:
    value = b"\x01" * len(VALUE)
    put(inner, value)
    for seed in range(5):
        read, found = get(FaultyTier(inner, seed, ("short",), rate=1.0))
        assert isinstance(read, int)
        assert read < len(value)
        assert found == b"\x01" * read + bytes(len(value) - read)


def test_a_short_write_is_said_to_be_whole(inner: MemoryTier) -> None:
    assert put(FaultyTier(inner, 3, ("short",), rate=1.0)) == [Outcome.STORED]
    found = inner.store.values[KEY].data
    assert len(found) < len(VALUE)
    assert VALUE.startswith(found)


def test_a_lost_value_is_missing_or_never_stored(inner: MemoryTier) -> None:
    tier = FaultyTier(inner, 4, ("lost",), rate=1.0)
    assert put(tier) == [Outcome.STORED]
    assert not inner.store.values
    put(inner)
    assert get(tier)[0] is Outcome.MISSING
    assert tier.contains([KEY], deadline=soon()) == [Outcome.MISSING]


def test_a_refused_call_does_nothing(inner: MemoryTier) -> None:
    tier = FaultyTier(inner, 5, ("refused",), rate=1.0)
    with pytest.raises(TierError, match="refused by the test"):
        put(tier)
    assert not inner.store.values


def test_a_slow_call_takes_its_time(inner: MemoryTier) -> None:
    started = time.monotonic()
    put(FaultyTier(inner, 6, ("slow",), rate=1.0, slow_s=0.05))
    assert time.monotonic() - started >= 0.05


def test_the_same_seed_makes_the_same_faults() -> None:
    def faults(seed: int) -> list[object]:
        tier = FaultyTier(MemoryTier(Store()), seed, [kind for kind in TIER_FAULTS if kind != "slow"])
        seen: list[object] = []
        for _ in range(60):
            for call in (put, get):
                try:
                    seen.append(call(tier))
                except TierError as error:
                    seen.append(str(error))
        return [*seen, dict(tier.injected)]

    assert faults(1) == faults(1)
    assert faults(1) != faults(2)


def test_there_is_no_other_fault(inner: MemoryTier) -> None:
    with pytest.raises(ValueError, match="no such fault: melt"):
        FaultyTier(inner, 1, ("melt",))


def test_every_fault_is_described() -> None:
    assert all(len(meaning) > 20 for meaning in TIER_FAULTS.values())
