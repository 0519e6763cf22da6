"""How users write what a request says of the future of its KV: what is read, and what is refused, by name."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvframework.api.keys import MAX_DURATION_S, MAX_RETAINS, PRIORITY, SOON_S, CacheKey, Retain, retain_of
from kvframework.errors import InvalidPayload, RequestError
from kvframework.wire import messages as m
from kvframework.wire.frames import decode


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (None, ()),
        ([], ()),
        ("done", (Retain("done"),)),
        ("soon", (Retain("keep", SOON_S, PRIORITY),)),
        (30, (Retain("keep", 30.0),)),
        (0.5, (Retain("keep", 0.5),)),
        ({"priority": 90}, (Retain("keep", SOON_S, 90),)),
        ({"priority": 0}, (Retain("done"),)),
        ({"priority": 90, "duration": 60}, (Retain("keep", 60.0, 90),)),
        ({"retain": "done", "start": 512}, (Retain("done", start=512),)),
        ({"retain": "done", "end": 512}, (Retain("done", start=0, end=512),)),
        ({"retain": 5, "start": 0, "end": None}, (Retain("keep", 5.0, start=0),)),
        (
            [{"start": 0, "end": 1024, "priority": 80, "duration": 600}, {"start": 1024, "retain": "done"}],
            (Retain("keep", 600.0, 80, 0, 1024), Retain("done", start=1024)),
        ),
        (["soon"], (Retain("keep"),)),
    ],
)
def test_what_is_written_is_read(value: object, expected: tuple[Retain, ...]) -> None:
    assert retain_of(value) == expected


@pytest.mark.parametrize(
    ("value", "named"),
    [
        ("later", "'later'"),
        (True, "True"),
        (-1, "-1"),
        (math.nan, "nan"),
        (math.inf, "inf"),
        (10**400, "1000"),
        (MAX_DURATION_S + 1, "3601"),
        ({}, "sets no hint"),
        ({"start": 0}, "sets no hint"),
        ({"ttl": 5}, "'ttl'"),
        ({"priority": 101}, "101"),
        ({"priority": 1.5}, "1.5"),
        ({"priority": True}, "True"),
        ({"duration": "5m"}, "'5m'"),
        ({"retain": "done", "priority": 5}, "either"),
        ({"retain": "done", "start": -1}, "-1"),
        ({"retain": "done", "start": "0"}, "'0'"),
        ({"retain": "done", "start": 1 << 50}, str(1 << 50)),
        ({"retain": "done", "start": 5, "end": 5}, "end is 5"),
        ({"retain": {"priority": 5}}, "priority"),
        (["done"] * (MAX_RETAINS + 1), f"{MAX_RETAINS + 1} ranges"),
        (b"done", "done"),
        (object(), "object"),
    ],
)
def test_what_is_wrong_is_named(value: object, named: str) -> None:
    with pytest.raises(RequestError) as caught:
        retain_of(value)
    assert named in str(caught.value)
    assert caught.value.where == "retain"
    assert "docs/hints.md" in caught.value.hint


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.sampled_from(["done", "soon"]),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(
            st.sampled_from(["retain", "priority", "duration", "start", "end", "more"]), inner, max_size=5
        )
    ),
    max_leaves=8,
)


@given(value=JSON)
def test_any_json_is_read_or_refused_and_what_is_read_passes_the_wire(value: object) -> None:
    try:
        retain = retain_of(value)
    except RequestError:
        return
    key = CacheKey("m", 1, None, bytes(16), 0, 256, "r", retain=retain)
    assert decode(msgspec.msgpack.encode(m.Lookup(key)), m.Lookup, where="LOOKUP").key == key


def test_a_key_without_a_hint_has_none_on_the_wire() -> None:
    key = CacheKey("m", 1, None, bytes(16), 0, 256, "r")
    assert "retain" not in msgspec.msgpack.decode(msgspec.msgpack.encode(key))


@pytest.mark.parametrize(
    "retain",
    [
        [{"what": "later"}],
        [{"what": "keep", "duration": math.nan}],
        [{"what": "keep", "duration": math.inf}],
        [{"what": "keep", "duration": -1.0}],
        [{"what": "keep", "duration": MAX_DURATION_S * 2}],
        [{"what": "keep", "priority": 0}],
        [{"what": "keep", "priority": 1 << 60}],
        [{"what": "done", "start": -1}],
        [{"what": "done", "start": 1 << 60}],
        [{"what": "done"}] * (MAX_RETAINS + 1),
        "done",
        [{}],
    ],
)
def test_the_wire_refuses_what_is_out_of_bounds(retain: Any) -> None:
    key = msgspec.to_builtins(CacheKey("m", 1, None, bytes(16), 0, 256, "r"), builtin_types=(bytes,))
    payload = msgspec.msgpack.encode({"key": {**key, "retain": retain}})
    with pytest.raises(InvalidPayload) as caught:
        decode(payload, m.Lookup, where="LOOKUP")
    assert "retain" in str(caught.value)
