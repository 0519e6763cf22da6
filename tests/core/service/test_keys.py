"""Key resolution: stateless, one way for both forms of content, typed errors for what does not fit."""

from __future__ import annotations

import array

import pytest

from kvf_hashers.sha256 import Sha256
from kvframework.api.keys import CacheKey, ObjectKey, salt_digest
from kvframework.api.layout import GroupDesc, MemoryLayoutDesc
from kvframework.service.keys import KeyResolver, prompt_part
from kvframework.storage.l1.leases import PromptPart

DESC = MemoryLayoutDesc(4, (GroupDesc((2, 1, 4, 8), "float32"), GroupDesc((1, 3, 4, 8), "uint8")))
TOKENS = array.array("I", range(16)).tobytes()


def key(**fields: object) -> CacheKey:
    values: dict[str, object] = {
        "model_name": "m",
        "world_size": 2,
        "worker_id": 1,
        "namespace": b"n" * 16,
        "start": 0,
        "end": 16,
        "request_id": "r",
        "tokens": TOKENS,
        **fields,
    }
    return CacheKey(**values)  # type: ignore[arg-type]


@pytest.fixture
def resolver() -> KeyResolver:
    return KeyResolver(Sha256())


def test_tokens_and_their_digests_name_the_same_objects(resolver: KeyResolver) -> None:
    digests = Sha256().chunk_digests(TOKENS, 4)
    by_tokens = resolver.resolve(key(), DESC)
    by_digests = resolver.resolve(key(tokens=b"", digests=digests), DESC)
    assert by_tokens.flat == by_digests.flat
    assert len(by_tokens.flat) == 4 * 2
    first = ObjectKey.unpack(by_tokens.flat[1])
    assert first == ObjectKey(b"n" * 16, bytes(16), 1, 1, digests[:32])


def test_start_selects_and_keeps_the_prefix_in_the_digests(resolver: KeyResolver) -> None:
    assert resolver.resolve(key(start=8), DESC).flat == resolver.resolve(key(), DESC).flat[4:]


def test_without_worker_id_all_ranks_are_named(resolver: KeyResolver) -> None:
    rows = resolver.resolve(key(worker_id=None), DESC).by_row()
    assert list(rows) == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert rows[1, 0] == resolver.resolve(key(), DESC).by_row()[1, 0]


def test_a_salt_separates(resolver: KeyResolver) -> None:
    salted = resolver.resolve(key(cache_salt="tenant"), DESC).flat
    assert not set(salted) & set(resolver.resolve(key(), DESC).flat)
    assert ObjectKey.unpack(salted[0]).salt == salt_digest("tenant")


def test_an_order_of_layers_separates_its_rank_only() -> None:
    orders = {b"n" * 16: {1: bytes(range(16))}}
    ordered = KeyResolver(Sha256(), lambda namespace: orders.get(namespace, {}))
    plain = KeyResolver(Sha256())
    for salt in ("", "tenant"):
        rows, others = (each.resolve(key(worker_id=None, cache_salt=salt), DESC).by_row() for each in (ordered, plain))
        assert rows[0, 0] == others[0, 0]
        assert not set(rows[1, 0]) & set(others[1, 0])
        assert rows[1, 1] == ordered.resolve(key(cache_salt=salt), DESC).by_row()[1, 1]


def test_sizes_follow_the_layer_groups(resolver: KeyResolver) -> None:
    assert [size for _, size in resolver.resolve(key(), DESC).sized()[:3]] == [256, 96, 256]


def test_the_place_in_the_prompt_counts_chunks_from_its_beginning(resolver: KeyResolver) -> None:
    """Two layer groups make two objects a chunk."""
    whole, part = key(), key(start=8)
    grid = resolver.resolve(whole, DESC)
    assert prompt_part(whole, grid, range(len(grid.flat))) == PromptPart([0, 0, 1, 1, 2, 2, 3, 3], 4)
    grid = resolver.resolve(part, DESC)
    assert prompt_part(part, grid, [0, 3]) == PromptPart([2, 3], 4)
