"""The storage manager: leases by its clock, watermarks, clearing, and its end with work in flight."""

from __future__ import annotations

import threading
import time

import pytest

from kvframework.storage import manager as manager_module
from kvframework.storage import table as table_module
from kvframework.storage.l1.allocator import ALIGNMENT
from tests.core.storage.conftest import storage_threads
from tests.core.storage.memory import NAMESPACE, packed_key
from tests.core.storage.node import DESC, OWNER, SIZE, MakeNode, Node
from tests.core.storage.test_prefetch import filled
from tests.support.waiting import wait_until

K = [packed_key(number) for number in range(100)]


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_a_store_that_was_answered_is_seen_by_the_next_lookup(make_node: MakeNode) -> None:
    node = make_node(tiers=[])
    assert node.write(K[:8]) == 8
    assert node.table.which_present(K[:9]) == [True] * 8 + [False]
    assert node.read(K[:8])
    assert not node.read(K[:9])
    again = node.table.reserve([(key, SIZE) for key in K[:8]], owner=OWNER)
    assert (again.lease, again.present) == (None, 8)


def test_a_full_l1_evicts_at_allocation(make_node: MakeNode) -> None:
    node = make_node(tiers=[], units=4)
    for number in range(20):
        assert node.write(K[number : number + 1]) == 1
    assert node.table.which_present(K[:20]) == [False] * 16 + [True] * 4
    assert node.l1("evictions") == 16


def test_above_the_high_watermark_it_evicts_down_to_the_low_one(make_node: MakeNode) -> None:
    node = make_node(tiers=[], units=8, high_watermark=0.75, low_watermark=0.5)
    for number in range(6):
        node.write(K[number : number + 1])
    node.table.tick()
    assert node.present(K[:6]) == 6, "not yet above"
    node.write(K[6:7])
    node.table.tick()
    assert node.table.which_present(K[:7]) == [False] * 3 + [True] * 4
    assert node.l1("used_bytes") == 4 * ALIGNMENT


def test_a_tick_evicts_so_many_and_the_next_one_goes_on(make_node: MakeNode, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table_module, "EVICT_AT_ONCE", 2)
    node = make_node(tiers=[], units=8, high_watermark=0.75, low_watermark=0.25)
    node.write(K[:7])
    left = []
    for _ in range(4):
        node.table.tick()
        left.append(node.present(K[:7]))
    assert left == [5, 3, 2, 2]
    node.write(K[7:11])
    node.table.tick()
    assert node.present(K[:11]) == 6, "not above the high watermark"


def test_pins_hold_against_the_watermark(make_node: MakeNode) -> None:
    node = make_node(tiers=[], units=8, high_watermark=0.5, low_watermark=0.0)
    node.write(K[:8])
    lease = node.table.pin(K[:6], owner=OWNER)
    assert lease is not None
    node.table.tick()
    assert node.table.which_present(K[:8]) == [True] * 6 + [False] * 2
    assert node.table.unpin(lease.id, owner=OWNER).held


def test_leases_end_by_the_managers_clock(make_node: MakeNode) -> None:
    clock = Clock()
    node = make_node(tiers=[], clock=clock)
    node.write(K[:1])
    pins = node.table.pin(K[:1], owner=OWNER, lease_s=10.0)
    late = node.table.reserve([(K[1], SIZE)], owner=OWNER, lease_s=10.0)
    forever = node.table.reserve([(K[2], SIZE)], owner=OWNER)
    assert pins is not None
    assert late.lease is not None
    assert forever.lease is not None
    clock.now = 10.0
    node.table.tick()
    assert (node.l1("pins"), node.l1("quarantined_bytes")) == (0, ALIGNMENT)
    assert not pins.held
    assert len(node.table.commit(late.lease.id, owner=OWNER)) == 0
    assert len(node.table.commit(forever.lease.id, owner=OWNER)) == 1
    assert node.table.which_present(K[:3]) == [True, False, True]


def test_the_end_of_a_client_frees_what_it_held_and_publishes_nothing(make_node: MakeNode) -> None:
    node = make_node(tiers=[])
    node.write(K[:2])
    node.table.pin(K[:2], owner=OWNER)
    node.table.reserve([(K[5], SIZE)], owner=OWNER)
    assert node.table.end_owner(OWNER) == 2
    assert node.present([K[5]]) == 0
    node.assert_idle()


def test_clear_leaves_what_is_in_use(make_node: MakeNode) -> None:
    node = make_node(tiers=[])
    node.write(K[:4])
    lease = node.table.pin(K[1:2], owner=OWNER)
    assert lease is not None
    assert node.manager.clear()[:2] == (3, 1)
    node.table.unpin(lease.id, owner=OWNER)
    assert node.manager.clear()[:2] == (1, 0)
    assert node.l1("fragmentation") == 0.0
    assert node.l1("largest_free_bytes") == node.table.capacity


def test_close_drains_for_as_long_as_it_is_told(make_node: MakeNode) -> None:
    node = make_node()
    node.tier.slow_s = 0.01
    node.write(K[:50])
    node.manager.close(drain_s=20.0)
    assert set(node.tier.values) == set(K[:50])


@pytest.mark.parametrize("operation", ["put", "get", "contains"])
def test_close_during_a_stall_is_quick_and_answers_everybody(make_node: MakeNode, operation: str) -> None:
    node = make_node(tiers=[filled(K[50:])], timeout_s=60.0)
    node.tier.stall(operation)
    answered: list[str] = []
    if operation == "put":
        node.write(K[:20])
        node.wait_stalled()
    tasks = [node.load_in_background(K[50:], lambda: answered.append("load")) for _ in range(10)]
    node.manager.tiers.submit_record_task(NAMESPACE, lambda: answered.append("record"))
    node.wait_stalled()
    before = time.monotonic()
    node.manager.close()
    assert time.monotonic() - before < 20.0
    assert node.memory.closed
    assert storage_threads() == []
    assert all(task.done for task in tasks)
    assert sorted(answered) == ["load"] * 10 + ["record"]
    assert node.l1("pins") == 0
    assert node.l1("write_leases") == 0


def test_close_ends_a_load_that_waits_for_a_writer(make_node: MakeNode) -> None:
    node = make_node(tiers=[filled(K[:2])], timeout_s=60.0)
    node.table.reserve([(K[0], SIZE)], owner=OWNER)
    task = node.load_in_background(K[:2])
    wait_until(lambda: node.present(K[1:2]))
    node.manager.close()
    assert task.done


def test_after_close_nothing_is_taken_on_and_nothing_raises(make_node: MakeNode) -> None:
    node = make_node(tiers=[filled(K[:4])])
    node.manager.close()
    node.manager.close()
    assert node.manager.tiers.submit_prefetch_task(K[:4], DESC) is None
    assert node.manager.tiers.submit_record_task(NAMESPACE, lambda: None) is False
    late = node.table.reserve([(K[9], SIZE)], owner=OWNER)
    assert late.lease is not None
    assert len(node.table.commit(late.lease.id, owner=OWNER)) == 1
    node.table.tick()
    assert node.table.end_owner(OWNER) == 0
    assert node.manager.status()["l2"][0]["write_pending"] == 0  # type: ignore[index]
    with pytest.raises(OSError, match="closed"):
        node.stores[0].contains(K[:1])
    assert {name for name, _ in node.tier.calls} <= {"ping"}


@pytest.mark.parametrize("_again", range(10))
def test_submitting_and_committing_while_it_closes(make_node: MakeNode, _again: int) -> None:
    """Whatever was accepted is answered, whenever `close` came in between."""
    node = make_node(tiers=[filled(K[:4])])
    answered: list[int] = []
    accepted: list[int] = []
    started = threading.Event()

    def submit() -> None:
        for number in range(60):
            if node.manager.tiers.submit_prefetch_task(K[:4], DESC, on_done=lambda: answered.append(1)):
                accepted.append(1)
            node.table.reserve([(K[10 + number], SIZE)], owner=OWNER)
            if number == 5:
                started.set()

    thread = threading.Thread(target=submit)
    thread.start()
    assert started.wait(10.0)
    node.manager.close()
    thread.join()
    assert len(answered) == len(accepted) >= 1
    assert node.l1("pins") == 0


def test_a_tier_that_never_lets_go_keeps_the_arena_and_not_the_server(
    make_node: MakeNode, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(manager_module, "CLOSE_GRACE_S", 0.1)
    node = make_node(timeout_s=0.1)
    node.tier.stubborn = True
    node.tier.stall("put")
    node.write(K[:1])
    node.wait_stalled()
    before = time.monotonic()
    node.manager.close()
    assert time.monotonic() - before < 20.0
    assert not node.memory.closed, "the tier may still read there"
    assert "stays mapped" in caplog.text
    node.tier.resume()
    wait_until(lambda: not storage_threads())
    node.manager.close()
    assert node.memory.closed


def test_a_tier_that_fails_to_close_keeps_nothing_from_ending(
    make_node: MakeNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = make_node()

    def fail() -> None:
        raise RuntimeError("a bug in the plugin")

    monkeypatch.setattr(node.tier, "close", fail)
    node.manager.close()
    assert node.memory.closed


def test_memory_that_knows_no_end_of_its_own_with_the_process_is_closed(caplog: pytest.LogCaptureFixture) -> None:
    node = Node([])
    node.manager.close(process_ends=True)
    assert node.memory.closed
    assert not caplog.records
