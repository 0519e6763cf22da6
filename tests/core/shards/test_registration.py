"""What a server accepts of an instance that says which shards it holds, and what it never does."""

from __future__ import annotations

import msgspec
import pytest

from kvframework import errors
from kvframework.api.keys import CacheKey
from kvframework.api.layout import KVLayout, LayerGroup
from kvframework.wire import messages as m
from tests.support.server_process import ServerProcess, client_fixture, server_fixture
from tests.support.wire_client import WireClient

GROUP = LayerGroup(2, 16, 1, 8, "float16", layer_names=("l.0", "l.1"))
NAMESPACE = bytes(range(16))
CHUNK = 32
GOOD = m.RegisterKvCache(3, "m", 4, 2, NAMESPACE, "cpu_gather", KVLayout("paged", (GROUP, GROUP), 8), ranks=(2, 3))


server = server_fixture(f"server.chunk_size={CHUNK}", "server.tp_lcm=4", scope="module")


client = client_fixture(emptied=True)


def key(rank: int | None = 2) -> CacheKey:
    tokens = b"".join(number.to_bytes(4, "little") for number in range(2 * CHUNK))
    return CacheKey("m", 4, rank, NAMESPACE, 0, 2 * CHUNK, "r", tokens)


def test_a_server_tells_its_setting(client: WireClient) -> None:
    assert (client.hello.tp_lcm, client.hello.pp_lcm) == (4, 1)


def test_ranks_that_cannot_be_are_refused(client: WireClient) -> None:
    other = msgspec.structs.replace
    wide = other(GROUP, heads=2)
    opaque = LayerGroup(2, 16, 1, 64, "uint8", packing="p")
    for bad, error, why in (
        (other(GOOD, ranks=(2, 2)), errors.NamespaceMismatch, "other ranks"),
        (other(GOOD, ranks=(3, 2)), errors.NamespaceMismatch, "rank 2, then other"),
        (other(GOOD, ranks=(2, 4)), errors.NamespaceMismatch, "below 4"),
        (other(GOOD, ranks=(2, -1)), errors.NamespaceMismatch, "below 4"),
        (other(GOOD, ranks=(2, 3, 0)), errors.BadLayout, "each of 3 ranks"),
        (other(GOOD, layout=KVLayout("paged", (GROUP, wide), 8)), errors.BadLayout, "equal groups"),
        (other(GOOD, layout=KVLayout("paged", (GROUP,), 8)), errors.BadLayout, "equal groups"),
        (other(GOOD, layout=KVLayout("paged", (opaque, opaque), 8)), errors.BadLayout, "canonical"),
    ):
        with pytest.raises(error, match=why):
            client.call("REGISTER_KV_CACHE", bad)
    assert client.status()["instances"] == []
    with pytest.raises(errors.KVFrameworkError):
        client.call("REGISTER_KV_CACHE", other(GOOD, ranks=tuple(range(65)), world_size=100))


def test_an_instance_has_places_of_its_own_shards_only(server: ServerProcess, client: WireClient) -> None:
    registered = client.call("REGISTER_KV_CACHE", GOOD)
    assert len(registered.desc.groups) == 2
    (instance,) = client.status()["instances"]
    assert (instance["world_size"], instance["rank"], instance["shards"]) == (4, 2, [2, 3])
    plan = client.call("PREPARE_STORE", m.Prepare(key(), 3))
    assert [(place.chunk, place.group) for place in plan.ranges] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert {place.length for place in plan.ranges} == {2 * 2 * CHUNK * 8 * 2}
    assert client.call("COMMIT_STORE", m.Commit(plan.lease)).outcome.stored == 4
    for wrong in (3, 0, None):
        with pytest.raises(errors.NamespaceMismatch):
            client.call("PREPARE_STORE", m.Prepare(key(wrong), 3))
    for counts in ((0,), (0, 0, 0), (1, 0)):
        with pytest.raises(errors.BadRange, match="first_chunks"):
            client.call("PREPARE_STORE", m.Prepare(key(), 3, counts))
    assert client.call("LOOKUP", m.Lookup(key(None))).hit_tokens == 0, "two of four shards"
    # The others come from an engine of four ranks.
    for rank in (0, 1):
        alone = msgspec.structs.replace(
            GOOD, instance_id=10 + rank, rank=rank, ranks=(rank,), layout=KVLayout("paged", (GROUP,), 8)
        )
        client.call("REGISTER_KV_CACHE", alone)
        plan = client.call("PREPARE_STORE", m.Prepare(key(rank), 10 + rank))
        assert client.call("COMMIT_STORE", m.Commit(plan.lease)).outcome.stored == 2
    found = client.call("LOOKUP", m.Lookup(key(None)))
    assert found.hit_tokens == 2 * CHUNK
    client.call("FREE_LOOKUP_LOCKS", m.TicketRef(found.ticket))


def test_other_layers_in_a_shard_that_is_held_are_refused(client: WireClient) -> None:
    client.call("REGISTER_KV_CACHE", GOOD)
    turned = msgspec.structs.replace(GROUP, layer_names=("l.1", "l.0"))
    for ranks, refused in (((1, 3), True), ((0, 1), False)):
        payload = msgspec.structs.replace(
            GOOD, instance_id=4 + ranks[0], rank=ranks[0], ranks=ranks, layout=KVLayout("paged", (turned, turned), 8)
        )
        if refused:
            with pytest.raises(errors.NamespaceMismatch, match="in another order"):
                client.call("REGISTER_KV_CACHE", payload)
        else:
            client.call("REGISTER_KV_CACHE", payload)
