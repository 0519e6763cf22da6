"""Planted causes of misses, each of them named rightly: by a real server process, to clients of the wire and of the
library."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvframework.api.keys import CacheKey
from kvframework.client import KVClient, RequestHashes, SchedulerAdapter
from kvframework.wire import messages as m
from tests.support.held_server import HeldServer
from tests.support.ports import free_port
from tests.support.server_process import ServerProcess, server_fixture
from tests.support.waiting import wait_until
from tests.support.wire_client import WireClient, key_for

TOKENS = list(range(1024))
CHUNK = 256
_firsts = itertools.count(10_000, 1024)
OBJECT_BYTES = 1 << 15  # of the tiny model
OBJECTS = 32  # in 1 MiB


# L1 holds `OBJECTS` chunks, and there is no tier.
small = server_fixture("server.store_share=0.25", capacity="1MiB", scope="module")


@pytest.fixture
def client(small: ServerProcess) -> Iterator[WireClient]:
    with small.client() as connected:
        connected.call("CLEAR", m.Clear())
        yield connected


@pytest.fixture
def tokens() -> list[int]:
    """A prompt of which the server has never heard."""
    first = next(_firsts)
    return list(range(first, first + 1024))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("l2")


@pytest.fixture(scope="module")
def disk(folder: Path) -> Iterator[ServerProcess]:
    """Behind L1 there is a filesystem tier."""
    with ServerProcess("l2.0.use=filesystem", f"l2.0.path={folder}", "l2.0.capacity=1GiB") as server:
        yield server


def recent(client: WireClient, after: int = 0) -> list[m.Finished]:
    return list(client.call("RECENT", m.Recent(after)).records)


def missed(client: WireClient, registered: m.Registered, tokens: list[int], **fields: Any) -> m.Finished:
    return missed_key(client, key_for(registered, tokens, **fields))


def missed_key(client: WireClient, key: CacheKey) -> m.Finished:
    """Look up, wait for the end, and return the record, which the counters agree with."""
    before = client.status()["lookups"]["misses"]
    client.settled(client.lookup(key))
    record = recent(client)[-1]
    after = client.status()["lookups"]["misses"]
    assert {name: after[name] - before[name] for name in after if after[name] > before[name]} == {record.reason: 1}
    assert (record.request, record.asked_tokens) == ("LOOKUP", key.end - key.start)
    return record


@contextlib.contextmanager
def scheduler(server: ServerProcess, namespace: bytes) -> Iterator[tuple[KVClient, SchedulerAdapter]]:
    with server.engine_client() as connected:
        yield connected, SchedulerAdapter(connected, model_name="tiny", namespace=namespace, chunk_tokens=CHUNK)


def hashes(client: KVClient, tokens: list[int], request_id: str) -> RequestHashes:
    made = RequestHashes(client.hasher, CHUNK, request_id=request_id)
    made.extend(tokens)
    return made


def fill(client: WireClient, registered: m.Registered, first: int, instance_id: int = 1, **fields: Any) -> None:
    """Store as many chunks as L1 has room for."""
    tokens = [first] * (OBJECTS * CHUNK)
    committed = client.store(key_for(registered, tokens, **fields), b"x", instance_id)
    assert committed.outcome.stored == OBJECTS


def test_a_prompt_that_is_new_was_never_stored(client: WireClient, tokens: list[int]) -> None:
    record = missed(client, client.register(), tokens, request_id="new")
    assert (record.reason, record.outcome, record.missing, record.request_id) == ("never_stored", "miss", 0, "new")
    assert (record.model, record.client, record.l1_tokens) == ("tiny", "test", 0)


def test_the_end_of_a_prompt_that_is_new_was_never_stored(client: WireClient, tokens: list[int]) -> None:
    registered = client.register()
    client.store(key_for(registered, tokens[:768]), b"x")
    record = missed(client, registered, tokens, start=256)
    assert (record.reason, record.outcome) == ("never_stored", "partial")
    assert (record.l1_tokens, record.missing, record.chunk_tokens) == (512, 768, CHUNK)


def test_a_rank_that_has_not_stored_is_named(client: WireClient, tokens: list[int]) -> None:
    registered = client.register(world_size=2)
    client.store(key_for(registered, tokens, world_size=2), b"x")
    record = missed(client, registered, tokens, world_size=2)
    assert (record.reason, record.detail[:30]) == ("never_stored", "rank 1 did not store the chunk")


def test_an_eviction_has_its_time_and_the_model_that_took_the_place(client: WireClient, tokens: list[int]) -> None:
    registered = client.register()
    client.store(key_for(registered, tokens), b"x")
    other = client.register(2, model_name="other")
    fill(client, other, 7, 2, model_name="other")
    record = missed(client, registered, tokens)
    assert (record.reason, record.by, record.missing) == ("evicted", "other", 0)
    assert record.idle_s >= 0
    assert abs(record.at - record.cause_at) < 300


def test_a_store_into_an_l1_that_is_all_pinned_was_dropped(client: WireClient, tokens: list[int]) -> None:
    registered = client.register()
    fill(client, registered, 7)
    held = client.lookup(key_for(registered, [7] * (OBJECTS * CHUNK)))
    assert held.hit_tokens == OBJECTS * CHUNK
    assert client.store(key_for(registered, tokens), b"x") is None
    record = missed(client, registered, tokens)
    assert (record.reason, record.outcome) == ("dropped_full", "miss")
    client.call("FREE_LOOKUP_LOCKS", m.TicketRef(held.ticket))


def test_what_exceeds_a_clients_share_was_dropped(small: ServerProcess, client: WireClient) -> None:
    registered = client.register()
    tokens = [8] * (OBJECTS // 2 * CHUNK)
    with small.client() as other:
        other.register(2)
        client.store(key_for(registered, tokens), b"x")
    record = missed(client, registered, tokens)
    assert (record.reason, record.l1_tokens) == ("dropped_share", OBJECTS // 4 * CHUNK)


@pytest.mark.parametrize(
    ("fields", "difference"),
    [
        ({"dtype_str": "float16"}, "stored with dtype float32, not float16"),
        ({"world_size": 2}, "stored with world size 1, asked with 2"),
        ({"num_layers": 4}, "stored with shape 2x2x256x8, not 2x4x256x8"),
        ({"model_name": "/models/tiny"}, "stored under the model name 'tiny'"),
    ],
)
def test_another_namespace_is_told_with_its_difference(
    client: WireClient, fields: dict[str, Any], difference: str, tokens: list[int]
) -> None:
    client.store(key_for(client.register(), tokens), b"x")
    other = client.register(2, **fields)
    named = {name: value for name, value in fields.items() if name in ("model_name", "world_size")}
    record = missed(client, other, tokens, **named)
    assert (record.reason, record.detail) == ("other_namespace", difference)


def test_another_model_of_another_form_says_nothing_about_this_one(client: WireClient, tokens: list[int]) -> None:
    client.store(key_for(client.register(), tokens), b"x")
    other = client.register(2, model_name="other", hidden_dim_size=16)
    assert missed(client, other, tokens, model_name="other").reason == "never_stored"


@pytest.mark.parametrize(
    ("stored", "asked", "difference"),
    [
        ("", "secret of one", "stored without a salt, asked with one"),
        ("secret of one", "", "stored with a salt, asked without one"),
        ("secret of one", "secret of two", "stored with another salt or another order of layers"),
    ],
)
def test_another_salt_is_told_without_the_salt(
    client: WireClient, stored: str, asked: str, difference: str, tokens: list[int]
) -> None:
    registered = client.register()
    client.store(key_for(registered, tokens, cache_salt=stored), b"x")
    record = missed(client, registered, tokens, cache_salt=asked)
    assert (record.reason, record.detail) == ("other_salt", difference)


def test_what_was_cleared_is_told(client: WireClient, tokens: list[int]) -> None:
    registered = client.register()
    client.store(key_for(registered, tokens), b"x")
    client.call("CLEAR", m.Clear())
    assert missed(client, registered, tokens).reason == "cleared"


def test_an_unknown_namespace_is_told(small: ServerProcess, client: WireClient, tokens: list[int]) -> None:
    registered = client.register()
    record = missed(client, registered, tokens, namespace=b"unknown.........")
    assert (record.reason, record.missing) == ("unknown_namespace", 0)
    client.store(key_for(registered, tokens), b"x")
    with small.engine_client() as connected:
        digests = hashes(connected, tokens, "r").digests(len(tokens))
    key = key_for(registered, tokens, namespace=b"unknown.........", digests=digests)
    assert missed_key(client, msgspec.structs.replace(key, tokens=b"")).reason == "other_namespace"


def test_an_object_that_is_gone_between_lookup_and_load_is_told(client: WireClient, tokens: list[int]) -> None:
    registered = client.register()
    client.store(key_for(registered, tokens), b"x")
    client.call("CLEAR", m.Clear())
    assert client.retrieve(key_for(registered, tokens)) is None
    record = recent(client)[-1]
    assert (record.request, record.outcome, record.reason, record.missing) == ("RETRIEVE", "miss", "cleared", 0)


# with tiers


def test_a_tier_that_does_not_answer_is_told() -> None:
    nowhere = ("l2.0.use=redis", f"l2.0.url=redis://127.0.0.1:{free_port()}", "l2.0.timeout_s=0.5")
    with ServerProcess(*nowhere) as server, server.client() as client:
        registered = client.register()
        first = missed(client, registered, TOKENS)
        assert (first.reason, first.detail.endswith("a call failed")) == ("tier_down", True)
        wait_until(
            lambda: missed(client, registered, TOKENS).detail.endswith("the tier is down"), what="the open circuit"
        )
        unknown = missed(client, registered, TOKENS, namespace=b"unknown.........")
        assert unknown.reason == "tier_down"


def values_in(folder: Path) -> set[Path]:
    """The files of objects: those of namespaces are smaller."""
    return {file for file in folder.rglob("*") if file.is_file() and file.stat().st_size > OBJECT_BYTES}


def test_a_client_that_does_not_wait_for_the_load_is_told(disk: ServerProcess, tokens: list[int]) -> None:
    with disk.client() as client:
        registered = client.register()
        client.store(key_for(registered, tokens[:256]), b"x")
        reply = client.lookup(key_for(registered, tokens))
        assert reply.pending
        client.call("FREE_LOOKUP_LOCKS", m.TicketRef(reply.ticket))
        record = recent(client)[-1]
        assert (record.reason, record.outcome, record.l1_tokens, record.missing) == ("timed_out", "partial", 256, 256)


def test_a_damaged_value_is_told(disk: ServerProcess, folder: Path, tokens: list[int]) -> None:
    with disk.client() as client:
        registered = client.register()
        wait_until(lambda: not client.status()["l2"][0]["write_pending"], what="what was stored before")
        before = values_in(folder)
        client.store(key_for(registered, tokens[:256]), b"x")
        wait_until(lambda: not client.status()["l2"][0]["write_pending"], what="the disk")
        client.call("CLEAR", m.Clear())
        (file,) = values_in(folder) - before
        value = bytearray(file.read_bytes())
        value[-1] ^= 1
        file.write_bytes(value)
        assert missed(client, registered, tokens[:256]).reason == "damaged"


def test_hits_of_both_tiers_are_told(disk: ServerProcess, tokens: list[int]) -> None:
    with disk.client() as client:
        registered = client.register()
        client.store(key_for(registered, tokens), b"x")
        wait_until(lambda: not client.status()["l2"][0]["write_pending"], what="the disk")
        client.call("CLEAR", m.Clear())
        client.store(key_for(registered, tokens[:256]), b"x")
        client.settled(client.lookup(key_for(registered, tokens)))
        assert client.retrieve(key_for(registered, tokens)) is not None
        lookup, retrieve = recent(client)[-2:]
        assert (lookup.outcome, lookup.l1_tokens, lookup.l2_tokens, lookup.reason) == ("hit", 256, 768, "")
        assert (retrieve.outcome, retrieve.objects, retrieve.path) == ("hit", 4, "engine")
        assert retrieve.nbytes == 4 * OBJECT_BYTES


def test_a_client_that_has_outlived_its_server_is_told() -> None:
    with ServerProcess() as server, server.client() as first:
        namespace = first.register().namespace
        with scheduler(server, namespace) as (connected, adapter):
            boot = connected.boot_id
            first.store(key_for(m.Registered(namespace, m.MemoryLayoutDesc(CHUNK, ())), TOKENS), b"x")
            server.kill9()
            server.start()
            wait_until(lambda: connected.usable and connected.boot_id != boot, what="the new server")
            with server.client() as second:
                registered = second.register()
                assert adapter.lookup(hashes(connected, TOKENS, "again")).hit_tokens == 0
                assert recent(second)[-1].reason == "server_started"
                # This client has not used the earlier server.
                assert missed(second, registered, TOKENS).reason == "never_stored"


def test_a_start_that_has_lost_nothing_explains_no_miss() -> None:
    with HeldServer() as server, server.client() as first:
        registered = first.register()
        first.store(key_for(registered, TOKENS), b"x")
        with scheduler(server, registered.namespace) as (connected, adapter):
            boot, pid = connected.boot_id, server.pid
            server.kill9()
            server.serving(pid)
            wait_until(lambda: connected.usable and connected.boot_id != boot, what="the new server")
            with server.client() as second:
                assert adapter.lookup(hashes(connected, TOKENS, "kept")).hit_tokens == len(TOKENS)
                assert adapter.lookup(hashes(connected, [9, *TOKENS[1:]], "new")).hit_tokens == 0
                assert recent(second)[-1].reason == "never_stored"


# what a record does not hold


def test_no_record_holds_a_secret(client: WireClient, tokens: list[int]) -> None:
    registered = client.register()
    salt = "the salt of a tenant"
    key = key_for(registered, tokens, cache_salt=salt)
    client.store(key, b"x")
    client.lookup(key)
    client.retrieve(key)
    missed(client, registered, [*tokens, *tokens], cache_salt="another salt of a tenant")
    with contextlib.suppress(TimeoutError):
        answer = client.answer(client.send("RECENT", m.Recent()), "RECENT")
    text = repr(answer).encode()
    for secret in (b"salt of a tenant", bytes(key.tokens[:32]), registered.namespace.hex()[9:].encode()):
        assert secret not in text
    assert client.hello.session.hex().encode() not in text


def test_only_clients_of_this_node_see_the_records(small: ServerProcess) -> None:
    with small.client(liveness=False) as remote, pytest.raises(Exception, match="only a client on this node"):
        recent(remote)
