"""Keys by group and objects by size, from clients that are wrong or malicious: each gets a typed answer at once, the
server goes on, and what others hold is unharmed."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest
from msgspec.structs import replace

from kvframework.api.keys import DIGEST_BYTES, CacheKey
from kvframework.api.layout import MAX_GROUPS, MAX_OBJECT_BYTES, KVLayout, LayerGroup
from kvframework.errors import KVFrameworkError
from kvframework.service.keys import MAX_OBJECTS, MAX_TOKENS
from kvframework.wire import messages as m
from kvframework.wire.messages import KeyGroup
from tests.support.server_process import ServerProcess, server_fixture
from tests.support.wire_client import WireClient

UNIT, NAMESPACE = 16, b"hostile-keys----"
ONE = bytes(DIGEST_BYTES)
# On a busy machine; alone no answer takes 100 ms.
AT_ONCE_S = 5.0


def group(nbytes: int = 4096, **fields: Any) -> LayerGroup:
    values = {"num_layers": 1, "block_size": UNIT, "heads": 1, "head_dim": nbytes, "dtype": "uint8", "planes": 1}
    return LayerGroup(**{**values, "axes": ("block", "dim"), "packing": "p", **fields})


def registration(groups: Any, **fields: Any) -> m.RegisterKvCache:
    layout = KVLayout("opaque", tuple(groups), chunk_tokens=UNIT)
    payload = m.RegisterKvCache(5, "hostile", 1, 0, NAMESPACE, "cpu_gather", layout)
    return replace(payload, **fields)


server = server_fixture(capacity="4MiB", scope="module")


@pytest.fixture(scope="module")
def client(server: ServerProcess) -> Iterator[WireClient]:
    with server.client() as connected:
        connected.call("REGISTER_KV_CACHE", registration([group(), group(8192)]))
        yield connected


def goes_on(server: ServerProcess) -> None:
    """It serves others, has no internal error to tell of, and holds nothing of those refused."""
    with server.client() as other:
        counters = other.status()["messaging"]["counters"]
        l1 = other.status()["l1"]
    assert not any(counters.get(name) for name in ("loop_errors", "tick_errors", "errors.run.handler")), counters
    assert (l1["write_leases"], l1["pin_leases"]) == (0, 0)
    assert "Traceback" not in server.log


def refused(client: WireClient, name: str, payload: Any, *codes: str) -> None:
    began = time.monotonic()
    with pytest.raises(KVFrameworkError) as caught:
        client.call(name, payload)
    assert time.monotonic() - began < AT_ONCE_S
    assert caught.value.code in codes
    assert len(caught.value.fact) < 500


def key(**fields: Any) -> CacheKey:
    values = {"model_name": "hostile", "world_size": 1, "worker_id": None, "namespace": NAMESPACE}
    return CacheKey(**{**values, "start": 0, "end": 4 * UNIT, "request_id": "r", **fields})


def pair(first: KeyGroup, second: KeyGroup | None = None) -> tuple[KeyGroup, KeyGroup]:
    return first, second or KeyGroup(ONE, UNIT)


RANGE, LARGE, MISMATCH, PAYLOAD = "request.range", "protocol.too_large", "request.namespace", "protocol.payload"
SETS: dict[str, tuple[CacheKey, tuple[KeyGroup, ...], str]] = {
    "a group too few": (key(), pair(KeyGroup(ONE, UNIT))[:1], MISMATCH),
    "a group too many": (key(), (*pair(KeyGroup(ONE, UNIT)), KeyGroup(ONE, UNIT)), MISMATCH),
    "no keys": (key(), (KeyGroup(b"", UNIT), KeyGroup(b"", UNIT)), LARGE),
    "too many keys": (key(end=UNIT * MAX_OBJECTS), pair(KeyGroup(ONE * MAX_OBJECTS, UNIT)), LARGE),
    "part of a digest": (key(), pair(KeyGroup(ONE[:-1], UNIT)), RANGE),
    "a digest and a byte": (key(), pair(KeyGroup(ONE + b"x", UNIT)), RANGE),
    "chunks of no whole unit": (key(), pair(KeyGroup(ONE, UNIT + 1)), RANGE),
    "chunks behind the end": (key(), pair(KeyGroup(ONE * 5, UNIT)), RANGE),
    "a first chunk behind the end": (key(), pair(KeyGroup(ONE, UNIT, first=1 << 62)), RANGE),
    "a start within a unit": (key(start=1), pair(KeyGroup(ONE, UNIT)), RANGE),
    "an end within a unit": (key(end=UNIT + 1), pair(KeyGroup(ONE, UNIT)), RANGE),
    "an end without end": (key(end=1 << 62), pair(KeyGroup(ONE, 1 << 62)), LARGE),
    "ends without number": (key(end=MAX_TOKENS), pair(KeyGroup(ONE, MAX_TOKENS, window=UNIT)), LARGE),
    "a start behind the end": (key(start=8 * UNIT), pair(KeyGroup(ONE, UNIT)), RANGE),
    "a negative start": (key(start=-UNIT), pair(KeyGroup(ONE, UNIT)), RANGE),
    "tokens besides": (key(tokens=bytes(4 * UNIT)), pair(KeyGroup(ONE, UNIT)), RANGE),
    "another namespace's model": (key(model_name="other"), pair(KeyGroup(ONE, UNIT)), MISMATCH),
    "a short namespace": (key(namespace=b"x"), pair(KeyGroup(ONE, UNIT)), MISMATCH),
    "a long name": (key(cache_salt="s" * 5000), pair(KeyGroup(ONE, UNIT)), LARGE),
    # What the decoder refuses.
    "no groups": (key(), (), PAYLOAD),
    "groups beyond number": (key(), (KeyGroup(ONE, UNIT),) * (MAX_GROUPS + 1), PAYLOAD),
    "chunks of no tokens": (key(), pair(KeyGroup(ONE, 0)), PAYLOAD),
    "a negative window": (key(), pair(KeyGroup(ONE, UNIT, window=-1)), PAYLOAD),
    "a negative first chunk": (key(), pair(KeyGroup(ONE, UNIT, first=-1)), PAYLOAD),
    "digests without end": (key(), pair(KeyGroup(bytes((1 << 20) + 32), UNIT)), PAYLOAD),
}


@pytest.mark.parametrize("case", SETS)
def test_keys_that_are_refused(server: ServerProcess, client: WireClient, case: str) -> None:
    named, groups, code = SETS[case]
    lookup = m.LookupKeys(named, grant=(5,), groups=groups)
    refused(client, "LOOKUP_KEYS", lookup, code)
    refused(client, "PREPARE_STORE_KEYS", m.PrepareKeys(replace(named, worker_id=0), 5, groups), code)
    goes_on(server)


def test_keys_of_others_instances_are_refused(server: ServerProcess, client: WireClient) -> None:
    groups = pair(KeyGroup(ONE, UNIT))
    with server.client() as stranger:
        refused(stranger, "PREPARE_STORE_KEYS", m.PrepareKeys(key(worker_id=0), 5, groups), "request.not_registered")
        refused(client, "PREPARE_STORE_KEYS", m.PrepareKeys(key(worker_id=0), 6, groups), "request.not_registered")
        found = stranger.call("LOOKUP_KEYS", m.LookupKeys(key(), grant=(5, 6), groups=groups))
    assert (found.hit_tokens, found.grants) == (0, ())
    goes_on(server)


def test_windows_and_alignments_without_end_are_an_answer(server: ServerProcess, client: WireClient) -> None:
    most = KeyGroup(ONE, UNIT, window=1 << 63, aligned=True)
    assert client.call("LOOKUP_KEYS", m.LookupKeys(key(), groups=(most, most))).hit_tokens == 0
    apart = [KeyGroup(ONE, UNIT * prime, aligned=True) for prime in (999983, 1000003)]
    assert client.call("LOOKUP_KEYS", m.LookupKeys(key(), groups=tuple(apart))).hit_tokens == 0
    goes_on(server)


def test_counts_stay_countable(server: ServerProcess, client: WireClient) -> None:
    """However often somebody asks for more tokens than there are."""
    for _ in range(5):
        refused(client, "LOOKUP", m.Lookup(key(end=(1 << 63) - 16)), LARGE)
        refused(client, "LOOKUP_KEYS", m.LookupKeys(key(end=(1 << 63) - 16), groups=pair(KeyGroup(ONE, UNIT))), LARGE)
    goes_on(server)


def stored(client: WireClient, chunks: range, end: int) -> None:
    packed = b"".join(chunk.to_bytes(DIGEST_BYTES, "little") for chunk in chunks)
    groups = tuple(KeyGroup(packed, UNIT, chunks.start) for _ in range(2))
    plan = client.call("PREPARE_STORE_KEYS", m.PrepareKeys(key(worker_id=0, end=end), 5, groups))
    assert len(plan.ranges) == 2 * len(chunks)
    client.call("COMMIT_STORE", m.Commit(plan.lease))


def test_chunks_from_the_middle_of_a_prompt_are_stored_and_are_no_hit_alone(
    server: ServerProcess, client: WireClient
) -> None:
    stored(client, range(20, 23), 23 * UNIT)
    digests = b"".join(chunk.to_bytes(DIGEST_BYTES, "little") for chunk in range(20, 23))
    for window in (0, UNIT):
        groups = tuple(KeyGroup(digests, UNIT, 20, window) for _ in range(2))
        assert client.call("LOOKUP_KEYS", m.LookupKeys(key(end=23 * UNIT), groups=groups)).hit_tokens == 0
        found = client.call("LOOKUP_KEYS", m.LookupKeys(key(start=20 * UNIT, end=23 * UNIT), groups=groups))
        assert found.hit_tokens == 3 * UNIT
        client.call("FREE_LOOKUP_LOCKS", m.TicketRef(found.ticket))
    goes_on(server)


LAYOUT = "request.layout"
LAYOUTS: dict[str, tuple[Any, str]] = {
    "objects of no bytes": ([group(0)], LAYOUT),
    "objects of fewer": ([group(-4096)], LAYOUT),
    "objects that are too large": ([group(num_layers=2, nbytes=MAX_OBJECT_BYTES)], LAYOUT),
    "sizes beyond numbers": ([group(1 << 62)], LAYOUT),
    "no groups": ([], LAYOUT),
    "groups beyond number": ([group()] * (MAX_GROUPS + 1), PAYLOAD),
    "blocks of no tokens": ([group(block_size=0)], LAYOUT),
    "a packing without end": ([group(packing="p" * (2 << 20))], LARGE),
}


@pytest.mark.parametrize("case", LAYOUTS)
def test_objects_by_size_that_are_refused(server: ServerProcess, client: WireClient, case: str) -> None:
    groups, code = LAYOUTS[case]
    refused(client, "REGISTER_KV_CACHE", registration(groups, instance_id=8), code, LAYOUT, PAYLOAD)
    goes_on(server)


@pytest.mark.parametrize("fields", [{"namespace": b""}, {"world_size": 0}, {"model_name": "m" * 5000}, {"rank": 7}])
def test_identities_that_are_refused(server: ServerProcess, client: WireClient, fields: dict[str, Any]) -> None:
    payload = registration([group()], instance_id=8, **fields)
    refused(client, "REGISTER_KV_CACHE", payload, MISMATCH, LARGE, PAYLOAD, LAYOUT)
    goes_on(server)
