"""Scores of several nodes against a count block by block."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvf_hashers import Sha256
from kvf_route import prefix_hashes, scoring
from kvf_route.contents import Place
from kvf_route.events import TIERS
from kvf_route.index import Flags, Index, Keys
from kvframework.client.hashing import RequestHashes

SIZE = 4
BLOCKS = 90  # more than the first spans
TOKENS = prefix_hashes.packed(range(SIZE * BLOCKS))
OWNS = prefix_hashes.as_keys(prefix_hashes.chained(prefix_hashes.root(), TOKENS, SIZE))

# By node: places, each a tier and the first blocks it has but for one.
LEFT_OUT = st.integers(0, BLOCKS)
PLACES = st.lists(st.tuples(st.sampled_from(TIERS), st.integers(0, BLOCKS), LEFT_OUT), max_size=3)


def whole(made: scoring.Scoring) -> dict[str, scoring.Score]:
    *steps, scores = made
    assert set(steps) <= {None}
    return scores


@given(st.lists(PLACES, max_size=5))
def test_scores(nodes: list[list[tuple[str, int, int]]]) -> None:
    index = Index(5000)
    places: dict[str, list[Place]] = {}
    expected: dict[str, dict[str, int]] = {}
    for number, told in enumerate(nodes):
        held: list[tuple[str, set[int]]] = []
        for tier, end, left_out in told:
            place = index.open()
            blocks = [each for each in range(end) if each != left_out]
            index.store(place, np.array(blocks, np.uint64), OWNS[blocks])
            places.setdefault(f"n{number}", []).append(Place(place, b"", 0, SIZE, tier, None))
            held.append((tier, set(blocks)))
        score: dict[str, int] = {}
        for block in range(BLOCKS):
            tiers = [tier for tier, blocks in held if block in blocks]
            if not tiers:
                break
            best = min(tiers, key=TIERS.index)
            score[best] = score.get(best, 0) + SIZE
        places.setdefault(f"n{number}", [])
        expected[f"n{number}"] = score
    assert whole(scoring.by_tokens(index, places, TOKENS)) == expected


def test_of_several_sizes_of_blocks_the_best_counts() -> None:
    index = Index(5000)
    tokens = prefix_hashes.packed(range(64))
    places = []
    for size, tier, blocks in ((4, "gpu", 3), (32, "cpu", 2)):
        place = index.open()
        owns = prefix_hashes.as_keys(prefix_hashes.chained(prefix_hashes.root(), tokens, size))[:blocks]
        index.store(place, np.arange(blocks, dtype=np.uint64), owns)
        places.append(Place(place, b"", 0, size, tier, None))
    assert whole(scoring.by_tokens(index, {"a": places}, tokens)) == {"a": {"cpu": 64}}


def test_digests_find_the_chunks_whose_last_block_is_told() -> None:
    hashes = RequestHashes(Sha256(), 8, request_id="r")
    hashes.extend(list(range(32)))
    digests = hashes.digests(32)
    index = Index(100)
    place = index.open()
    named = [scoring.last_block(digests[at : at + 32], "m", "s", "") for at in range(0, 96, 32)]
    index.store(place, np.array(named, np.uint64), np.arange(1, 4, dtype=np.uint64))
    nodes = {"a": [Place(place, b"", 0, 4, "storage", "m")]}
    assert whole(scoring.by_digests(index, nodes, digests, 8, model="m", salt="s")) == {"a": {"storage": 24}}
    assert whole(scoring.by_digests(index, nodes, digests, 8, model="m", salt="t")) == {"a": {}}
    assert whole(scoring.by_digests(index, nodes, b"", 8, model="m")) == {"a": {}}


def test_what_many_nodes_have_is_looked_for_in_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    index = Index(20_000)
    asked: list[int] = []
    holds = index.holds

    def counted(places: Sequence[int], keys: Keys) -> Flags:
        asked.append(len(places) * len(keys))
        return holds(places, keys)

    monkeypatch.setattr(index, "holds", counted)
    monkeypatch.setattr(scoring, "_STEP", 200)
    nodes = {}
    for number in range(100):
        place = index.open()
        index.store(place, np.arange(BLOCKS, dtype=np.uint64), OWNS)
        nodes[f"n{number}"] = [Place(place, b"", 0, SIZE, "cpu", None)]
    assert whole(scoring.by_tokens(index, nodes, TOKENS)) == {node: {"cpu": SIZE * BLOCKS} for node in nodes}
    assert max(asked) <= 200
    assert sum(asked) == 100 * BLOCKS
