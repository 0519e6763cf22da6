"""Two clients with two salts at a real server: each gets its share of L1, and is known by name, never by its salt."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
import pytest

from kvframework.api.keys import tenant_digest
from kvframework.wire import messages as m
from tests.core.server.in_process import serving
from tests.support.waiting import wait_until
from tests.support.wire_client import WireClient, key_for

CHUNK = 256
OBJECT_BYTES = 1 << 15
OBJECTS = 32  # in 1 MiB, of the tiny model
SALTS = {"search": "planted-salt-of-search", "batch": "planted-salt-of-batch"}
SETTINGS = (
    f'tenants.search.salts=["{tenant_digest(SALTS["search"])}"]',
    "tenants.search.min=25%",
    f'tenants.batch.salts=["{tenant_digest(SALTS["batch"])}"]',
    "tenants.batch.max=50%",
)


@pytest.fixture
def endpoint() -> Iterator[str]:
    with serving(*SETTINGS, capacity="1MiB") as server:
        yield server.endpoint


def prompt(number: int, chunks: int) -> list[int]:
    return [token for chunk in range(chunks) for token in [1000 * number + chunk] * CHUNK]


def stored(client: WireClient, registered: m.Registered, tokens: list[int], instance_id: int, salt: str) -> int:
    committed = client.store(key_for(registered, tokens, cache_salt=salt), b"x", instance_id)
    return 0 if committed is None else int(committed.outcome.stored)


def test_a_noisy_neighbour_takes_neither_the_guaranteed_share_nor_more_than_its_own(endpoint: str) -> None:
    with WireClient(endpoint) as search, WireClient(endpoint) as batch:
        of_search, of_batch = search.register(1), batch.register(2)
        kept = prompt(1, OBJECTS // 4)
        assert stored(search, of_search, kept, 1, SALTS["search"]) == OBJECTS // 4
        for number in range(2, 12):
            stored(batch, of_batch, prompt(number, 8), 2, SALTS["batch"])
        for number in range(12, 16):
            stored(batch, of_batch, prompt(number, 8), 2, "")
        reply = search.lookup(key_for(of_search, kept, cache_salt=SALTS["search"]))
        assert reply.hit_tokens == len(kept)
        document = search.status()
        assert document["l1"]["evicted"]["tenant"] >= 6 * 8, "batch replaced its own"
        assert batch.lookup(key_for(of_batch, kept, cache_salt=SALTS["batch"])).hit_tokens == 0


def test_who_uses_the_cache_is_in_the_status_by_name_and_without_a_salt(endpoint: str) -> None:
    with WireClient(endpoint) as search, WireClient(endpoint) as batch:
        of_search, of_batch = search.register(1), batch.register(2, model_name="big")
        stored(search, of_search, prompt(1, 4), 1, SALTS["search"])
        search.lookup(key_for(of_search, prompt(1, 5), cache_salt=SALTS["search"]))
        for number in range(2, 5):
            key = key_for(of_batch, prompt(number, 8), cache_salt=SALTS["batch"], model_name="big")
            assert batch.store(key, b"x", 2) is not None
        batch.lookup(msgspec.structs.replace(key, namespace=bytes(16)))
        text = batch.call("REPORT_STATUS", m.Empty()).document
        use = msgspec.json.decode(text)["use"]
    assert use["tenants"]["search"] == {
        "bytes": 4 * OBJECT_BYTES,
        "objects": 4,
        "lookups": 1,
        "asked_tokens": 5 * CHUNK,
        "hit_tokens": 4 * CHUNK,
        "stored_objects": 4,
        "evicted_objects": 0,
        "prefill_saved_s": 0.0,
        "limited": 0,
    }
    of_big = use["models"]["big"]
    assert (of_big["objects"], of_big["stored_objects"], of_big["evicted_objects"]) == (16, 24, 8)
    assert use["tenants"]["other"]["objects"] == 0
    assert use["models"]["other"]["lookups"] == 1, "of a namespace that is not known"
    assert set(use["namespaces"]) == {of_search.namespace.hex(), of_batch.namespace.hex(), "other"}
    ((engine, row),) = use["engines"].items()
    assert engine.startswith("test (")
    assert row["objects"] == 20
    (hot,) = use["hot_prefixes"]
    assert (hot["model"], hot["hit_tokens"], hot["count"], hot["error"]) == ("tiny", 4 * CHUNK, 1, 0)
    assert len(hot["prefix"]) == 8
    digest = key_for(of_search, prompt(1, 1)).digests.hex()
    for secret in (*SALTS.values(), digest, digest[:8], *map(tenant_digest, SALTS.values())):
        assert not secret or secret.encode() not in text


def test_what_an_engine_that_has_ended_stored_is_that_of_others(endpoint: str) -> None:
    with WireClient(endpoint) as watching:
        with WireClient(endpoint) as client:
            stored(client, client.register(), prompt(1, 4), 1, "")
            assert "other" not in client.status()["use"]["engines"]
        wait_until(
            lambda: {name: row["objects"] for name, row in watching.status()["use"]["engines"].items()} == {"other": 4},
            what="the end of the session",
        )
        watching.call("CLEAR", m.Clear())
        row = watching.status()["use"]["engines"]["other"]
    assert (row["objects"], row["bytes"], row["stored_objects"], row["evicted_objects"]) == (0, 0, 4, 0)


def test_finished_requests_have_the_name_of_the_tenant(endpoint: str) -> None:
    with WireClient(endpoint) as client:
        registered = client.register()
        for salt in (SALTS["search"], SALTS["batch"], "unknown", ""):
            client.lookup(key_for(registered, prompt(1, 2), cache_salt=salt))
        stored(client, registered, prompt(1, 2), 1, SALTS["batch"])
        records = client.call("RECENT", m.Recent()).records
    assert [(record.request, record.tenant) for record in records] == [
        ("LOOKUP", "search"),
        ("LOOKUP", "batch"),
        ("LOOKUP", ""),
        ("LOOKUP", ""),
        ("STORE", "batch"),
    ]
