"""Why L1 lacks an object, how long it was unused, how soon it was wanted again, and the predicted hit rate of a larger
L1: against models, at the storage manager, and against runs with that capacity."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvf_eviction import Lru
from kvframework.api.keys import PACKED_KEY_BYTES
from kvframework.storage.l1.entries import ALIGNMENT, StoredObject
from kvframework.storage.l1.eviction_statistics import CapacityCurve, Cause, EvictionStatistics, FindRow
from kvframework.storage.manager import StorageManager
from kvframework.storage.namespaces import NamespaceRecord
from kvframework.storage.table import Table
from kvframework.storage.tickets import LookupTickets, Wanted
from tests.core.storage.memory import PlainMemory, packed_key
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


OWNER = 1
PREFIX = bytes(PACKED_KEY_BYTES - 32)
# Seconds and the blocks of the prompt.
Trace = Sequence[tuple[float, Sequence[int]]]


def replay(trace: Trace, units: int, ghosts: int = 1 << 16) -> tuple[float, list[tuple[int, float]]]:
    """The hit rate of an L1 of so many blocks, and the curve: (blocks, hit rate)."""
    now = [0.0]
    storage = StorageManager(
        Table(PlainMemory(units * ALIGNMENT), Lru(), ghosts=ghosts, clock=lambda: now[0]), threads=False
    )
    tickets = LookupTickets(storage, ticket_s=60.0)
    asked = hits = 0
    for now[0], blocks in trace:
        digests = [block.to_bytes(32, "big") for block in blocks]

        def find(row_of: FindRow, digests: list[bytes] = digests) -> tuple[int, list[StoredObject]]:
            row = row_of(PREFIX, digests)
            hit = row.index(None) if None in row else len(row)
            return hit, [stored for stored in row[:hit] if stored is not None]

        answer = tickets.look_up(OWNER, "", Wanted(PREFIX, digests, 1, find, lambda _: None))
        asked += len(digests)
        hits += answer.hit_tokens
        items = [(PREFIX + digest, ALIGNMENT) for digest in digests]
        lease = storage.table.reserve(items, owner=OWNER).lease
        if lease is not None:
            storage.table.commit(lease.id, owner=OWNER)
        if answer.ticket:
            tickets.free(answer.ticket, OWNER)
        storage.table.tick()
    l1 = storage.status()["l1"]
    assert isinstance(l1, dict)
    storage.close()
    return hits / asked, [(row["capacity_bytes"] // ALIGNMENT, row["hit_rate"]) for row in l1["more_capacity"]]


def zipf_trace() -> Trace:
    """Conversations that go on, on a few hundred system prompts of Zipf popularity."""
    chance = random.Random(20)
    weights = [1 / (rank + 1) for rank in range(300)]
    prompts = [[1000 * at + block for block in range(1 + at % 7)] for at in range(300)]
    fresh = 1 << 20
    open_ones: list[list[int]] = []
    trace = []
    for request in range(800):
        if open_ones and chance.random() < 0.4:
            blocks = open_ones.pop(chance.randrange(len(open_ones)))
        else:
            blocks = list(chance.choices(prompts, weights)[0])
        for _ in range(chance.randint(1, 4)):
            fresh += 1
            blocks = [*blocks, fresh]
        open_ones = [*open_ones[-60:], blocks]
        trace.append((request * 0.3, blocks))
    return trace


def test_a_larger_l1_has_the_hit_rate_that_the_curve_predicts() -> None:
    trace = zipf_trace()
    rate, curve = replay(trace, 150)
    assert curve[0] == (150, pytest.approx(rate))
    assert len(curve) == 13
    assert curve[-1][1] > rate + 0.1, "the trace shows nothing"
    for units, predicted in curve[2::5]:
        assert replay(trace, units, ghosts=0)[0] == pytest.approx(predicted, abs=0.02)


def test_the_curve_ends_where_ghosts_are_forgotten() -> None:
    rate, curve = replay(zipf_trace(), 150, ghosts=512)
    assert [units for units, _ in curve] == pytest.approx([150 * 2 ** (step / 4) for step in range(6)], abs=1)
    assert replay(zipf_trace(), 150, ghosts=0)[1] == [(150, rate)]


numbers = st.integers(0, 40)


@given(most=st.integers(0, 20), moves=st.lists(st.tuples(st.sampled_from(["left", "lost", "back"]), numbers)))
def test_the_newer_half_is_there_and_each_ghost_is_what_was_said(most: int, moves: list[tuple[str, int]]) -> None:
    now = [0.0]
    found, model = EvictionStatistics(1 << 20, most, lambda _: "m", lambda: now[0]), dict[int, tuple[Cause, float]]()
    added: dict[int, None] = {}  # in the order of their last addition, also of those that are back
    for move, number in moves:
        now[0] += 1.0
        key = packed_key(number)
        model.pop(number, None)
        match move:
            case "left" if found.ghost(key) is None:
                found.left(StoredObject(key, 0, ALIGNMENT), Cause.ROOM)
                model[number] = Cause.ROOM, now[0]
            case "lost":
                found.lost([key], Cause.REFUSED)
                model[number] = Cause.REFUSED, now[0]
            case _:
                found.back([key])
                assert found.ghost(key) is None
        if number in model:
            added.pop(number, None)
            added[number] = None
        newest = list(added)[-(most // 2) or len(added) :]
        assert all(found.ghost(packed_key(each)) is not None for each in newest if each in model)
    ghosts = {number: found.ghost(packed_key(number)) for number in range(41)}
    assert sum(ghost is not None for ghost in ghosts.values()) <= most + 1
    for number, ghost in ghosts.items():
        assert ghost is None or ghost[:2] == model[number]


@pytest.mark.parametrize("capacity", [32, 512])
@settings(max_examples=60, deadline=None)
@given(moves=st.lists(st.tuples(st.integers(1, 5), st.integers(0, 30)), max_size=200))
def test_a_capacity_holds_what_left_last_and_did_not_come_back(capacity: int, moves: list[tuple[int, int]]) -> None:
    curve = CapacityCurve(capacity)
    there: list[tuple[int, int]] = []
    for nbytes, back in moves:
        there.append((curve.evicted(nbytes), nbytes))
        if back < len(there):
            curve.back(*there.pop(-1 - back))
    larger = [capacity * (2 ** (step / 4) - 1) for step in range(13)]
    slack = 2 * (capacity // 32) + 6
    below = 0
    for segment, nbytes in reversed(there):
        below += nbytes
        step = curve.missed(segment, 1, 0)
        if step < 0:
            assert below > larger[-1] - slack
        else:
            assert below <= larger[step + 1] + slack
            assert step == 0 or below > larger[step] - slack
        assert curve.missed(math.inf, 1, 3) == 3, "what is here"


def test_the_oldest_segments_are_forgotten() -> None:
    curve = CapacityCurve(32)
    first = curve.evicted(1)
    for _ in range(4000):
        last = curve.evicted(1)
    assert curve.missed(first, 1, 0) == -1
    steps = [curve.missed(last - at, 0, 0) for at in range(300)]
    curve.back(first, 1)
    last = curve.evicted(1)
    assert [curve.missed(last - at, 0, 0) for at in range(300)] == steps
    assert [row["capacity_bytes"] for row in curve.rates(32)] == [32, 38, 45, 54, 64]
