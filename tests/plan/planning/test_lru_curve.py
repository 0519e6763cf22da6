"""The curve of LRU over all capacities against the server's own object table, capacity by capacity."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvf_eviction.lru import Lru
from kvf_plan.planning.lru_curve import lru_curve
from kvf_plan.planning.prompts import Prompts, prompts_of
from kvframework.api.keys import DIGEST_BYTES, PACKED_KEY_BYTES
from kvframework.storage.l1.entries import ALIGNMENT
from kvframework.storage.l1.leases import PromptPart
from kvframework.storage.l1.objects import ObjectTable
from tests.plan.planning.traces import MadeTrace, conversations, traces

_PREFIX = bytes(PACKED_KEY_BYTES - DIGEST_BYTES)


def table_hits(prompts: Prompts, chunks: int) -> list[int]:
    """What LOOKUPs find of each prompt in an L1 of so many chunks, if each stores what it can of its prompt."""
    now = 0.0
    table = ObjectTable(Lru(), nbytes=chunks * ALIGNMENT, clock=lambda: now)
    hits = []
    for number, prompt in enumerate(prompts.prompts):
        now = prompt.at
        table.expire()
        keys = [node.to_bytes(DIGEST_BYTES, "big") for node in prompt.nodes]
        row = table.row(_PREFIX, keys)
        hit = row.index(None) if None in row else len(row)
        found = [stored for stored in row[:hit] if stored is not None]
        hits.append(len(found))
        ticket = None
        if found:
            ticket = table.pin_objects(found, owner=1, request_id=str(number))
        items = [(_PREFIX + key, ALIGNMENT) for key in keys]
        part = PromptPart(range(len(keys)), prompts.chunk_tokens)
        lease = table.reserve(items, owner=1, request_id=str(number), prompt=part).lease
        if lease is not None:
            table.commit(lease.id, owner=1)
        if ticket is not None:
            table.unpin(ticket.id, owner=1)
    return hits


@pytest.mark.parametrize("seed", [1, 2])
def test_every_capacity_is_as_the_object_table(seed: int) -> None:
    prompts = prompts_of(conversations(300, seed), 16)
    curve = lru_curve(prompts)
    for chunks in (20, 25, 50, 100, 200, 400, 800):
        hits = table_hits(prompts, chunks)
        assert hits == [curve.hits_of(index, chunks) for index in range(len(hits))], chunks
        assert curve.token_hit_rate(chunks) == sum(hits) * prompts.chunk_tokens / prompts.tokens
    assert 0 < curve.token_hit_rate(20) < curve.token_hit_rate(100) < curve.token_hit_rate(10**9)


@given(traces(), st.integers(1, 40))
def test_it_is_the_stack_of_all_prefixes(trace: MadeTrace, chunks: int) -> None:
    prompts = prompts_of(trace, 4)
    curve = lru_curve(prompts)
    stack: list[int] = []
    hits = 0
    for prompt in prompts.prompts:
        found = 0
        while found < len(prompt.nodes) and prompt.nodes[found] in stack[:chunks]:
            found += 1
        hits += found
        stack = [*prompt.nodes, *(node for node in stack if node not in set(prompt.nodes))]
    assert curve.token_hit_rate(chunks) == (hits * prompts.chunk_tokens / prompts.tokens if prompts.uses else 0.0)


@given(traces(), st.floats(0.01, 1.0))
def test_the_least_capacity_for_a_hit_rate(trace: MadeTrace, wanted: float) -> None:
    curve = lru_curve(prompts_of(trace, 4))
    chunks = curve.chunks_for(wanted)
    if chunks is None:
        assert curve.token_hit_rate(10**9) < wanted
    else:
        assert curve.token_hit_rate(chunks) >= wanted
        assert not chunks or curve.token_hit_rate(chunks - 1) < wanted


def test_a_cache_of_nothing_has_nothing() -> None:
    curve = lru_curve(prompts_of([], 16))
    assert curve.token_hit_rate(5) == 0.0
