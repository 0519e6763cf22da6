"""The object table, example by example: what each promise of its docstring means. The allocator: ranges never overlap,
neighbours merge, and what it says of its free bytes is true."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvframework.api.keys import PackedKey
from kvframework.errors import LeaseUnknown, RequestError
from kvframework.storage.l1.entries import ALIGNMENT, RangeAllocator, rounded
from kvframework.storage.l1.leases import INTERNAL_OWNER, MAX_LEASES_PER_OWNER, WriteLease
from tests.core.storage.memory import ClockedTable, OrderedLru, packed_key

K = [packed_key(number) for number in range(12)]


def make_table(units: int = 4, policy: OrderedLru | None = None) -> ClockedTable:
    return ClockedTable(policy or OrderedLru(), nbytes=units * ALIGNMENT)


def reserve(table: ClockedTable, keys: list[PackedKey], *, owner: int = 1, lease_s: float | None = None) -> WriteLease:
    lease = table.reserve([(key, 1) for key in keys], owner=owner, request_id="r", lease_s=lease_s).lease
    assert lease is not None
    return lease


def store(table: ClockedTable, keys: list[PackedKey]) -> None:
    assert len(table.commit(reserve(table, keys).id, owner=1)) == len(keys)


def test_a_use_keeps_an_object_and_a_pin_without_use_does_not() -> None:
    for use, survivor in (("lookup", K[0]), (None, K[1])):
        table = make_table(units=2)
        store(table, K[:1])
        store(table, K[1:2])
        lease = table.pin(K[:1], owner=1, use=use)
        table.unpin(lease.id, owner=1)
        store(table, K[2:3])
        assert survivor in table


def test_a_client_can_not_hold_leases_without_bound() -> None:
    table = make_table()
    store(table, K[:1])
    for _ in range(MAX_LEASES_PER_OWNER):
        assert table.pin(K[:1], owner=1)
    with pytest.raises(RequestError):
        table.pin(K[:1], owner=1)
    with pytest.raises(RequestError):
        table.reserve([(K[1], 1)], owner=1, client=1)
    assert table.pin(K[:1], owner=2)
    assert table.end_owner(1) == MAX_LEASES_PER_OWNER
    assert table.pins == 1


def test_a_client_can_not_hold_pins_without_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its end would unpin all of them at once."""
    monkeypatch.setattr("kvframework.storage.l1.leases.MAX_PINS_PER_OWNER", 10)
    table = make_table()
    store(table, K[:4])
    first = table.pin(K[:4], owner=1, lease_s=5.0)
    second = table.pin(K[:4], owner=1)
    assert first is not None
    assert second is not None
    with pytest.raises(RequestError, match="pin 12 objects"):
        table.pin(K[:4], owner=1)
    assert table.pin(K[:4], owner=2)
    assert table.pin(K[:4] * 3, owner=INTERNAL_OWNER)
    table.now = 5.0
    table.expire()
    assert table.pin(K[:4], owner=1), "what has lapsed does not count"
    table.now = 6.0
    with pytest.raises(LeaseUnknown):
        table.unpin(first.id, owner=1)
    with pytest.raises(RequestError):
        table.pin(K[:4], owner=1)
    table.unpin(second.id, owner=1)
    assert table.pin(K[:4], owner=1)


def test_pins_lapse_so_many_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tick never unpins all that a thousand lookups pinned. Asked for, a lease has lapsed at its deadline."""
    monkeypatch.setattr("kvframework.storage.l1.objects.UNPIN_AT_ONCE", 3)
    table = make_table()
    store(table, K[:2])
    leases = [table.pin(K[:2], owner=1, lease_s=5.0) for _ in range(5)]
    assert leases[4] is not None
    left = []
    for _ in range(3):
        table.now = 5.0
        table.expire()
        left.append(table.pins)
    assert left == [6, 2, 0]
    late = table.pin(K[:2], owner=1, lease_s=1.0)
    assert late is not None
    table.now = 6.0
    with pytest.raises(LeaseUnknown):
        table.pinned(late.id, owner=1)


def test_a_withdrawn_writer_may_still_write_and_harms_nobody() -> None:
    table = make_table()
    mine = table.reserve([(K[0], 1)], owner=1, request_id="a")
    assert mine.lease is not None
    assert table.cancel(1, "a") == 1
    assert table.cancel(1, "a") == 0
    other = table.reserve([(K[0], 1)], owner=2)
    assert other.placed != mine.placed, "the range stays the cancelled writer's"
    assert table.quarantined_bytes > 0
    assert table.commit(mine.lease.id, owner=1) == []
    assert table.quarantined_bytes == 0
    assert table.quarantines == 0, "no writer was late"


class Failing(OrderedLru):
    def victims(self) -> Iterator[PackedKey]:
        raise RuntimeError("a broken policy")


def test_a_policy_that_raises_leaves_nothing_reserved() -> None:
    table = make_table(units=2, policy=Failing())
    store(table, K[:1])
    with pytest.raises(RuntimeError):
        table.reserve([(key, 1) for key in K[:3]], owner=1)
    assert (table.used_bytes, table.pins, table.write_leases) == (ALIGNMENT, 0, 0)
    assert not table.any_writing(K)
    store(table, K[1:2])


class Forgetful(OrderedLru):
    def victims(self) -> Iterator[PackedKey]:
        return iter([K[11], *self.order])


def test_a_policy_that_raises_takes_no_pin_of_others() -> None:
    class Broken(OrderedLru):
        broken = False

        def on_access_many(self, keys: Sequence[PackedKey]) -> None:
            if self.broken:
                raise RuntimeError("a bug")
            super().on_access_many(keys)

    table = make_table(policy=(policy := Broken()))
    keys = [packed_key(0)]
    store(table, keys)
    held = table.pin(keys, owner=1)
    assert held is not None
    policy.broken = True
    with pytest.raises(RuntimeError):
        table.pin(keys, owner=2, lease_s=1.0)
    table.now = 2.0
    table.expire()
    assert table.pins == 1
    assert not table.drop([keys[0]]), "it is being read"
    table.now = 2.0
    table.unpin(held.id, owner=1)
    assert table.drop([keys[0]])


def test_a_policy_that_offers_a_key_that_is_not_here_does_no_harm() -> None:
    table = make_table(units=1, policy=Forgetful())
    store(table, K[:1])
    store(table, K[1:2])
    assert K[1] in table


UNIT = ALIGNMENT

# None frees one that is held (which, by the second number); a number is a size to allocate; a bool grows the arena.
Steps = list[tuple[str, int]]
steps = st.lists(
    st.one_of(
        st.tuples(st.just("allocate"), st.integers(1, 6 * UNIT)),
        st.tuples(st.just("free"), st.integers(0, 1 << 16)),
        st.tuples(st.just("take"), st.integers(0, 40)),
        st.tuples(st.just("grow"), st.integers(0, 40 * UNIT)),
    ),
    max_size=80,
)


def free_runs(limit: int, held: dict[int, int]) -> list[int]:
    """Lengths of the maximal free runs, worked out unit by unit."""
    taken = {unit for offset, size in held.items() for unit in range(offset // UNIT, (offset + rounded(size)) // UNIT)}
    runs, run = [], 0
    for unit in range(limit // UNIT + 1):
        if unit < limit // UNIT and unit not in taken:
            run += UNIT
        elif run:
            runs.append(run)
            run = 0
    return sorted(runs)


@given(steps)
def test_behaves_like_a_map_of_units(script: Steps) -> None:
    allocator = RangeAllocator()
    held: dict[int, int] = {}
    limit = 0
    for action, number in script:
        if action == "grow":
            allocator.grow(number)
            limit = max(limit, number - number % UNIT)
        elif action == "free" and held:
            offset = sorted(held)[number % len(held)]
            allocator.free(offset, held.pop(offset))
        elif action == "take":
            start, end = number * UNIT, (number + 7) * UNIT
            taken = dict(allocator.take(start, end))
            assert all(start <= offset and offset + length <= end for offset, length in taken.items())
            free_before = sum(free_runs(limit, held))
            held |= taken
            assert sum(free_runs(limit, held)) == free_before - sum(taken.values())
            outside = {limit: UNIT * 99, start: min(end, limit) - start} if start < limit else {}
            assert free_runs(limit, held | outside) == free_runs(limit, held)
        elif action == "allocate":
            before = free_runs(limit, held)
            found = allocator.allocate(number)
            fitting = [run for run in before if run >= rounded(number)]
            assert (found is None) == (not fitting)
            if found is not None:
                offset = found
                assert offset % ALIGNMENT == 0
                assert 0 <= offset <= limit - rounded(number)
                for other, size in held.items():
                    assert offset + rounded(number) <= other or other + rounded(size) <= offset
                held[offset] = number
                # Best fit: the run that was cut is the smallest that was large enough.
                left = list(before)
                left.remove(fitting[0])
                expected = sorted([*left, fitting[0] - rounded(number)])
                assert [run for run in expected if run] == free_runs(limit, held)
        runs = free_runs(limit, held)
        assert allocator.limit == limit
        assert allocator.free_bytes == sum(runs) == limit - sum(map(rounded, held.values()))
        assert allocator.largest_free == max(runs, default=0)
        assert 0.0 <= allocator.fragmentation < 1.0
        assert (allocator.fragmentation == 0.0) == (len(runs) <= 1)
    for offset, size in held.items():
        allocator.free(offset, size)
    assert allocator.free_bytes == allocator.largest_free == limit
    assert allocator.allocate(limit) == (0 if limit else None)


@pytest.mark.parametrize(("nbytes", "units"), [(0, 1), (1, 1), (UNIT, 1), (UNIT + 1, 2)])
def test_sizes_are_rounded_up_to_whole_units(nbytes: int, units: int) -> None:
    assert rounded(nbytes) == units * UNIT
