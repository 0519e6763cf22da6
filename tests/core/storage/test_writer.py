"""The writer: what is committed reaches the tier, and a tier in trouble delays no one else."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

import pytest

from kvframework.api.tier import Outcome, PackedKey
from kvframework.errors import TierError
from kvframework.storage.l1.entries import StoredObject
from kvframework.storage.l2.sealed_tier import DELETE_AT_ONCE, L2Store
from kvframework.storage.l2.writer import (
    MAX_ATTEMPTS,
    MAX_REFUSALS,
    RECORD_EVERY_S,
    RENEW_EVERY_S,
    AttachedTier,
    TierWriter,
)
from kvframework.storage.namespaces import HEADER_BYTES, NamespaceRecord, NamespaceRecords, record_key, unseal
from tests.core.storage.memory import NAMESPACE, content, packed_key
from tests.core.storage.node import DESC, SIZE, MakeNode, Node
from tests.core.storage.tier import MemoryTier
from tests.support.waiting import wait_until

K = [packed_key(number) for number in range(200)]


def wait_written(tier: MemoryTier, keys: list[PackedKey]) -> None:
    wait_until(lambda: set(keys) <= tier.values.keys(), what="the write to L2")
    for key in keys:
        value = tier.values[key]
        unseal(value[:HEADER_BYTES], key, memoryview(value[HEADER_BYTES:]), received=len(value))
        assert value[HEADER_BYTES:] == content(key, SIZE)


def test_nothing_uncommitted_reaches_a_tier(node: Node) -> None:
    reserved = node.table.reserve([(K[0], SIZE)], owner=1)
    assert reserved.lease is not None
    node.write(K[1:2])
    wait_written(node.tier, K[1:2])
    node.table.abort(reserved.lease.id, owner=1)
    assert K[0] not in node.tier.asked("put")


@pytest.mark.parametrize("fault", ["down", "raises", "miscounts"])
def test_a_tier_in_trouble_gets_everything_once_it_is_well(node: Node, fault: str) -> None:
    setattr(node.tier, fault, ValueError("a bug in the plugin") if fault == "raises" else True)
    node.write(K[:20])
    wait_until(lambda: node.store_counters.get("errors", 0) >= 5, what="several attempts")
    assert node.stores[0].state != "closed"
    assert node.read(K[:20]), "L1 goes on as if nothing were"
    setattr(node.tier, fault, None if fault == "raises" else False)
    wait_written(node.tier, K[:20])
    wait_until(lambda: node.stores[0].state == "closed")
    node.assert_idle()


def test_while_the_circuit_is_open_nothing_spins(node: Node) -> None:
    """Another's call is the one that decides, and takes its time."""
    node.tier.down = True
    for _ in range(3):
        with pytest.raises(OSError):
            node.stores[0].put(K[100:101], [memoryview(b"value")])
    node.tier.stall("put")
    node.tier.down = False
    wait_until(lambda: node.stores[0].wait_s("put") == 0)
    other = threading.Thread(target=node.stores[0].put, args=(K[100:101], [memoryview(b"value")]))
    other.start()
    node.wait_stalled()
    before = node.store_counters.get("refused", 0)
    node.write(K[:1])
    assert not node.manager.tiers.writers[0].drain(0.2), "it waits for its turn"
    assert node.store_counters.get("refused", 0) - before <= 2
    node.tier.resume()
    other.join()
    wait_written(node.tier, K[:1])


def test_reserve_and_commit_never_wait_for_a_stalled_tier(make_node: MakeNode) -> None:
    node = make_node(units=200, write_queue=8, timeout_s=60.0)
    node.tier.stall("put")
    node.write(K[:1])
    node.wait_stalled()
    for number in range(1, 101):
        assert node.write(K[number : number + 1]) == 1
    assert node.tier.stalled == 1, "the tier was stalled all the time"
    assert node.store_counters["write_dropped"] == 100 - 8
    assert node.read(K[:101])
    node.tier.resume()
    wait_written(node.tier, K[:9])
    node.assert_idle()
    assert not set(node.tier.values) & set(K[9:])


def test_only_what_is_being_sent_is_pinned_and_the_evicted_is_counted(make_node: MakeNode) -> None:
    node = make_node(units=4, timeout_s=60.0)
    node.tier.stall("put")
    node.write(K[:1])
    node.wait_stalled()
    assert node.l1("pins") == 1
    for number in range(1, 10):
        assert node.write(K[number : number + 1]) == 1
    assert node.present(K[:1]) == 1, "what is being sent stays"
    assert node.present(K[1:10]) == 3
    node.tier.resume()
    wait_written(node.tier, [K[0], *K[7:10]])
    wait_until(lambda: node.store_counters["write_lost"] == 6)
    node.assert_idle()


def test_a_write_to_l2_is_no_access_for_eviction(node: Node) -> None:
    node.write(K[:4])
    wait_written(node.tier, K[:4])
    node.assert_idle()
    assert list(node.policy.order) == [K[3], K[2], K[1], K[0]]


def test_a_value_that_one_key_can_not_have_does_not_hold_up_the_others(node: Node) -> None:
    node.tier.refused = {K[1]}
    node.write(K[:4])
    wait_written(node.tier, [K[0], K[2], K[3]])
    wait_until(lambda: node.store_counters["write_given_up"] == 1)
    assert node.tier.asked("put").count(K[1]) == node.store_counters["store_failed"] == MAX_REFUSALS
    node.assert_idle()


def test_what_a_tier_refuses_once_is_tried_again(node: Node) -> None:
    node.tier.refused = {K[1]}
    node.write(K[:4])
    wait_until(lambda: node.store_counters.get("store_failed") == 1)
    assert set(node.tier.values) == {K[0], K[2], K[3]}
    node.tier.refused = set()
    wait_written(node.tier, K[:4])
    wait_until(lambda: node.manager.status()["l2"][0]["write_pending"] == 0)  # type: ignore[index]
    assert node.store_counters.get("write_given_up", 0) == 0
    node.assert_idle()


def test_a_tier_that_can_only_be_read_is_read_on(node: Node) -> None:
    node.write(K[:4])
    wait_written(node.tier, K[:4])
    node.forget()
    node.tier.max_bytes = 0
    node.write(K[10:30])
    wait_until(lambda: node.stores[0].state != "closed", what="the circuit to open")
    assert node.load(K[:4]).loaded == 4
    status = node.manager.status()["l2"][0]  # type: ignore[index]
    assert status["circuits"]["read"] == "closed"
    assert node.stores[0].wait_s("get_into") == 0
    node.tier.max_bytes = 1 << 60
    wait_written(node.tier, K[10:30])
    wait_until(lambda: node.stores[0].state == "closed")


def test_a_circuit_of_writes_that_nothing_waits_for_does_not_stay_open(node: Node) -> None:
    node.tier.max_bytes = 0
    for _ in range(3):
        with pytest.raises(OSError):
            node.stores[0].put(K[:1], [memoryview(b"value")])
    assert node.stores[0].state == "open"
    wait_until(lambda: node.stores[0].wait_s("put") == 0)
    node.stores[0].check()
    assert node.stores[0].state == "closed"


def test_batches_shrink_to_what_the_tier_takes_in_time(node: Node) -> None:
    node.tier.max_bytes = 3 * SIZE
    node.tier.stall("put")
    node.write(K[:1])
    node.wait_stalled()
    node.write(K[1:33])
    node.tier.resume()
    wait_written(node.tier, K[:33])
    assert node.store_counters.get("write_given_up", 0) == 0
    node.assert_idle()


def test_a_tier_that_is_down_for_long_costs_no_object(node: Node) -> None:
    node.tier.down = True
    node.write(K[:1])
    wait_until(lambda: node.tier.asked("put").count(K[0]) > 2 * MAX_ATTEMPTS, 60, "many attempts")
    assert node.store_counters["write_given_up"] == 0
    node.tier.down = False
    wait_written(node.tier, K[:1])


def test_several_writers_write_everything_once(make_node: MakeNode) -> None:
    node = make_node(units=200, timeout_s=60.0, writes=3)
    node.manager.records.add(NAMESPACE, NamespaceRecord("llama", 1, DESC))
    node.tier.stall("put")
    for number in range(150):
        node.write(K[number : number + 1])
    wait_until(lambda: node.tier.stalled == 3, what="the three of them to be held")
    node.tier.resume()
    wait_written(node.tier, K[:150])
    node.assert_idle()
    assert sorted(node.tier.asked("put")) == sorted([*K[:150], record_key(NAMESPACE)]), "each once"
    assert node.manager.status()["l2"][0]["writes"] == 3  # type: ignore[index]


@pytest.mark.parametrize("writes", [1, 3])
def test_what_can_never_be_written_is_given_up_beside_other_writers(make_node: MakeNode, writes: int) -> None:
    """A whole batch fails for one value of it; what the others write meanwhile must not make it part of one again."""

    class Choosy(MemoryTier):
        def put(
            self, keys: Sequence[PackedKey], parts: Sequence[Sequence[memoryview]], *, deadline: float
        ) -> list[Outcome]:
            if K[7] in keys:
                raise TierError("not this one")
            return super().put(keys, parts, deadline=deadline)

    node = make_node(tiers=[Choosy()], units=200, writes=writes)
    node.write(K[:40])
    for number in range(40, 150):
        node.write(K[number : number + 1])
    wait_written(node.tier, [key for key in K[:150] if key != K[7]])
    wait_until(lambda: node.store_counters["write_given_up"] == 1, what="it to be given up")
    assert node.store_counters["errors"] >= MAX_ATTEMPTS
    node.assert_idle()


def test_closing_drains_several_writers(make_node: MakeNode) -> None:
    node = make_node(units=200, writes=3)
    node.tier.slow_s = 0.001
    node.write(K[:150])
    node.manager.close(30.0)
    assert set(K[:150]) <= node.tier.values.keys()


def test_a_record_that_was_refused_is_tried_again(node: Node) -> None:
    node.manager.records.add(NAMESPACE, NamespaceRecord("llama", 1, DESC))
    node.tier.refused = {record_key(NAMESPACE)}
    node.write(K[:1])
    wait_written(node.tier, K[:1])
    node.tier.refused = set()
    node.write(K[1:2])
    wait_written(node.tier, [K[1]])
    assert record_key(NAMESPACE) in node.tier.values


def test_clearing_with_l2_deletes_there_what_was_dropped_here(make_node: MakeNode) -> None:
    node = make_node(tiers=[MemoryTier(), MemoryTier()])
    node.write(K[:3])
    for tier in node.tiers:
        wait_written(tier, K[:3])
    node.assert_idle()
    node.tiers[0].down = True
    with pytest.raises(OSError):
        node.manager.clear(l2=True)
    assert node.present(K[:3]) == 0
    assert node.tiers[1].values == {}, "the tier behind the failing one was asked too"


def test_clearing_with_l2_deletes_in_batches_that_each_have_their_time(make_node: MakeNode) -> None:
    many = [packed_key(number) for number in range(600)]
    node = make_node(units=600, write_queue=600)
    node.write(many)
    wait_written(node.tier, many)
    node.assert_idle()
    cleared = node.manager.clear(l2=True)
    assert (cleared.objects, cleared.in_use) == (600, 0)
    assert cleared.unlisted == (node.tier.name,)
    assert node.tier.values == {}
    assert max(len(keys) for name, keys in node.tier.calls if name == "delete") <= DELETE_AT_ONCE


def test_namespaces_of_long_ago_are_forgotten() -> None:
    """Nothing is in the background here: every step is taken by the test."""
    now = float(int(time.monotonic()))  # so that its sums are exact
    tier = MemoryTier()
    store = L2Store(tier, timeout_s=5.0, clock=lambda: now)
    records = NamespaceRecords()
    writer = TierWriter(Held(), AttachedTier(store), records, clock=lambda: now)
    for number in range(50):
        now += RECORD_EVERY_S / 4
        namespace = number.to_bytes(16, "big")
        records.add(namespace, NamespaceRecord("llama", 1, DESC))
        writer.committed([packed_key(number, namespace=namespace)])
        work = writer.poll()
        assert work is not None
        work()
        assert record_key(namespace) in tier.values
        assert len(writer._record_put) <= 4
    assert writer.pending == 0


def test_the_record_of_a_registered_namespace_is_renewed_though_nothing_is_written() -> None:
    now = float(int(time.monotonic()))
    tier, records = MemoryTier(), NamespaceRecords()
    writer = TierWriter(Held(), AttachedTier(L2Store(tier, timeout_s=5.0, clock=lambda: now)), records, lambda: now)
    records.add(NAMESPACE, NamespaceRecord("llama", 1, DESC))
    for registered in (False, True):
        records.retain(NAMESPACE) if registered else None
        assert record_key(NAMESPACE) not in tier.values
        now += RENEW_EVERY_S
        work = writer.poll()
        assert work is not None
        work()
    assert record_key(NAMESPACE) in tier.values


class Held:
    """An L1 that holds whatever is asked for."""

    def pin_present(self, keys: Sequence[PackedKey]) -> list[StoredObject]:
        return [StoredObject(key, 0, SIZE) for key in keys]

    def which_present(self, keys: Sequence[PackedKey]) -> list[bool]:
        return [True] * len(keys)

    def release(self, objects: Sequence[StoredObject]) -> None:
        return

    def bytes_of(self, stored: StoredObject) -> memoryview:
        return memoryview(content(stored.key, SIZE))
