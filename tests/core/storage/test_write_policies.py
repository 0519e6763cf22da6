"""The write policies: pure, and at work in a manager with tiers."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

import pytest

from kvframework.api.tier import Outcome, PackedKey
from kvframework.storage.l2.writer import MAX_GHOSTS, WritePolicy
from tests.core.storage.memory import packed_key
from tests.core.storage.node import SIZE, MakeNode, Node
from tests.core.storage.test_prefetch import filled
from tests.core.storage.tier import MemoryTier
from tests.support.waiting import wait_until

K = [packed_key(number) for number in range(200)]


def written(node: Node) -> set[bytes]:
    """What the tier holds once nothing is on its way."""
    wait_until(lambda: all(tier["write_pending"] == 0 for tier in node.manager.status()["l2"]), what="the write to L2")  # type: ignore[attr-defined]
    # A writer settles an object before it unpins it, and a pinned one stays in L1 in place of an older one.
    wait_until(lambda: not node.l1("pins"), what="no pin")
    return set(node.tier.values)


def test_write_through_selective_is_asking_again_or_storing_again_after_it_left() -> None:
    policy = WritePolicy("write_through_selective")
    assert policy.committed(K[:4]) == []
    assert policy.used(K[2:6]) == K[2:4], "what it never saw committed is another's"
    assert policy.used(K[:4]) == K[:2]
    assert policy.used(K[:4]) == [], "once is enough"
    policy.committed(K[4:6])
    policy.removed(K[4])
    assert policy.committed(K[4:7]) == [K[4]]


def test_write_through_selective_remembers_a_bounded_number_of_what_left() -> None:
    policy = WritePolicy("write_through_selective")
    keys = [number.to_bytes(72, "big") for number in range(MAX_GHOSTS + 1)]
    policy.committed(keys)
    for key in keys:
        assert policy.removed(key) is False
    assert policy.committed(keys) == keys[1:]


def test_write_back_names_what_is_not_written_yet() -> None:
    policy = WritePolicy("write_back")
    assert policy.committed(K[:4]) == []
    assert policy.leaving([K[0], K[2], K[9]]) == [K[0], K[2]]
    policy.written([K[0]])
    assert policy.leaving(K[:4]) == K[1:4]
    assert policy.removed(K[1]) is True, "lost"
    assert policy.removed(K[0]) is False
    assert policy.leaving(K[:4]) == K[2:4]


@pytest.mark.parametrize("use", ["read", "write"])
def test_write_through_selective_never_writes_what_is_used_once(make_node: MakeNode, use: str) -> None:
    node = make_node(write_policy="write_through_selective")
    node.write(K[:8])
    assert written(node) == set()
    getattr(node, use)(K[:3])
    assert written(node) == set(K[:3])
    node.read(K[:3])
    assert node.tier.asked("put").count(K[0]) == 1


def test_a_load_of_this_tier_is_not_written_to_it_again(make_node: MakeNode) -> None:
    for policy in ("write_through", "write_through_selective", "write_back"):
        node = make_node(tiers=[filled(K[:4])], write_policy=policy)
        node.load(K[:4])
        node.read(K[:4])
        node.table.tick()
        assert written(node) == set(K[:4])
        assert node.tier.asked("put") == []


def test_write_back_what_leaves_above_the_watermark_is_written_first(make_node: MakeNode) -> None:
    node = make_node(units=100, write_policy="write_back", high_watermark=0.5, low_watermark=0.25)
    node.write(K[:50])
    node.table.tick()
    assert written(node) == set(), "there is room"
    node.write(K[50:60])
    written(node)
    node.table.tick()
    assert node.l1("used_bytes") == 25 * SIZE
    gone = {key for key in K[:60] if not node.present([key])}
    assert len(gone) == 35
    assert gone <= written(node)
    assert len(node.tier.values) <= 35 + 16, "what is being sent is passed over meanwhile"
    assert node.store_counters.get("write_lost", 0) == 0
    assert node.l1("evictions") == 35


def test_write_back_what_goes_beyond_the_watermark_is_written_before_the_next_tick(make_node: MakeNode) -> None:
    node = make_node(units=20, write_policy="write_back", high_watermark=0.5, low_watermark=0.25)
    node.write(K[:10])
    assert written(node) == set()
    node.write(K[10:11])
    assert len(written(node)) == 6
    for number in range(11, 26):
        node.write(K[number : number + 1])
    assert {key for key in K[:26] if not node.present([key])} == written(node), "pushed out at allocation, and not lost"
    assert node.store_counters["write_lost"] == 0


@pytest.mark.parametrize("sending", [False, True], ids=["between calls", "during a call"])
def test_write_back_a_tier_that_is_down_keeps_nobody_from_storing(
    make_node: MakeNode, monkeypatch: pytest.MonkeyPatch, sending: bool
) -> None:
    monkeypatch.setattr("kvframework.storage.l2.writer.MAX_ATTEMPTS", 1 << 30)  # nothing is given up
    node = make_node(units=20, write_policy="write_back", high_watermark=0.5, low_watermark=0.25, timeout_s=60.0)
    node.tier.down = True
    if sending:
        node.tier.stall("put")
    for number in range(60):
        assert node.write(K[number : number + 1]) == 1
        node.table.tick()
        if sending and number == 10:
            node.wait_stalled()
    node.tier.resume()
    assert node.l1("objects") == 20, "ticks evict nothing that would be lost"
    assert node.store_counters["write_lost"] == 40
    assert node.store_counters.get("write_dropped", 0) == 0
    stayed = {key for key in K[:60] if node.present([key])}  # not always the newest: what is being sent is pinned
    node.tier.down = False
    wait_until(lambda: node.table.tick() or node.l1("used_bytes") <= 10 * SIZE, what="the watermark")
    left = {key for key in stayed if not node.present([key])}
    lost = left - written(node)
    assert len(lost) == node.store_counters["write_lost"] - 40, "nothing is lost that is not counted"


def test_what_a_later_tier_had_goes_to_those_before_it(make_node: MakeNode) -> None:
    near, middle, far = MemoryTier(), filled(K[:2]), filled(K[:6])
    node = make_node(tiers=[near, middle, far])
    assert node.load(K[:6]).loaded == 6
    assert written(node) == set(K[:6])
    assert set(middle.values) == set(K[:6])
    assert (middle.asked("put"), far.asked("put")) == (K[2:6], [])


def test_without_promotion_it_stays_where_it_was(make_node: MakeNode) -> None:
    node = make_node(tiers=[MemoryTier(), filled(K[:6])], promote=False)
    assert node.load(K[:6]).loaded == 6
    assert written(node) == set()


class Forgetful(MemoryTier):
    has = frozenset({"touch"})


def test_what_is_used_is_touched_in_the_tiers_that_forget(make_node: MakeNode) -> None:
    node = make_node(tiers=[Forgetful(), MemoryTier()])
    node.write(K[:4])
    written(node)
    node.read(K[:2])
    node.manager.tiers.writers[0]._idle_work_at = 0.0  # it is done every few seconds
    node.write(K[9:10])
    wait_until(lambda: set(K[:2]) <= set(node.tiers[0].asked("touch")), what="the touch")
    assert not set(K[2:4]) & set(node.tiers[0].asked("touch"))
    assert node.tiers[1].asked("touch") == []


class Stepped(Forgetful):
    """Does one call of an operation at a time, when the test lets it."""

    def __init__(self, operation: str) -> None:
        super().__init__()
        self._operation = operation
        self.allowed = threading.Semaphore(0)

    def _answer(
        self, operation: str, keys: Sequence[PackedKey], deadline: float, one: Callable[[int], Outcome]
    ) -> list[Outcome]:
        if operation == self._operation:
            self.calls.append((f"{operation} waits", tuple(keys)))
            assert self.allowed.acquire(timeout=deadline - time.monotonic())
        return super()._answer(operation, keys, deadline, one)


def test_write_back_what_is_written_is_not_sent_again_with_its_batch_under_way(
    make_node: MakeNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvframework.storage.l2.writer.BATCH_BYTES", 1)
    tier = Stepped("put")
    node = make_node(
        tiers=[tier], units=100, write_policy="write_back", high_watermark=0.5, low_watermark=0.45, timeout_s=60.0
    )
    node.write(K[:55])
    node.table.tick()
    tier.allowed.release()
    wait_until(lambda: len(tier.asked("put waits")) == 2, what="the second object of the batch")
    node.table.tick()
    tier.allowed.release(200)
    assert written(node) == set(tier.asked("put"))
    assert len(tier.asked("put")) == len(tier.values)
    assert node.store_counters.get("write_lost", 0) == 0


def test_many_touches_keep_nothing_from_being_written(make_node: MakeNode, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvframework.storage.l2.writer.TOUCH_AT_ONCE", 2)
    tier = Stepped("touch")
    node = make_node(tiers=[tier], timeout_s=60.0)
    node.write(K[:8])
    written(node)
    node.read(K[:8])
    node.manager.tiers.writers[0]._idle_work_at = 0.0
    node.write(K[9:10])
    wait_until(lambda: tier.asked("touch waits"), what="the first touch")
    node.write(K[10:11])
    tier.allowed.release()
    wait_until(lambda: K[10] in tier.values, what="the write between two touches")
    assert not set(K[:8]) <= set(tier.asked("touch"))
    tier.allowed.release(200)
    wait_until(lambda: set(K[:8]) <= set(tier.asked("touch")), what="all touches")
