"""What requests say of the future of their objects: which part a policy hears of which hint, and what leaves first."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvf_eviction import Lru
from kvframework.api.eviction import PackedKey, RequestFacts
from kvframework.api.keys import SALT_BYTES, ObjectKey, Retain
from kvframework.storage.l1.entries import ALIGNMENT
from kvframework.storage.l1.eviction import Tenant, runs_of
from kvframework.storage.l1.leases import PromptPart
from kvframework.storage.manager import StorageManager
from kvframework.storage.table import Table
from tests.core.storage.memory import ClockedTable, OrderedLru, PlainMemory, packed_key
from tests.core.storage.test_policy_calls import Told, store, table_of

K = [packed_key(number) for number in range(40)]
TOKENS = 16
DONE = (Retain("done"),)


def prompt(chunks: Sequence[int], *retain: Retain) -> PromptPart:
    return PromptPart(chunks, TOKENS, retain)


def look(table: ClockedTable, keys: Sequence[PackedKey], *retain: Retain, request_id: str = "r2") -> None:
    """A LOOKUP that finds all of `keys`, the beginning of a prompt, and its end."""
    found = table.find(keys)
    assert found is not None
    part = prompt(range(len(keys)), *retain)
    lease = table.pin_objects(found, owner=1, request_id=request_id, prompt=part)
    table.unpin(lease.id, owner=1)


def left(table: ClockedTable, keys: Sequence[PackedKey] = K) -> list[int]:
    return [number for number, key in enumerate(keys) if key not in table]


RETAINS = st.builds(
    Retain,
    what=st.sampled_from(["done", "keep"]),
    start=st.integers(0, 10 * TOKENS),
    end=st.none() | st.integers(11 * TOKENS, 14 * TOKENS),
)


@given(chunks=st.lists(st.integers(-1, 14), max_size=30), retains=st.lists(RETAINS, min_size=1, max_size=4))
def test_each_object_is_in_one_part_and_the_first_hint_of_all_its_chunk_counts(
    chunks: list[int], retains: list[Retain]
) -> None:
    runs = runs_of(chunks, TOKENS, retains, [False] * len(chunks))
    heard = ["?"] * len(chunks)
    for span, retain in runs:
        heard[span] = ["" if retain is None else retain.what] * (span.stop - span.start)
    assert [span.start for span, _ in runs] == sorted((span.start for span, _ in runs), reverse=True)
    for chunk, hint in zip(chunks, heard, strict=True):
        tokens = range(chunk * TOKENS, (chunk + 1) * TOKENS)
        fits = [
            each
            for each in retains
            if chunk >= 0
            and all(token >= (each.start or 0) and (each.end is None or token < each.end) for token in tokens)
        ]
        assert hint == (fits[0].what if fits else "")


@given(first=st.lists(st.booleans(), min_size=1), chunk=st.integers(-1, 9))
def test_of_a_request_that_is_done_others_may_use_what_it_is_not_the_first_to_store(
    first: list[bool], chunk: int
) -> None:
    runs = runs_of([chunk] * len(first), TOKENS, DONE, first)
    heard = [retain for span, retain in reversed(runs) for _ in first[span]]
    assert heard == [DONE[0] if each else None for each in first]
    keep = Retain("keep", 5.0, 7)
    assert runs_of([chunk] * len(first), TOKENS, (keep,), first) == [(slice(0, len(first)), keep)]


def test_a_policy_hears_of_each_part_the_last_one_first() -> None:
    policy = Told()
    table = table_of(policy, 8)
    hints = (Retain("keep", 60.0, 90, 0, 2 * TOKENS), Retain("done", start=3 * TOKENS))
    store(table, K[:5], now=7.0, prompt=prompt(range(5), *hints))
    inserts = [call for call in policy.last() if call[0] == "inserts"]
    facts = RequestFacts(use="store", at=7.0, request_id="r1", chunk_tokens=TOKENS, held=5 * ALIGNMENT)
    assert [(keys, chunks, told.hint, told.keep_s, told.priority) for _, keys, _, chunks, told in inserts] == [
        ([K[4], K[3]], [4, 3], "done", 0.0, 0),
        ([K[2]], [2], "", 0.0, 0),
        ([K[1], K[0]], [1, 0], "keep", 60.0, 90),
    ]
    assert [told.sizes for *_, told in inserts] == [(), (), [ALIGNMENT] * 2]
    assert inserts[1][4] == facts
    look(table, K[:4], *hints)
    assert [(keys, told.hint) for _, keys, told in policy.last()] == [
        ([K[3]], "done"),
        ([K[2]], ""),
        ([K[1], K[0]], "keep"),
    ]


def test_what_comes_again_though_it_was_done_is_no_more_done_by_the_requests_word() -> None:
    """So a system prompt that all requests store with "done" is lost once."""
    node = StorageManager(Table(PlainMemory(8 * ALIGNMENT), Lru(), ghosts=64), threads=False)

    def stored(first: int, end: int, *retain: Retain) -> None:
        keys = K[first:end]
        lease = node.table.reserve(
            [(key, ALIGNMENT) for key in keys],
            owner=1,
            request_id="r",
            lease_s=None,
            prompt=prompt(range(len(keys)), *retain),
        ).lease
        node.table.commit(lease.id, owner=1)

    stored(0, 4, *DONE)
    stored(10, 18)
    assert not any(node.table.which_present(K[:4]))
    stored(0, 4, *DONE)
    stored(20, 24)
    assert all(node.table.which_present(K[:4]))
    stored(30, 38)
    stored(0, 4, Retain("done", start=0))
    stored(20, 28)
    assert not any(node.table.which_present(K[:4])), "of a range it is taken at its word"
    node.close()


def test_what_is_done_leaves_before_what_others_used_longer_ago() -> None:
    """Across tenants the order is that of the last use."""
    salt = b"s" * SALT_BYTES
    theirs = [ObjectKey(bytes(16), salt, 0, 0, number.to_bytes(32, "big")).pack() for number in range(8)]
    table = table_of(Lru(), 8, tenants=[Tenant("other", 0, 8 * ALIGNMENT, Lru())])
    table.tenants.learn(salt, 1)
    store(table, K[:4], now=1.0)
    store(table, theirs[:4], now=5.0, prompt=prompt(range(4), *DONE))
    store(table, K[20:22], now=6.0)
    assert left(table, theirs[:4]) == [2, 3]
    assert left(table, K[:4]) == []


@pytest.mark.parametrize("policy", [OrderedLru, Told])
def test_a_policy_that_knows_no_hints_goes_on_as_before(policy: type[OrderedLru]) -> None:
    table = table_of(policy(), 4)
    store(table, K[:2], now=1.0)
    store(table, K[10:12], now=2.0, prompt=prompt(range(2), *DONE))
    store(table, K[20:21], now=3.0)
    assert left(table, K[:12]) == [1, *range(2, 10)]


@pytest.mark.parametrize("by", ["store", "lookup"])
@pytest.mark.parametrize("tenant", [False, True])
def test_a_few_large_objects_are_no_more_than_a_quarter_of_the_bytes(by: str, tenant: bool) -> None:
    """A tenth of the objects is most of the bytes: all of them are to be kept, and the others are in use."""
    policy = Lru()
    named = [Tenant("theirs", 0, 100 * ALIGNMENT, OrderedLru())] if tenant else []
    table = table_of(policy, 100, tenants=named)
    small, large = K[:20], K[20:24]
    keep = (Retain("keep", 60.0, 50),)
    for keys, units in (small, 1), (large, 20):
        items = [(key, units * ALIGNMENT) for key in keys]
        told = keep if by == "store" and keys is large else ()
        part = prompt(range(len(keys)), *told)
        result = table.reserve(items, owner=1, request_id="r", prompt=part)
        table.commit(result.lease.id, owner=1)
    next(iter(policy.victims()))  # L1 is full
    if by == "lookup":
        look(table, large, *keep)
    for _ in range(2):  # what is given back comes behind what that request uses
        look(table, small)
    order = list(policy.victims())
    assert len(order) == 24
    assert len([key for key in order[-4:] if key in large]) == 1, "one of them is a fifth of L1, two would be more"
