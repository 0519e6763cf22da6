"""What server and copier say to each other: anything else ends the connection, by an error that both catch."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvf_devices import messages as m
from tests.core.fuzz.bounds import bounded
from tests.core.fuzz.effort import fuzzed
from tests.core.fuzz.strategies import mutations, valid

STRUCTS = [m.Start, m.Open, m.Close, m.Copy, m.Cancel, m.Ready, m.Opened, m.Closed, m.Done, m.Beat, m.Lost]
TO_COPIER = (m.Open, m.Close, m.Copy, m.Cancel, m.Start)
REFUSED = (msgspec.DecodeError, ValueError, RecursionError)
structs = st.sampled_from(STRUCTS)


def read(payload: bytes, *, to_copier: bool) -> object:
    """None for what is refused."""
    with bounded(len(payload)):
        try:
            return (m.to_copier if to_copier else m.from_copier)(payload)
        except REFUSED:
            return None


@fuzzed
@given(st.lists(structs.flatmap(valid), max_size=5), st.data())
def test_messages_arrive_however_they_are_cut(messages: list[msgspec.Struct], data: st.DataObject) -> None:
    stream = b"".join(map(m.framed, messages))  # type: ignore[arg-type]
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=6)))
    frames = m.Frames()
    payloads = [
        payload for a, b in zip([0, *cuts], [*cuts, len(stream)], strict=True) for payload in frames.feed(stream[a:b])
    ]
    again = [
        read(payload, to_copier=isinstance(each, TO_COPIER)) for each, payload in zip(messages, payloads, strict=True)
    ]
    assert list(map(repr, again)) == list(map(repr, messages)), "by their text, since NaN is not itself"


@fuzzed
@given(structs.flatmap(mutations) | st.binary(max_size=100), st.booleans())
def test_anything_else_is_refused(payload: bytes, to_copier: bool) -> None:
    message = read(payload, to_copier=to_copier)
    assert message is None or isinstance(message, TO_COPIER) == to_copier
    if isinstance(message, m.Copy):
        try:
            assert all(len(place) == 4 for place in map(msgspec.structs.astuple, m.ranges_of(message)))
            m.blocks_of(message)
        except ValueError:
            cut = len(message.ranges) % 32 or any(len(ids) % 4 for ids in message.block_ids)
            assert cut or len(message.block_ids) != len(message.per_object)


@fuzzed
@given(st.lists(st.binary(max_size=40), max_size=6))
def test_any_stream_is_cut_or_refused(parts: list[bytes]) -> None:
    frames = m.Frames()
    received = sum(map(len, parts))
    with bounded(received):
        try:
            payloads = [payload for part in parts for payload in frames.feed(part)]
        except ValueError:
            return
    assert sum(map(len, payloads)) + 4 * len(payloads) <= received


def test_a_length_beyond_all_bounds_is_refused_at_once() -> None:
    with pytest.raises(ValueError, match="a frame of"):
        list(m.Frames().feed(b"\xff\xff\xff\xff"))
