"""Everything at once on a small L1 with a tier that comes and goes: right bytes or a miss, and nothing left over."""

from __future__ import annotations

import random
import threading

from kvframework.errors import LeaseUnknown
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
