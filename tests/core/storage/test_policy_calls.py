"""What the eviction policy learns of requests, when it is asked, and that it may refuse."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
import pytest

from kvframework.api.eviction import EvictionPolicy, PackedKey, RequestFacts, Why
from kvframework.api.keys import SALT_BYTES
from kvframework.storage.l1.entries import ALIGNMENT
from kvframework.storage.l1.eviction import Tenant
from kvframework.storage.l1.eviction_statistics import Cause
from kvframework.storage.l1.leases import PromptPart
from kvframework.storage.manager import StorageManager
from kvframework.storage.table import Table
from tests.core.storage.memory import ClockedTable, OrderedLru, PlainMemory, packed_key

K = [packed_key(number) for number in range(40)]
# By tenant.
OF = [[packed_key(number, salt=bytes([tenant]) * SALT_BYTES) for number in range(100)] for tenant in range(3)]


class Told(OrderedLru):
    """An LRU that writes down its calls, and wants `most` objects of a request."""

    def __init__(self, most: int = 1000) -> None:
        super().__init__()
        self.calls: list[tuple[Any, ...]] = []
        self.most = most
        self.walks = 0

    def victims(self) -> Iterator[PackedKey]:
        self.walks += 1
        return iter(self.order)

    def admits(
        self, keys: Sequence[PackedKey], sizes: Sequence[int], chunks: Sequence[int], facts: RequestFacts
    ) -> int:
        self.calls.append(("admits", list(keys), list(sizes), list(chunks), facts))
        return self.most

    def on_inserts(
        self, keys: Sequence[PackedKey], sizes: Sequence[int], chunks: Sequence[int], facts: RequestFacts
    ) -> None:
        self.calls.append(("inserts", list(keys), list(sizes), list(chunks), facts))
        super().on_inserts(keys, sizes, chunks, facts)

    def on_uses(self, keys: Sequence[PackedKey], facts: RequestFacts) -> None:
        self.calls.append(("uses", list(keys), facts))
        super().on_uses(keys, facts)

    def on_removes(self, keys: Sequence[PackedKey], why: Why) -> None:
        self.calls.append(("removes", list(keys), why))
        super().on_removes(keys, why)

    def last(self) -> list[tuple[Any, ...]]:
        calls, self.calls = self.calls, []
        return calls


def table_of(policy: EvictionPolicy, units: int, **named: Any) -> ClockedTable:
    return ClockedTable(policy, nbytes=units * ALIGNMENT, **named)


def table_with_tenants(policies: Sequence[EvictionPolicy], units: int) -> ClockedTable:
    """Tenant 1 has at most three quarters, and a quarter of its own; tenant 2 a quarter of its own."""
    first, second = (
        Tenant(f"t{number}", units // 4 * ALIGNMENT, most, policy)
        for number, most, policy in ((1, units * 3 // 4 * ALIGNMENT, policies[1]), (2, units * ALIGNMENT, policies[2]))
    )
    table = table_of(policies[0], units, tenants=[first, second])
    for tenant in (1, 2):
        table.tenants.learn(bytes([tenant]) * SALT_BYTES, tenant)
    return table


def store(table: ClockedTable, keys: Sequence[PackedKey], now: float = 0.0, **named: Any) -> int:
    """The number of objects that were dropped."""
    items = [(key, ALIGNMENT) for key in keys]
    result = table.reserve(items, owner=1, request_id="r1", **named)
    if result.lease is not None:
        table.now = now
        table.commit(result.lease.id, owner=1)
    return result.dropped


def test_a_policy_learns_what_a_request_is() -> None:
    policy = Told()
    table = table_of(policy, 4)
    table.prices = 1e-4, 1e-9
    store(table, K[:3], now=7.0, prompt=PromptPart((5, 6, 7), 256))
    facts = RequestFacts(use="store", at=0.0, request_id="r1", chunk_tokens=256, compute_s=1e-4, load_s=1e-9)
    later = msgspec.structs.replace(facts, at=7.0, held=3 * ALIGNMENT)
    assert policy.last() == [
        ("admits", K[:3], [ALIGNMENT] * 3, [5, 6, 7], facts),
        ("inserts", K[2::-1], [ALIGNMENT] * 3, [7, 6, 5], later),
    ]
    lease = table.pin(K[:2], owner=1, request_id="r2", use="retrieve")
    assert lease is not None
    ((call, keys, used),) = policy.last()
    assert (call, keys, used.use, used.request_id, used.at) == ("uses", K[1::-1], "retrieve", "r2", 7.0)


def test_a_store_of_what_is_there_is_a_use_by_the_request() -> None:
    policy = Told()
    table = table_of(policy, 4)
    store(table, K[:2])
    policy.last()
    store(table, K[:3], prompt=PromptPart((0, 1, 2), 16))
    admitted, inserted, used = policy.last()
    assert (admitted[1], admitted[3]) == ([K[2]], [2])
    assert (inserted[1], inserted[3]) == ([K[2]], [2])
    assert (used[0], used[1], used[2].use) == ("uses", K[1::-1], "store")


def test_it_learns_why_an_object_left() -> None:
    policy = Told()
    table = table_of(policy, 3)
    store(table, K[:3])
    policy.last()
    store(table, K[3:5])
    assert [call for call in policy.last() if call[0] == "removes"] == [("removes", [K[2], K[1]], "evicted")]
    table.drop(K[:1], Cause.DAMAGED)
    table.drop_unused(table.objects()[:1])
    table.drop(list(policy.order), Cause.WATERMARK)
    assert [(call[0], call[2]) for call in policy.last()] == [
        ("removes", "removed"),
        ("removes", "cleared"),
        ("removes", "evicted"),
    ]


@pytest.mark.parametrize("named", [False, True])
def test_a_tenants_policy_hears_of_its_own_objects(named: bool) -> None:
    everyones, theirs = Told(), Told()
    table = table_of(everyones, 8, tenants=[Tenant("ours", 0, 8 * ALIGNMENT, theirs)])
    if named:
        table.tenants.learn(bytes(16), 1)
    store(table, K[:2])
    mine, other = (theirs, everyones) if named else (everyones, theirs)
    assert [call[0] for call in mine.calls] == ["admits", "inserts"]
    assert mine.calls[1][4].tenant == ("ours" if named else "")
    assert not other.calls


@pytest.mark.parametrize("most", [0, 1, 2, 3, 9])
def test_a_policy_may_refuse_the_end_of_a_request(most: int) -> None:
    policy = Told()
    table = table_of(policy, 8)
    store(table, K[:1])
    policy.most = most
    assert store(table, [K[0], *K[4:7]]) == 3 - min(most, 3)
    assert [key in table for key in K[4:7]] == [index < most for index in range(3)]


def test_what_the_policy_refused_is_explained() -> None:
    storage = StorageManager(Table(PlainMemory(8 * ALIGNMENT), Told(1), ghosts=64), threads=False)
    items = [(key, ALIGNMENT) for key in K[:3]]
    result = storage.table.reserve(items, owner=1, lease_s=None)
    assert (result.dropped, result.refused, result.over_share) == (2, True, False)
    ghosts = [storage.table.absent(key, 0)[0] for key in K[:3]]
    assert [ghost and ghost.cause for ghost in ghosts] == [None, Cause.REFUSED, Cause.REFUSED]
    storage.close()


def test_the_victims_are_asked_for_once_a_store() -> None:
    policy = Told()
    table = table_of(policy, 20)
    store(table, K[:20])
    policy.last()
    store(table, K[20:35])
    assert policy.walks == 1
    assert [call[0] for call in policy.last()] == ["admits", "removes", "inserts"]


def test_the_victims_of_each_tenant_are_asked_for_once_a_store() -> None:
    """The store takes from others first, and then from its own."""
    policies = [Told(), Told(), Told()]
    table = table_with_tenants(policies, 20)
    for tenant in range(3):
        store(table, OF[tenant][:6])
    assert store(table, OF[1][10:25]) == 0
    assert [policy.walks for policy in policies] == [1, 1, 1]
    assert all(sum(call[0] == "removes" for call in policy.last()) == 1 for policy in policies)


class Breaks(Told):
    def victims(self) -> Iterator[PackedKey]:
        for number, key in enumerate(self.order):
            if number == 2:
                raise RuntimeError("a bug")
            yield key


def test_a_walk_that_raises_leaves_policy_and_table_agreed() -> None:
    policy = Breaks()
    table = table_of(policy, 6)
    store(table, K[:6])
    with pytest.raises(RuntimeError, match="a bug"):
        store(table, K[6:12])
    assert set(policy.order) == {stored.key for stored in table.objects()}
    assert (len(table), table.used_bytes, table.allocator.free_bytes) == (4, 4 * ALIGNMENT, 2 * ALIGNMENT)


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("shared", [False, True])
def test_one_walk_evicts_what_many_walks_would(seed: int, shared: bool) -> None:
    """Mixed sizes, so that windows are searched and victims are put back."""
    results = []
    for together in (True, False):
        chance = random.Random(seed)
        policies = [Told() for _ in range(3)]
        table = table_with_tenants(policies, 60) if shared else table_of(policies[0], 60)
        sizes = [chance.choice([1, 1, 2, 3, 7]) * ALIGNMENT for _ in range(120)]
        keys = [OF[chance.randrange(3)][number] for number in range(80)]
        keys += OF[chance.randrange(3)][80:92]
        for number in range(80):
            result = table.reserve([(keys[number], sizes[number])], owner=1)
            if result.lease is not None:
                table.now = float(number)
                table.commit(result.lease.id, owner=1)
        pinned = chance.sample(sorted(stored.key for stored in table.objects()), 3)
        assert table.pin(pinned, owner=2, use=None) is not None
        items = list(zip(keys[80:], sizes[80:92], strict=True))
        if together:
            placed = [offset for _, offset in table.reserve(items, owner=1).placed]
        else:
            placed = []
            for item in items:
                result = table.reserve([item], owner=1)
                if not result.placed:
                    break
                placed.append(result.placed[0][1])
        left = [[key for call in policy.calls if call[0] == "removes" for key in call[1]] for policy in policies]
        assert placed
        assert any(left)
        results.append((placed, left))
    assert results[0] == results[1]
