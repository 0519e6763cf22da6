"""What a lookup and a retrieve find, row by row, against the hit rule on all keys; and what it costs to find much.
Where instances of one namespace hold their layers: equal orders are equal whatever the names, others never are."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from types import FrameType

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvf_eviction import Lru
from kvf_hashers.sha256 import Sha256
from kvframework.api.layout import GroupDesc, KVLayout, LayerGroup, MemoryLayoutDesc
from kvframework.api.requests import CacheKey, ClientInfo, PackedKey
from kvframework.service.engine_driven import Grants, objects_of
from kvframework.service.keys import MAX_OBJECTS, KeyGrid, KeyResolver
from kvframework.service.lookups import Lookups
from kvframework.service.records import RequestLog
from kvframework.service.registration import layer_order, same_layers
from kvframework.storage.l1.entries import ALIGNMENT, StoredObject
from kvframework.storage.manager import StorageManager
from kvframework.storage.namespaces import NamespaceRecord
from kvframework.storage.table import Table
from kvframework.wire import messages as m
from tests.core.storage.memory import PlainMemory

CHUNK = 4
NAMESPACE = b"n" * 16
RANKS = 8


def grid_of(chunks: int, windows: Sequence[int], *, ranks: int = RANKS, rank: int | None = None) -> KeyGrid:
    return KeyResolver(Sha256()).resolve(key_of(chunks, ranks=ranks, rank=rank), desc_of(windows))


def desc_of(windows: Sequence[int]) -> MemoryLayoutDesc:
    return MemoryLayoutDesc(CHUNK, tuple(GroupDesc((1, 1, CHUNK, 8), "uint8", window=window) for window in windows))


def key_of(chunks: int, *, ranks: int = RANKS, rank: int | None = None) -> CacheKey:
    digests = b"".join(number.to_bytes(32, "big") for number in range(chunks))
    return CacheKey("m", ranks, rank, NAMESPACE, 0, chunks * CHUNK, "r", digests=digests)


@given(
    st.integers(1, 3), st.lists(st.sampled_from([0, 0, 1, 5, 9]), min_size=1, max_size=3), st.integers(1, 6), st.data()
)
@settings(deadline=None)
def test_it_finds_what_the_hit_rule_says_of_all_keys(
    ranks: int, windows: list[int], chunks: int, data: st.DataObject
) -> None:
    grid = grid_of(chunks, windows, ranks=ranks)
    lost = data.draw(st.sets(st.integers(0, len(grid.flat) - 1), max_size=len(grid.flat) // 2))
    here = {key: index for index, key in enumerate(grid.flat) if index not in lost}
    asked: list[PackedKey] = []

    def row_of(prefix: bytes, digests: Sequence[bytes]) -> list[PackedKey | None]:
        keys = [prefix + digest for digest in digests]
        asked.extend(keys)
        return [key if key in here else None for key in keys]

    hit = grid.hit([key in here for key in grid.flat])
    needed = [grid.flat[index] for index in grid.needed(hit)]
    assert grid.nbytes(hit) == sum(map(grid.nbytes_of, grid.needed(hit)))
    assert grid.find(row_of) == (hit, needed)
    assert len(asked) == len(set(asked)), "an object is asked for twice"
    whole = grid.whole(row_of)
    wanted = [grid.flat[index] for index in grid.needed(grid.chunks)]
    assert whole == (wanted if all(key in here for key in wanted) else None)
    if hit < grid.chunks:
        rows = len(grid.prefixes)
        missing = [index for index in grid.needed(grid.chunks) if grid.flat[index] not in here]
        found = grid.first_missing(row_of, hit)
        assert found[0] == missing[0] // rows
        assert found[1] in [grid.flat[index] for index in missing if index // rows == found[0]]


@given(
    st.integers(1, 4), st.lists(st.sampled_from([0, 0, 1, 5, 9]), min_size=1, max_size=3), st.integers(1, 6), st.data()
)
@settings(deadline=None)
def test_a_rank_is_granted_what_its_own_key_would_find(
    ranks: int, windows: list[int], chunks: int, data: st.DataObject
) -> None:
    grid = grid_of(chunks, windows, ranks=ranks)
    held = data.draw(st.permutations(range(ranks)))[: data.draw(st.integers(1, ranks))]
    hit = data.draw(st.integers(1, chunks))
    own = KeyResolver(Sha256()).resolve(key_of(hit, ranks=ranks, rank=held[0]), desc_of(windows), held)
    found = [StoredObject(grid.flat[index], index, 1) for index in grid.needed(hit)]
    granted, positions = objects_of(held, grid, hit, found)
    assert [stored.key for stored in granted] == [own.flat[index] for index in own.needed(hit)]
    assert list(positions or range(len(granted))) == own.needed(hit)


def test_a_miss_asks_one_row_only() -> None:
    asked: list[bytes] = []

    def row_of(prefix: bytes, digests: Sequence[bytes]) -> list[object | None]:
        asked.append(prefix)
        return [None] * len(digests)

    assert grid_of(4, [9, 0]).find(row_of) == (0, [])
    assert len(asked) == 1


class Client(ClientInfo):
    session_id, pid, name, local = 1, 1, "test", True


def calls(act: Callable[[], object]) -> int:
    """Calls of Python functions."""
    count = 0

    def called(_frame: FrameType, event: str, _arg: object) -> None:
        nonlocal count
        count += event == "call"

    sys.setprofile(called)
    try:
        act()
    finally:
        sys.setprofile(None)
    return count


def test_a_lookup_of_as_many_objects_as_may_be_calls_nothing_for_each_of_them() -> None:
    """LOOKUP, FREE_LOOKUP_LOCKS and what PREPARE_RETRIEVE pins: of 32,768 objects the same as of eight."""
    storage = StorageManager(Table(PlainMemory(MAX_OBJECTS * ALIGNMENT), Lru()), threads=False)
    resolver, client = KeyResolver(Sha256()), Client()
    requests = RequestLog()
    lookups = Lookups(storage, resolver, requests, Grants({}, storage, requests), ticket_s=100.0)
    storage.records.add(NAMESPACE, NamespaceRecord("m", RANKS, desc_of([0])))
    most = MAX_OBJECTS // RANKS
    for rank in range(RANKS):
        grid = grid_of(most, [0], rank=rank)
        lease = storage.table.reserve(grid.sized(), owner=1, request_id="r", lease_s=None).lease
        assert len(storage.table.commit(lease.id, owner=1)) == most
    counted = {}
    for chunks in (1, most):
        lookup, whole, tickets = m.Lookup(key_of(chunks)), grid_of(chunks, [0]), list[str]()

        def look(lookup: m.Lookup = lookup, tickets: list[str] = tickets) -> None:
            reply = lookups._lookup(client, lookup, ())
            assert reply.hit_tokens == lookup.key.end
            tickets.append(reply.ticket)

        def free(tickets: list[str] = tickets) -> None:
            assert lookups._free(client, m.TicketRef(tickets.pop()), ()).pins % RANKS == 0

        def retrieve(whole: KeyGrid = whole) -> None:
            assert storage.table.pin_found(whole.whole, owner=1, request_id="r", lease_s=None) is not None

        counted[chunks] = calls(look), calls(free), calls(retrieve)
    for few, many in zip(counted[1], counted[most], strict=True):
        assert many <= few + 5
    storage.close()


def test_a_tick_ends_tickets_until_it_has_unpinned_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvframework.storage.tickets.UNPIN_AT_ONCE", RANKS + 1)
    now = [0.0]
    storage = StorageManager(Table(PlainMemory(64 * ALIGNMENT), Lru(), clock=lambda: now[0]), threads=False)
    lookups = Lookups(storage, KeyResolver(Sha256()), RequestLog(), Grants({}, storage, RequestLog()), ticket_s=10.0)
    storage.records.add(NAMESPACE, NamespaceRecord("m", RANKS, desc_of([0])))
    lease = storage.table.reserve(grid_of(1, [0]).sized(), owner=1, request_id="r", lease_s=None).lease
    storage.table.commit(lease.id, owner=1)
    for _ in range(5):
        lookups._lookup(Client(), m.Lookup(key_of(1)), ())
    now[0] = 10.0
    left = []
    for _ in range(3):
        lookups.tickets.expire()
        left.append(len(lookups.tickets))
    assert left == [3, 1, 0]
    assert lookups.status()["lookups"] == 5
    storage.close()


def group_of(names: list[str]) -> LayerGroup:
    return LayerGroup(max(len(names), 1), 16, 1, 8, "int8", layer_names=tuple(names))


def layout(*groups: list[str]) -> KVLayout:
    return KVLayout("paged", tuple(group_of(names) for names in groups))


def numbers(*groups: list[int], form: str = "model.layers.{}.attn") -> KVLayout:
    return layout(*([form.format(number) for number in group] for group in groups))


orders = st.permutations(range(12)).flatmap(
    lambda order: st.lists(st.integers(0, 12), max_size=2).map(
        lambda cuts: [order[begin:end] for begin, end in zip([0, *sorted(cuts)], [*sorted(cuts), 12], strict=True)]
    )
)
FORMS = ("model.layers.{}.attn", "{}", "h{}_k", "layer_{:02}")


@given(orders, orders, st.sampled_from(FORMS), st.sampled_from(FORMS))
def test_equal_orders_are_equal_whatever_the_names(
    mine: list[list[int]], theirs: list[list[int]], form: str, other: str
) -> None:
    one, two = numbers(*mine, form=form), numbers(*theirs, form=other)
    same = mine == theirs
    if [len(group) for group in mine] == [len(group) for group in theirs]:
        assert (layer_order(one) == layer_order(two)) == same
        assert same_layers(one, two) == same
    assert same_layers(one, one)


@given(
    st.lists(st.lists(st.text(max_size=6), max_size=5), max_size=4), st.lists(st.lists(st.text(max_size=6)), max_size=4)
)
def test_any_names_have_an_order(mine: list[list[str]], theirs: list[list[str]]) -> None:
    one, two = layout(*mine), layout(*theirs)
    assert len(layer_order(one)) in (0, 16)
    assert same_layers(one, two) == same_layers(two, one)


@pytest.mark.parametrize("groups", [[[*range(12)]], [[0, 1], [2, 3]], [[], [0, 1]], [[]]])
def test_the_order_of_the_names_is_told_by_nothing(groups: list[list[int]]) -> None:
    assert layer_order(numbers(*groups)) == b""


def test_a_number_of_any_length_is_one() -> None:
    long = "9" * 100_000
    assert layer_order(layout(["0" + long, long + "0"])) == b""
    assert layer_order(layout([long + "0", long])) != b""


@pytest.mark.parametrize(
    ("mine", "theirs", "same"),
    [
        (numbers([0, 1], [2, 3]), numbers([0, 1], [2, 3]), True),
        (numbers([0, 1, 2]), numbers([0, 2, 1]), False),
        (numbers([0, 1], [2, 3]), numbers([0, 2], [1, 3]), False),
        (numbers([0, 1]), numbers([1, 2]), False),
        (numbers([0, 1], [2, 3]), numbers([0, 2], [1, 3], form="{}"), False),
        # Layers without names are taken for ordered ones.
        (layout([]), numbers([0, 1, 2]), True),
        (layout([]), numbers([0, 2, 1]), False),
        # Keys and values in groups of their own: one name stands in two groups.
        (numbers([0, 1], [0, 1]), numbers([0, 1], [0, 1]), True),
        (numbers([0, 1], [0, 1]), numbers([0, 1], [1, 0]), False),
        # One tensor for all layers has one name.
        (layout(["kv", "kv"]), numbers([0, 1]), True),
    ],
)
def test_the_same_layers_in_the_same_places(mine: KVLayout, theirs: KVLayout, same: bool) -> None:
    assert same_layers(mine, theirs) == same
