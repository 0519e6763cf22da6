"""Everything at once on a small L1 with a tier that comes and goes: right bytes or a miss, and nothing left over. What
a tier raises that is no error of the framework is told as a bug of the plugin, with its traceback once."""

from __future__ import annotations

import logging
import random
import threading

import pytest

from kvframework.errors import ConfigFieldError, LeaseUnknown, TierError
from kvframework.storage.l2.sealed_tier import L2Store
from tests.core.storage.memory import packed_key
from tests.core.storage.node import DESC, SIZE, MakeNode, Node, prefix
from tests.core.storage.tier import MemoryTier
from tests.support.waiting import wait_until

K = [packed_key(number) for number in range(48)]
STEPS = 3000


def live(node: Node, owner: int, answered: list[object], accepted: list[object]) -> None:
    """One client: stores, looks up and reads what a random choice says, and breaks off at times."""
    chance = random.Random(owner)
    for _ in range(STEPS):
        first = chance.randrange(len(K) - 8)
        keys = K[first : first + chance.randrange(1, 8)]
        action = chance.randrange(10)
        if action < 4:
            try:
                node.write(keys, owner=owner)
            except LeaseUnknown:
                raise AssertionError("a lease ended by itself") from None
        elif action < 7:
            node.read(keys, owner=owner)
        elif action == 7:
            left = node.table.reserve([(key, SIZE) for key in keys], owner=owner, request_id="x", lease_s=30.0)
            node.table.pin(keys[:1], owner=owner, request_id="x", lease_s=30.0)
            node.table.cancel(owner, "x")
            if left.lease is not None:
                node.table.abort(left.lease.id, owner=owner)
        elif action == 8:
            task = node.manager.tiers.submit_prefetch_task(
                keys, DESC, select=prefix, on_done=lambda: answered.append(node.read(K[:1]))
            )
            if task is not None:
                accepted.append(task)
                if chance.random() < 0.3:
                    task.cancel()
        else:
            node.table.tick()
            node.manager.status()
            if chance.random() < 0.2:
                node.manager.clear()


def test_right_bytes_or_a_miss(make_node: MakeNode) -> None:
    node = make_node(tiers=[MemoryTier(), MemoryTier()], units=20, high_watermark=0.9, low_watermark=0.7)
    errors: list[BaseException] = []
    answered: list[object] = []
    accepted: list[object] = []

    def guarded(owner: int) -> None:
        try:
            live(node, owner, answered, accepted)
        except Exception as error:  # noqa: BLE001
            errors.append(error)

    clients = [threading.Thread(target=guarded, args=(owner,)) for owner in range(1, 5)]
    for client in clients:
        client.start()
    chance = random.Random(0)
    while any(client.is_alive() for client in clients):
        tier = chance.choice(node.tiers)
        fault = chance.choice(["down", "miscounts", "stall", "corrupt"])
        if fault == "stall":
            tier.stall("get", "put")
        elif fault == "corrupt":
            for key, value in list(tier.values.items())[:4]:
                tier.values[key] = value[:-1] + b"\xff"
        else:
            setattr(tier, fault, True)
        clients[0].join(0.01)
        tier.down = tier.miscounts = False
        tier.resume()
        clients[0].join(0.01)
    for client in clients:
        client.join()
    assert not errors, errors
    wait_until(lambda: all(task.done for task in accepted), what="all loads")  # type: ignore[attr-defined]
    assert len(answered) == len(accepted)
    wait_until(lambda: all(x["write_pending"] == 0 for x in node.manager.status()["l2"]), what="the write to L2")  # type: ignore[attr-defined]
    counters = node.l1("counters")
    assert isinstance(counters, dict)
    assert counters["stored"], "nothing was tested"
    assert counters["loaded"], "nothing was tested"
    assert node.l1("evictions"), "nothing was tested"
    assert node.l1("write_leases") == 0
    assert node.manager.clear().in_use == 0
    assert (node.l1("pins"), node.l1("used_bytes"), node.l1("fragmentation")) == (0, 0, 0.0)


KEYS = [packed_key(1)]


@pytest.fixture
def tier() -> MemoryTier:
    return MemoryTier()


@pytest.fixture
def store(tier: MemoryTier) -> L2Store:
    return L2Store(tier, timeout_s=5.0)


def ask(store: L2Store, times: int = 1) -> None:
    for _ in range(times):
        with pytest.raises(TierError):
            store.contains(KEYS)


def test_a_bug_is_told_with_class_call_and_traceback_once(
    tier: MemoryTier, store: L2Store, caplog: pytest.LogCaptureFixture
) -> None:
    tier.raises = RuntimeError("boom")
    ask(store, 2)
    told = [record for record in caplog.records if record.exc_info]
    assert [record.getMessage() for record in told] == [
        "tier memory: contains raised RuntimeError: boom, which is a bug in the plugin"
    ]
    assert told[0].levelno == logging.ERROR
    assert "_answer" in caplog.text, "the traceback shows the plugin's lines"
    assert (store.counters["bugs"], store.counters["errors"]) == (2, 2)
    assert "RuntimeError: boom, which is a bug in the plugin" in str(store.status()["last_error"])
    tier.raises = KeyError("other")
    ask(store)
    assert len([record for record in caplog.records if record.exc_info]) == 2


@pytest.mark.parametrize("error", [TierError("the store is gone", where="memory"), ConfigFieldError("bad", where="x")])
def test_an_error_of_the_framework_is_no_bug(
    error: Exception, tier: MemoryTier, store: L2Store, caplog: pytest.LogCaptureFixture
) -> None:
    tier.raises = error
    ask(store)
    assert (store.counters["bugs"], store.counters["errors"]) == (0, 1)
    assert not [record for record in caplog.records if record.exc_info]
    assert "bug" not in caplog.text
