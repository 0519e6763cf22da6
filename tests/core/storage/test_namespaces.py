"""Namespace records: one meaning for each namespace, and a value in L2 that comes back as it was."""

from __future__ import annotations

from unittest import mock

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvframework.api.keys import ObjectKey
from kvframework.api.layout import GroupDesc, MemoryLayoutDesc
from kvframework.api.plugin import DTYPE_BYTES
from kvframework.errors import NamespaceMismatch, RequestError
from kvframework.storage import namespaces
from kvframework.storage.namespaces import RECORD_BYTES, NamespaceRecord, decode_record

NAMESPACE = b"n" * 16
ORDER, OTHER = bytes(range(16)), bytes(range(1, 17))
DESC = MemoryLayoutDesc(16, (GroupDesc((1,), "int8"),))
groups = st.builds(
    GroupDesc,
    shape=st.lists(st.integers(1, 16), min_size=1, max_size=4).map(tuple),
    dtype=st.sampled_from(sorted(DTYPE_BYTES)),
    form=st.sampled_from(["canonical", "packed"]),
    # 256, 65536 and their like end in zero bytes.
    window=st.sampled_from([0, 1, 256, 4096, 65536, 1 << 24, 1 << 32]),
)
orders = st.dictionaries(
    st.integers(0, 63), st.binary(min_size=16, max_size=16).filter(any), max_size=namespaces.MAX_ORDERS
).map(lambda orders: tuple(namespaces.RankOrder(rank, order) for rank, order in sorted(orders.items())))
records = st.builds(
    NamespaceRecord,
    model_name=st.text(max_size=40),
    world_size=st.just(64),
    orders=orders,
    used_at=st.integers(0, 1 << 40),
    desc=st.builds(
        MemoryLayoutDesc, chunk_tokens=st.integers(1, 4096), groups=st.lists(groups, min_size=1, max_size=4).map(tuple)
    ),
)


def record(model: str = "llama", window: int = 0, shape: tuple[int, ...] = (2, 1, 16, 8)) -> NamespaceRecord:
    return NamespaceRecord(model, 1, MemoryLayoutDesc(16, (GroupDesc(shape, "float16", window=window),)))


def encoded(value: NamespaceRecord) -> bytes:
    known = namespaces.NamespaceRecords()
    known.add(NAMESPACE, value)
    with mock.patch("time.time", return_value=value.used_at):
        found = known.encoded(NAMESPACE)
    assert found is not None
    key, view = found
    assert key == namespaces.record_key(NAMESPACE)
    return bytes(view)


@given(records)
def test_comes_back_as_it_was(value: NamespaceRecord) -> None:
    packed = encoded(value)
    assert len(packed) == RECORD_BYTES
    assert decode_record(packed) == value


@pytest.mark.parametrize("window", [256, 4096, 65536, 1 << 24])
def test_a_record_whose_msgpack_ends_in_zero_bytes(window: int) -> None:
    value = record(window=window)
    assert msgspec.msgpack.encode(value).endswith(b"\0"), "the case that this test is for"
    assert decode_record(encoded(value)) == value


@given(st.binary(max_size=200))
def test_random_bytes_are_no_record(value: bytes) -> None:
    assert decode_record(value.ljust(RECORD_BYTES, b"\0")) is None


@pytest.mark.parametrize(
    "value",
    [
        NamespaceRecord("m", 1, MemoryLayoutDesc(16, ())),
        NamespaceRecord("m", 0, MemoryLayoutDesc(16, (GroupDesc((1,), "int8"),))),
        NamespaceRecord("m", 1, MemoryLayoutDesc(0, (GroupDesc((1,), "int8"),))),
        NamespaceRecord("m", 1, MemoryLayoutDesc(16, (GroupDesc((), "int8"),))),
        NamespaceRecord("m", 1, MemoryLayoutDesc(16, (GroupDesc((2, -1), "int8"),))),
        NamespaceRecord("m", 1, MemoryLayoutDesc(16, (GroupDesc((1 << 40,), "int8"),))),
        NamespaceRecord("m", 1, MemoryLayoutDesc(16, (GroupDesc((1,), "complex7"),))),
        NamespaceRecord("m", 1, MemoryLayoutDesc(16, (GroupDesc((1,), "int8", window=-1),))),
        NamespaceRecord("m", 1, DESC, orders=(namespaces.RankOrder(1, ORDER),)),
        NamespaceRecord("m", 1, DESC, orders=(namespaces.RankOrder(-1, ORDER),)),
        NamespaceRecord("m", 1, DESC, orders=(namespaces.RankOrder(0, ORDER), namespaces.RankOrder(0, ORDER))),
        NamespaceRecord("m", 1, DESC, orders=(namespaces.RankOrder(0, ORDER + b"+"),)),
    ],
)
def test_a_record_of_objects_that_cannot_be_is_a_miss(value: NamespaceRecord) -> None:
    packed = msgspec.msgpack.encode(value)
    assert decode_record(len(packed).to_bytes(4, "little") + packed) is None


@given(st.binary(min_size=16, max_size=16), st.integers(0, 1023), st.binary(min_size=32, max_size=32))
def test_no_object_has_a_records_key(namespace: bytes, rank: int, digest: bytes) -> None:
    assert namespaces.record_key(namespace) != ObjectKey(namespace, bytes(16), rank, 0, digest).pack()
    assert namespaces.record_key(namespace)[:16] == namespace


def test_the_same_meaning_again_is_fine_another_is_refused() -> None:
    known = namespaces.NamespaceRecords()
    known.add(NAMESPACE, record())
    known.add(NAMESPACE, record())
    for other in (record("mistral"), record(window=256), record(shape=(2, 1, 16, 4))):
        with pytest.raises(NamespaceMismatch):
            known.add(NAMESPACE, other)
    assert known.get(NAMESPACE) == record()
    assert len(known) == 1


def test_a_record_too_long_is_refused_and_leaves_nothing() -> None:
    known = namespaces.NamespaceRecords()
    with pytest.raises(RequestError):
        known.add(NAMESPACE, record("m" * RECORD_BYTES))
    assert known.get(NAMESPACE) is None
    assert known.encoded(NAMESPACE) is None


def test_the_namespace_registered_longest_ago_is_forgotten_first() -> None:
    records = namespaces.NamespaceRecords()
    record = NamespaceRecord("m", 1, MemoryLayoutDesc(16, (GroupDesc((2, 1, 16, 8), "float32"),)))
    names = [index.to_bytes(16, "little") for index in range(namespaces.MAX_NAMESPACES + 1)]
    for name in names[:-1]:
        records.add(name, record)
    records.add(names[0], record)
    records.add(names[-1], record)
    assert len(records) == namespaces.MAX_NAMESPACES
    assert records.get(names[0]) == record
    assert records.get(names[1]) is None
    records.retain(names[2])
    for name in (b"one more" * 2, b"another." * 2):
        records.add(name, record)
    assert records.get(names[2]) == record, "somebody holds it"
    assert records.get(names[3]) is None
    records.release(names[2])
    records.add(b"the last" * 2, record)
    assert records.get(names[2]) is None


def test_what_came_from_l2_gives_way_to_what_an_engine_registers() -> None:
    known = namespaces.NamespaceRecords()
    known.add(NAMESPACE, record("forged"), learned=True)
    known.add(NAMESPACE, record("forged again"), learned=True)
    assert known.get(NAMESPACE) == record("forged")
    known.add(NAMESPACE, record("llama"))
    assert known.get(NAMESPACE) == record("llama")
    for learned in (True, False):
        with pytest.raises(NamespaceMismatch):
            known.add(NAMESPACE, record("another"), learned=learned)
    assert known.get(NAMESPACE) == record("llama")


def test_orders_of_layers_are_of_ranks_and_travel_with_the_record() -> None:
    known, other = namespaces.NamespaceRecords(), namespaces.NamespaceRecords()
    known.add(NAMESPACE, NamespaceRecord("m", 3, DESC))
    known.order(NAMESPACE, 0, b"")
    known.order(NAMESPACE, 1, ORDER)
    known.order(NAMESPACE, 2, OTHER)
    assert known.orders(NAMESPACE) == {1: ORDER, 2: OTHER}
    found = known.encoded(NAMESPACE)
    record = decode_record(bytes(found[1]))
    assert record is not None
    other.add(NAMESPACE, record, learned=True)
    assert other.orders(NAMESPACE) == {1: ORDER, 2: OTHER}
    other.add(NAMESPACE, NamespaceRecord("m", 3, DESC))
    other.order(NAMESPACE, 1, b"")
    assert other.orders(NAMESPACE) == {2: OTHER}, "what another server knows of the other ranks stays"
    other.order(NAMESPACE, None, b"")
    assert other.orders(NAMESPACE) == {}


def test_what_came_from_l2_with_another_meaning_leaves_no_order() -> None:
    known = namespaces.NamespaceRecords()
    known.add(NAMESPACE, NamespaceRecord("forged", 1, DESC, orders=(namespaces.RankOrder(0, ORDER),)), learned=True)
    known.add(NAMESPACE, NamespaceRecord("m", 1, DESC))
    assert known.orders(NAMESPACE) == {}


def test_more_orders_than_a_record_holds_are_left_out() -> None:
    known = namespaces.NamespaceRecords()
    for name, kept in (("m", namespaces.MAX_ORDERS), ("m" * (RECORD_BYTES - 500), 0)):
        known = namespaces.NamespaceRecords()
        known.add(NAMESPACE, NamespaceRecord(name, 4096, DESC))
        for rank in range(1000):
            known.order(NAMESPACE, rank, ORDER)
        found = known.encoded(NAMESPACE)
        assert found[1].nbytes == RECORD_BYTES
        record = decode_record(bytes(found[1]))
        assert len(record.orders) == kept
        assert len(known.orders(NAMESPACE)) == 1000
