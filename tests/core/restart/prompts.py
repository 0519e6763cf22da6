"""What these tests store, and the proof that nothing else is found."""

from __future__ import annotations

from kvframework.wire import messages as m
from tests.support.wire_client import WireClient, key_for

OBJECT = 32768
OBJECTS = 32
CAPACITY = f"{OBJECT * OBJECTS}B"


def fill_of(number: int) -> bytes:
    return f"object {number:06} ".encode()


def overwrite_all(client: WireClient, instance: int, first: int = 1000) -> set[int]:
    """Store prompts of one chunk until the arena has been given out more than once; return the offsets that they got.
    Every one that is still there has its bytes."""
    registered = client.register(instance)
    offsets = set()
    numbers = range(first, first + 3 * OBJECTS)
    for number in numbers:
        key = key_for(registered, [number] * 256)
        plan = client.prepare_store(key, instance)
        offsets |= {place.offset for place in plan.ranges}
        client.write(plan, fill_of(number))
        client.call("COMMIT_STORE", m.LeaseRef(plan.lease))
    assert hits(client, instance + 1000, numbers) > OBJECTS // 4
    return offsets


def store(client: WireClient, instance: int, numbers: range) -> None:
    registered = client.register(instance)
    for number in numbers:
        client.store(key_for(registered, [number] * 256), fill_of(number), instance)


def hits(client: WireClient, instance: int, numbers: range) -> int:
    """Return how many of the prompts are found, each with its bytes."""
    registered, count = client.register(instance), 0
    for number in numbers:
        found = client.retrieve(key_for(registered, [number] * 256), instance)
        count += found is not None
        assert found is None or found == (fill_of(number) * OBJECT)[:OBJECT], f"wrong bytes in object {number}"
    return count
