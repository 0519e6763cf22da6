"""The predicted hit rate of a larger L1 against a run with that capacity: lookups and stores of a trace."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from kvf_eviction import Lru
from kvframework.api.keys import PACKED_KEY_BYTES
from kvframework.storage.l1.allocator import ALIGNMENT
from kvframework.storage.l1.entries import StoredObject
from kvframework.storage.l1.eviction_statistics import FindRow
from kvframework.storage.manager import StorageManager
from kvframework.storage.table import Table
from kvframework.storage.tickets import LookupTickets, Wanted
from tests.core.storage.memory import PlainMemory

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
