"""The storage manager: leases by its clock, watermarks, clearing, its end with work in flight, and its accounts."""

from __future__ import annotations

import threading
import time

import pytest

from kvframework.storage import manager as manager_module
from kvframework.storage import table as table_module
from kvframework.storage.l1.entries import MAX_ACCOUNTS, NO_CLIENT, NO_NAMESPACE, Accounts
from tests.core.storage.conftest import storage_threads
from tests.core.storage.memory import NAMESPACE, packed_key
from tests.core.storage.node import DESC, OWNER, SIZE, MakeNode, Node
from tests.core.storage.test_prefetch import filled
from tests.support.waiting import wait_until

K = [packed_key(number) for number in range(100)]


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


def test_after_close_nothing_is_taken_on_and_nothing_raises(make_node: MakeNode) -> None:
    node = make_node(tiers=[filled(K[:4])])
    node.manager.close()
    node.manager.close()
    assert node.manager.tiers.submit_prefetch_task(K[:4], DESC) is None
    assert node.manager.tiers.submit_record_task(NAMESPACE, lambda: None) is False
    late = node.table.reserve([(K[9], SIZE)], owner=OWNER)
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


def test_a_store_that_ends_after_its_client_counts_for_no_client(make_node: MakeNode) -> None:
    node = make_node(units=4, tiers=[])
    lease = node.table.reserve([(packed_key(1), SIZE)], owner=0, client=1).lease
    assert lease is not None
    node.table.end_owner(1)
    node.table.commit(lease.id, owner=0)
    assert [(key, account.objects) for key, account in node.table.accounts.items()] == [((NO_CLIENT, NAMESPACE, 0), 1)]


def test_beyond_the_bound_what_is_new_has_no_client_and_no_namespace() -> None:
    book = Accounts()
    for client in range(1, MAX_ACCOUNTS + 1):
        book.of(client, NAMESPACE, 0)
    late = book.of(MAX_ACCOUNTS + 1, NAMESPACE, 0)
    assert late is book.of(NO_CLIENT, NO_NAMESPACE, 0)
    book.end(1)
    assert book.get((1, NAMESPACE, 0)) is None
