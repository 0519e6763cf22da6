"""Tenants' shares of L1: never more than the most, what is guaranteed is never evicted by others, and a noisy neighbour
costs little."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import accumulate

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvframework.api.keys import PackedKey
from kvframework.storage.l1.entries import ALIGNMENT, rounded
from kvframework.storage.l1.eviction import MAX_SALTS, Tenant, Tenants
from kvframework.storage.l1.eviction_statistics import Cause
from kvframework.storage.l1.leases import Reservation
from tests.core.storage.memory import ClockedTable, OrderedLru, content, packed_key
from tests.core.storage.node import SIZE, MakeNode
from tests.core.storage.tier import MemoryTier, in_envelope

UNITS = 14
# In units: least and most of the tenants 1 and 2; 0 is everyone else.
SHARES = ((0, UNITS), (4, 7), (5, UNITS))
SIZES = [1, ALIGNMENT, 2 * ALIGNMENT, 3 * ALIGNMENT]
tenants = st.integers(0, len(SHARES) - 1)


def salt(tenant: int) -> bytes:
    return bytes([tenant]) * 16


def key_of(tenant: int, number: int) -> PackedKey:
    return packed_key(number, salt=salt(tenant))


def named(shares: Sequence[tuple[int, int]] = SHARES[1:]) -> list[Tenant]:
    return [
        Tenant(f"t{number}", least * ALIGNMENT, most * ALIGNMENT, OrderedLru())
        for number, (least, most) in enumerate(shares, 1)
    ]


class Shared(ClockedTable):
    def __init__(self, units: int = UNITS, shares: Sequence[tuple[int, int]] = SHARES[1:]) -> None:
        super().__init__(OrderedLru(), named(shares), nbytes=units * ALIGNMENT)
        for tenant in range(1, len(shares) + 1):
            self.tenants.learn(salt(tenant), tenant)

    def place(self, tenant: int, items: Sequence[tuple[int, int]]) -> Reservation:
        return self.reserve([(key_of(tenant, number), size) for number, size in items], owner=1)

    def store(self, tenant: int, number: int, size: int = ALIGNMENT) -> Reservation:
        self.now += 1
        result = self.place(tenant, [(number, size)])
        if result.lease is not None:
            self.commit(result.lease.id, owner=1)
        return result

    def fill(self, tenant: int, objects: int) -> None:
        for number in range(objects):
            assert self.store(tenant, number).placed

    def use(self, tenant: int, number: int) -> bool:
        self.now += 1
        self.expire()
        lease = self.pin([key_of(tenant, number)], owner=1)
        if lease is None:
            return False
        self.unpin(lease.id, owner=1)
        return True

    def evicted(self) -> list[tuple[int, int, str]]:
        left = [(x.tenant, int.from_bytes(x.key[40:], "big"), cause.name) for x, cause in self.left]
        self.left.clear()
        return left


class TenantMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.of = Shared()
        self.open: list[tuple[str, int, list[tuple[PackedKey, int, int]]]] = []
        self.pins: list[str] = []
        self.before = [0] * len(SHARES)

    def note(self) -> None:
        self.of.left.clear()
        self.before = list(self.of.tenants.used)

    def lost(self) -> list[int]:
        """The bytes that each tenant lost by evictions since `note`."""
        lost = [0] * len(SHARES)
        for stored, _ in self.of.left:
            lost[stored.tenant] += rounded(stored.length)
        return lost

    def check_guaranteed(self, by: int | None) -> None:
        for tenant, (lost, (least, _)) in enumerate(zip(self.lost(), SHARES, strict=True)):
            if lost and tenant != by:
                assert self.before[tenant] - lost >= least * ALIGNMENT

    @rule(tenant=tenants, items=st.lists(st.tuples(st.integers(0, 9), st.sampled_from(SIZES)), min_size=1, max_size=4))
    def reserve(self, tenant: int, items: list[tuple[int, int]]) -> None:
        self.note()
        result = self.of.place(tenant, items)
        self.check_guaranteed(tenant)
        if any(cause is Cause.TENANT for _, cause in self.of.left):
            assert SHARES[tenant][1] < UNITS
        for stored, cause in self.of.left:
            assert cause is Cause.ROOM or stored.tenant == tenant
        if result.lease is not None:
            assert result.lease.tenant == tenant
            self.open.append((result.lease.id, tenant, list(result.lease.items)))

    @precondition(lambda self: self.open)
    @rule(number=st.integers(0, 99), commits=st.booleans())
    def end(self, number: int, commits: bool) -> None:
        lease, _, _ = self.open.pop(number % len(self.open))
        if commits:
            self.of.commit(lease, owner=1)
        else:
            self.of.abort(lease, owner=1)

    @rule(tenant=tenants, numbers=st.lists(st.integers(0, 9), min_size=1, max_size=3))
    def pin(self, tenant: int, numbers: list[int]) -> None:
        keys = [key_of(tenant, number) for number in numbers]
        lease = self.of.pin(keys, owner=1)
        if lease is not None:
            self.pins.append(lease.id)

    @precondition(lambda self: self.pins)
    @rule(number=st.integers(0, 99))
    def unpin(self, number: int) -> None:
        self.of.unpin(self.pins.pop(number % len(self.pins)), owner=1)

    @rule()
    def time_passes(self) -> None:
        self.of.now += 1
        self.of.expire()

    @rule(units=st.integers(0, UNITS))
    def evict_down_to(self, units: int) -> None:
        self.note()
        self.of.drop(self.of.candidates(units * ALIGNMENT), Cause.WATERMARK)
        self.check_guaranteed(None)

    @rule(tenant=tenants, number=st.integers(0, 9))
    def drop(self, tenant: int, number: int) -> None:
        self.of.drop([key_of(tenant, number)])

    @invariant()
    def each_byte_is_of_one_tenant_and_none_has_more_than_its_most(self) -> None:
        used = [0] * len(SHARES)
        for stored in self.of.objects():
            assert stored.key == key_of(stored.tenant, int.from_bytes(stored.key[40:], "big"))
            used[stored.tenant] += rounded(stored.length)
        for _, tenant, items in self.open:
            used[tenant] += sum(rounded(size) for _, _, size in items)
        assert self.of.tenants.used == used
        assert sum(used) == self.of.used_bytes
        for nbytes, (_, most) in zip(used, SHARES, strict=True):
            assert nbytes <= most * ALIGNMENT

    @invariant()
    def a_policy_has_the_objects_of_its_tenant(self) -> None:
        for tenant, policy in enumerate(self.of.tenants.policies):
            assert set(policy.victims()) == {x.key for x in self.of.objects() if x.tenant == tenant}


TenantMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestTenants = TenantMachine.TestCase


def test_beyond_its_most_a_tenant_replaces_its_own_objects_although_there_is_room() -> None:
    of = Shared()
    of.fill(1, 9)
    assert of.evicted() == [(1, 0, "TENANT"), (1, 1, "TENANT")]
    assert of.tenants.used[1] == 7 * ALIGNMENT


def test_what_exceeds_the_most_by_itself_is_dropped_and_evicts_nothing() -> None:
    of = Shared()
    of.fill(1, 1)
    result = of.store(1, 2, size=8 * ALIGNMENT)
    assert (result.dropped, result.over_share, of.evicted()) == (1, True, [])


def test_a_tenant_whose_objects_are_all_in_use_is_dropped_at_its_most() -> None:
    of = Shared()
    of.fill(1, 7)
    assert of.pin([key_of(1, n) for n in range(7)], owner=1)
    result = of.store(1, 7)
    assert (result.lease, result.over_share, of.evicted()) == (None, True, [])


def test_a_tenant_that_may_have_all_of_l1_is_bounded_by_l1() -> None:
    of = Shared()
    of.fill(2, UNITS + 1)
    assert of.evicted() == [(2, 0, "ROOM")]
    assert of.pin([key_of(2, n + 1) for n in range(UNITS)], owner=1)
    result = of.store(2, UNITS + 1)
    assert (result.lease, result.over_share, of.evicted()) == (None, False, [])


def test_across_tenants_the_object_unused_longest_leaves_first() -> None:
    of = Shared()
    of.fill(0, 2)
    of.fill(2, 6)
    of.store(0, 2)
    of.fill(1, 5)
    assert of.use(0, 0)
    of.store(1, 5)
    assert of.evicted() == [(0, 1, "ROOM")]
    of.store(1, 6)
    assert of.evicted() == [(2, 0, "ROOM")], "used longer ago than object 2 of everyone else"
    of.store(0, 7)
    assert of.evicted() == [(0, 2, "ROOM")], "tenant 2 has no more than what is guaranteed to it"


def test_a_tenant_below_its_least_takes_from_others_and_not_from_itself() -> None:
    of = Shared()
    of.fill(1, 1)
    of.fill(0, 13)
    for number in range(1, 4):
        of.store(1, number)
    assert of.evicted() == [(0, 0, "ROOM"), (0, 1, "ROOM"), (0, 2, "ROOM")]
    of.store(0, 20)
    assert of.evicted() == [(0, 3, "ROOM")], "object 0 of tenant 1 is older, and guaranteed"


def test_the_watermark_leaves_what_is_guaranteed() -> None:
    of = Shared()
    of.fill(1, 6)
    of.fill(0, 8)
    of.drop(of.candidates(0), Cause.WATERMARK)
    assert of.tenants.used == [0, 4 * ALIGNMENT, 0]
    assert of.candidates(0) == []


def test_without_named_tenants_there_is_one_policy_and_no_rule() -> None:
    alone = Tenants(OrderedLru())
    assert (alone.spare(0), alone.spare(), alone.space_left(0, 1)) == (None, None, float("inf"))
    assert not alone.any_named


def test_remembered_salts_are_bounded_and_the_oldest_is_forgotten() -> None:
    of = Tenants(OrderedLru(), named())
    for number in range(MAX_SALTS + 1):
        of.learn(number.to_bytes(16, "big"), 1)
    assert not of.knows(bytes(16))
    assert of.of(bytes(16) + (1).to_bytes(16, "big") + bytes(40)) == 1
    assert of.of(packed_key(0)) == 0


def test_loaded_objects_count_for_their_tenant(make_node: MakeNode) -> None:
    keys = [key_of(1, number) for number in range(4)]
    tier = MemoryTier({key: in_envelope(key, content(key, SIZE)) for key in keys})
    node = make_node(tiers=[tier], tenants=[Tenant("t1", 0, 2 * SIZE, OrderedLru())])
    node.table.belongs(salt(1), 1)
    for key in keys:
        node.load([key])
    assert node.present(keys) == 2
    assert node.l1("evicted") == {"room": 0, "watermark": 0, "tenant": 2, "hinted": 0}
    assert node.l1("used_bytes") == 2 * SIZE


PROMPTS, CACHE, REQUESTS = 200, 100, 3000


def zipf_hits(*shares: tuple[int, int], noisy: bool) -> float:
    """The hit rate of tenant 1, whose prompts are Zipf distributed, in the second half. The neighbour stores two new
    objects for each of its requests."""
    of, chance = Shared(CACHE, shares), random.Random(20)
    weights = list(accumulate(1 / rank**1.1 for rank in range(1, PROMPTS + 1)))
    hits = 0
    for turn, number in enumerate(chance.choices(range(PROMPTS), cum_weights=weights, k=REQUESTS)):
        hit = of.use(1, number)
        hits += hit and turn >= REQUESTS // 2
        if not hit:
            of.store(1, number)
        if noisy:
            of.store(2, 2 * turn)
            of.store(2, 2 * turn + 1)
    return hits / (REQUESTS - REQUESTS // 2)


def test_a_noisy_neighbour_costs_less_than_two_points_of_hit_rate() -> None:
    alone = zipf_hits((0, CACHE), (0, CACHE), noisy=False)
    assert alone - zipf_hits((0, CACHE), (0, CACHE), noisy=True) > 0.2, "the load is no load"
    assert alone - zipf_hits((95, CACHE), (0, CACHE), noisy=True) < 0.02
    assert alone - zipf_hits((0, CACHE), (0, 5), noisy=True) < 0.02
