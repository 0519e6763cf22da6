"""What a node lends: sealed as a tier would be given it, pinned until it is given back, and nothing that L1 lacks."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

import pytest

from kvframework.api.keys import ObjectKey
from kvframework.api.layout import GroupDesc, MemoryLayoutDesc
from kvframework.api.tier import Loan, NodeIdentity, Outcome, PackedKey
from kvframework.storage import namespaces
from kvframework.storage.manager import PeerExport
from tests.core.storage.memory import content
from tests.core.storage.node import SIZE, MakeNode, Node
from tests.core.storage.tier import MemoryTier

IDENTITY = NodeIdentity(bytes(16), 16, "sha256/0")


class OthersTier(MemoryTier):
    read_only = True

    told: object = {"nodes": []}
    was_told: PackedKey | None = None

    def rejected(self, key: PackedKey) -> None:
        self.was_told = key
        raise RuntimeError("a bug")

    def status(self) -> Mapping[str, object]:
        return self.told  # type: ignore[return-value]

    def problems(self) -> Sequence[str]:
        if self.down:
            raise RuntimeError("a bug")
        return ["nobody is there"]


@pytest.fixture
def keys() -> list[PackedKey]:
    return [ObjectKey(bytes(16), bytes(16), 0, 0, os.urandom(32)).pack() for _ in range(3)]


def received(loan: Loan, key: PackedKey, layout: bytes) -> bytes:
    """What a reader takes a loan for, which checks it."""
    header, value = loan.parts()
    place = memoryview(bytearray(value))
    assert loan.nbytes == namespaces.HEADER_BYTES + place.nbytes
    name, packed = namespaces.unseal(bytes(header), key, place, received=loan.nbytes, layout=layout)
    assert name == "none"
    return bytes(packed)


def test_an_object_is_lent_sealed_and_pinned(node: Node, keys: list[PackedKey]) -> None:
    lender = PeerExport(node.manager, IDENTITY)
    node.write(keys[:2])
    node.assert_idle()
    assert list(lender.holds(keys)) == [True, True, False]
    assert lender.lend(keys[2]) is None
    loan = lender.lend(keys[0])
    assert loan is not None
    with loan:
        assert received(loan, keys[0], bytes(16)) == content(keys[0], SIZE)
        assert node.l1("pins") == 1
        assert node.manager.clear().in_use == 1
        with pytest.raises(TypeError):
            loan.parts()[1][0] = 1
    loan.close()
    node.assert_idle()
    assert node.manager.clear().objects == 1
    assert (lender.arena_fd, lender.arena_bytes) == (node.table.arena_fd, node.table.capacity)


def test_what_is_being_written_is_not_lent(node: Node, keys: list[PackedKey]) -> None:
    lender = PeerExport(node.manager, IDENTITY)
    node.table.reserve([(keys[0], SIZE)], owner=1)
    assert list(lender.holds(keys[:1])) == [False]
    assert lender.lend(keys[0]) is None


def test_the_record_of_a_namespace_is_lent(node: Node) -> None:
    lender = PeerExport(node.manager, IDENTITY)
    key = namespaces.record_key(b"n" * 16)
    assert list(lender.holds([key])) == [False]
    assert lender.lend(key) is None
    desc = MemoryLayoutDesc(16, (GroupDesc((1, 1, 16, 4), "uint8"),))
    node.manager.records.add(b"n" * 16, namespaces.NamespaceRecord("llama", 1, desc))
    assert list(lender.holds([key])) == [True]
    assert lender.models() == {"llama": {b"n" * 16}}
    loan = lender.lend(key)
    assert loan is not None
    value = received(loan, key, node.manager.records.layout_of(b"n" * 16))
    loan.close()
    assert len(value) == namespaces.RECORD_BYTES
    record = namespaces.decode_record(value)
    assert record.model_name == "llama"


def test_a_tier_that_is_read_only_is_written_nothing(make_node: MakeNode, keys: list[PackedKey]) -> None:
    node = make_node(tiers=[OthersTier()])
    (store,) = node.stores
    (status,) = node.manager.status()["l2"]  # type: ignore[misc]
    assert status["write_policy"] == "none"
    node.write(keys[1:])
    node.tier.values[keys[0]] = b"damaged"
    assert node.load(keys[:1]).loaded == 0
    assert store.clear({keys[0]: 1}, lambda _key: True) == (0, 0)
    assert {name for name, _ in node.tier.calls} <= {"contains", "get", "ping"}
    assert node.tier.contains(keys[:1], deadline=float("inf")) == [Outcome.FOUND]
    assert store.counters["corrupt"] == 1
    assert node.tier.was_told == keys[0]  # type: ignore[attr-defined]


def test_the_problems_of_a_tier_are_in_its_status(make_node: MakeNode) -> None:
    node = make_node(tiers=[OthersTier()])
    (store,) = node.stores
    store._ask_for_facts()
    assert store.status()["problems"] == ["nobody is there"]
    node.tier.down = True
    store._ask_for_facts()
    assert store.status()["problems"] == ["the plugin's `problems` raised RuntimeError"]
    node.tier.down = False


@pytest.mark.parametrize("told", [{"a": object()}, {1: {2: "x" * (64 << 10)}}, ["no table"], None])
def test_what_a_tier_tells_is_in_its_status_and_a_bug_of_it_spoils_nothing(make_node: MakeNode, told: object) -> None:
    tier = OthersTier()
    (store,) = make_node(tiers=[tier]).stores
    store._ask_for_facts()
    assert store.status()["details"] == {"nodes": []}
    tier.told = told
    store._ask_for_facts()
    assert store.status()["details"] == {}
    problems = store.status()["problems"]
    assert problems[0] == "nobody is there"  # type: ignore[index]
    assert problems[1].startswith("the plugin's `status` raised")  # type: ignore[index]
