"""The object table, example by example: what each promise of its docstring means."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest

from kvframework.api.keys import PackedKey
from kvframework.errors import LeaseUnknown, RequestError
from kvframework.storage.l1.entries import ALIGNMENT
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
