"""Why L1 lacks an object, how long it was unused, and how soon it was wanted again, at the storage manager."""

from __future__ import annotations

from collections.abc import Sequence

from kvframework.storage.l1.eviction_statistics import Cause
from kvframework.storage.manager import StorageManager
from kvframework.storage.namespaces import NamespaceRecord
from tests.core.storage.memory import packed_key
from tests.core.storage.node import DESC, MakeNode, Node

OTHER = bytes(16)


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def some(first: int, last: int) -> list[bytes]:
    return [packed_key(number) for number in range(first, last)]


def nodes(make_node: MakeNode, **options: object) -> tuple[Node, Clock]:
    clock = Clock()
    return make_node(**{"units": 4, "ghosts": 64, "tiers": [], "clock": clock, **options}), clock


def look_up(manager: StorageManager, keys: Sequence[bytes], hits: int) -> None:
    manager.table.looked_up(manager.table.row, keys[0][:40], [key[40:] for key in keys], hits, 16)


def test_an_object_that_made_room_has_its_time_its_idle_time_and_the_model_that_took_the_place(
    make_node: MakeNode,
) -> None:
    node, clock = nodes(make_node)
    node.manager.records.add(OTHER, NamespaceRecord("other/model", 1, DESC))
    node.write(some(0, 4))
    clock.now = 103.0
    node.table.tick()
    node.read(some(0, 1))
    clock.now = 110.0
    node.write([packed_key(number, namespace=OTHER) for number in range(4)])
    for number, idle_s in enumerate((7.0, 10.0)):
        ghost = node.table.absent(packed_key(number), 0)[0]
        assert ghost[:4] == (Cause.ROOM, 110.0, idle_s, "other/model")
    assert node.table.absent(packed_key(9), 0)[0] is None
    assert node.l1("evicted") == {"room": 4, "watermark": 0, "tenant": 0, "hinted": 0}
    assert histogram(node, "evicted_idle_s") == {6: 4}, "7 s and 10 s lie between 6.4 and 12.8"
    node.write(some(1, 2))
    assert node.table.absent(packed_key(1), 0)[0] is None, "it is here again"


def test_the_watermark_and_a_clear(make_node: MakeNode) -> None:
    node, _ = nodes(make_node, high_watermark=0.75, low_watermark=0.5)
    node.write(some(0, 4))
    node.table.tick()
    assert node.l1("evicted") == {"room": 0, "watermark": 2, "tenant": 0, "hinted": 0}
    node.manager.clear()
    causes = [ghost.cause for ghost in (node.table.absent(key, 0)[0] for key in some(0, 4)) if ghost is not None]
    assert sorted(causes) == [Cause.WATERMARK, Cause.WATERMARK, Cause.CLEARED, Cause.CLEARED]


def test_an_evicted_object_is_wanted_by_the_store_that_brings_it_back(make_node: MakeNode) -> None:
    node, clock = nodes(make_node)
    node.write(some(0, 4))
    node.write(some(10, 14))
    clock.now = 101.0
    node.write(some(0, 1))
    assert histogram(node, "wanted_after_eviction_s") == {3: 1}
    clock.now = 130.0
    node.write(some(1, 2))
    assert histogram(node, "wanted_after_eviction_s") == {3: 1, 8: 1}
    assert node.l1("ghosts") == {"held": 4, "most": 64, "bytes": 4 * 256}


def test_without_ghosts_evictions_are_counted(make_node: MakeNode) -> None:
    node, _ = nodes(make_node, ghosts=0)
    node.write(some(0, 4))
    node.write(some(10, 14))
    look_up(node.manager, some(0, 2), 0)
    assert node.table.absent(packed_key(0), 0)[0] is None
    assert node.l1("evicted") == {"room": 4, "watermark": 0, "tenant": 0, "hinted": 0}
    assert node.l1("ghosts") == {"held": 0, "most": 0, "bytes": 0}


def histogram(node: Node, name: str) -> dict[int, int]:
    """The counts that are not 0, by the number of the doubling."""
    shown = node.l1(name)
    assert isinstance(shown, dict)
    assert shown["first"] == 0.1
    return {at: count for at, count in enumerate(shown["counts"]) if count}
