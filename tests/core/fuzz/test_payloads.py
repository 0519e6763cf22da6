"""Payloads and frames: whatever comes becomes the struct that was asked for, or a typed error, within bounds."""

from __future__ import annotations

from random import Random
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvframework.api.plugin import Message
from kvframework.errors import InvalidPayload, KVFrameworkError, ProtocolError
from kvframework.messaging.server.sessions import Introduction
from kvframework.wire import frames as wire_frames
from kvframework.wire import messages as m
from kvframework.wire.frames import ErrorPayload, decode, join, split
from kvframework.wire.messages import RetrievePlan, StorePlan
from kvframework.wire.protocol import REQUESTS, negotiate
from kvframework.wire.transfer_blocks import pack_indices, unpack_indices
from tests.core.fuzz.bounds import bounded, check_words
from tests.core.fuzz.effort import fuzzed
from tests.core.fuzz.mutation import array_of, as_tree, mutated_frames
from tests.core.fuzz.strategies import mangled, mutations, randoms, valid
from tests.core.golden.samples import required_fields

STRUCTS: list[type[Message]] = [
    *dict.fromkeys(struct for spec in REQUESTS.values() for struct in (spec.payload, spec.response)),
    ErrorPayload,
    Introduction,
]
structs = st.sampled_from(STRUCTS)


def decoded(payload: bytes, struct: type[Message]) -> Message | None:
    """None for what is refused, in a few words."""
    with bounded(len(payload)):
        try:
            value = decode(payload, struct, where="fuzz")
        except InvalidPayload as error:
            check_words(error)
            return None
    assert type(value) is struct
    return value


@fuzzed
@given(structs.flatmap(valid))
def test_what_was_sent_is_what_is_read(value: Message) -> None:
    payload = msgspec.msgpack.encode(value)
    again = decoded(payload, type(value))
    assert again is not None
    assert msgspec.msgpack.encode(again) == payload


@fuzzed
@given(structs.flatmap(lambda struct: st.tuples(st.just(struct), mutations(struct))))
def test_a_mutated_payload_is_a_value_or_refused(case: tuple[type[Message], bytes]) -> None:
    struct, payload = case
    value = decoded(payload, struct)
    if value is not None:
        assert decoded(msgspec.msgpack.encode(value), struct) is not None


@fuzzed
@given(structs, st.binary(max_size=300))
def test_any_bytes_are_a_value_or_refused(struct: type[Message], payload: bytes) -> None:
    decoded(payload, struct)


@fuzzed
@given(structs.flatmap(valid), mangled(st.just(b"LOOKUP")), randoms, st.lists(st.binary(max_size=20), max_size=3))
def test_mutated_frames_are_a_message_or_refused(
    payload: Message, name: bytes, rng: Random, buffers: list[bytes]
) -> None:
    frames = mutated_frames(rng, [*map(bytes, join(7, "LOOKUP", payload, buffers))])
    if len(frames) > 1 and rng.random() < 0.3:
        frames[1] = name
    with bounded(sum(map(len, frames)) + 16 * len(frames)):
        try:
            envelope = split([memoryview(frame) for frame in frames])
        except ProtocolError as error:
            check_words(error)
            return
    assert 0 <= envelope.request_id < 1 << 64
    assert envelope.type.isascii()
    assert [bytes(each) for each in envelope.buffers] == frames[3:]


@fuzzed
@given(valid(ErrorPayload) | mutations(ErrorPayload), st.sampled_from([*KVFrameworkError._by_code, "of.tomorrow"]))
def test_an_error_frame_is_an_error(payload: ErrorPayload | bytes, code: str) -> None:
    if isinstance(payload, bytes):
        read = decoded(payload, ErrorPayload)
        if read is None:
            return
        assert isinstance(read, ErrorPayload)
        payload = read
    for each in (payload, msgspec.structs.replace(payload, code=code)):
        error = wire_frames.error_from(each)
        assert isinstance(error, KVFrameworkError)
        assert len(str(error)) < 6 * wire_frames.MAX_ERROR_TEXT
        assert wire_frames.error_from(wire_frames.error_payload(error)).code == error.code


@fuzzed
@given(valid(m.Hello), st.text(max_size=10))
def test_a_hello_is_agreed_upon_or_refused(hello: m.Hello, fingerprint: str) -> None:
    try:
        version = negotiate(hello, fingerprint)
    except ProtocolError:
        assert not 1 <= hello.max_version >= hello.min_version <= m.PROTOCOL_VERSION or hello.hasher != fingerprint
        return
    assert hello.min_version <= version <= min(hello.max_version, m.PROTOCOL_VERSION)


@fuzzed
@given(st.binary(max_size=50), st.lists(st.integers(0, (1 << 32) - 1), max_size=20))
def test_packed_indices(packed: bytes, indices: list[int]) -> None:
    assert unpack_indices(pack_indices(indices), where="fuzz") == indices
    try:
        assert pack_indices(unpack_indices(packed, where="fuzz")) == packed
    except InvalidPayload:
        assert len(packed) % 4


def _largest(struct: type[Message], change: dict[str, Any]) -> bytes:
    return msgspec.msgpack.encode({**as_tree(required_fields(struct)), **change})


_GROUP = {"num_layers": 1, "block_size": 1, "heads": 1, "head_dim": 1, "dtype": ""}
_MANY = wire_frames.MAX_PAYLOAD_BYTES - 4096


def _groups(**fields: Any) -> dict[str, Any]:
    return {"layout": {"format": "", "groups": [{**_GROUP, **fields}]}}


@pytest.mark.parametrize(
    ("struct", "change"),
    [
        (m.RegisterKvCache, {"handles": array_of(b"\xc4\x00", _MANY // 2)}),
        (
            m.RegisterKvCache,
            {"layout": {"format": "", "groups": array_of(msgspec.msgpack.encode(_GROUP), _MANY // 60)}},
        ),
        (m.RegisterKvCache, _groups(layer_names=array_of(b"\xa0", _MANY))),
        (m.RegisterKvCache, _groups(strides=array_of(b"\x01", _MANY))),
        (m.TransferRequest, {"block_ids": array_of(b"\xc4\x00", _MANY // 2)}),
        (m.Prepare, {"first_chunks": array_of(b"\x00", _MANY)}),
        (m.Registered, {"desc": {"chunk_tokens": 1, "groups": [{"shape": array_of(b"\x01", _MANY), "dtype": ""}]}}),
        (m.HelloReply, {"transports": array_of(b"\xa0", _MANY)}),
        (m.GatheredBlock, {"groups": array_of(b"\xc4\x00", _MANY // 2)}),
        (StorePlan, {"ranges": array_of(b"\x94\x00\x00\x00\x00", _MANY // 5)}),
        (RetrievePlan, {"ranges": array_of(b"\x94\x00\x00\x00\x00", _MANY // 5)}),
    ],
    ids=lambda value: value.__name__ if isinstance(value, type) else "",
)
def test_a_list_that_is_far_too_long_costs_nothing(struct: type[Message], change: dict[str, Any]) -> None:
    payload = _largest(struct, change)
    with bounded(0), pytest.raises(InvalidPayload, match="length <="):
        decode(payload, struct, where="fuzz")


@pytest.mark.parametrize("plan", [StorePlan, RetrievePlan])
def test_the_longest_plan_is_read_in_little_memory(plan: type[Message]) -> None:
    payload = _largest(plan, {"ranges": array_of(b"\x94\x00\x00\x00\x00", 1 << 16)})
    assert decoded(payload, plan) is not None
