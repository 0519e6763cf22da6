"""Every core request against a real server process: what it answers, and what it refuses, with nothing left locked."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from kvframework import errors
from kvframework.api.keys import compute_namespace
from kvframework.api.layout import KVLayout, LayerGroup, canonical_desc
from kvframework.wire import messages as m
from kvframework.wire.protocol import non_gpu_namespace
from tests.support.server_process import ServerProcess
from tests.support.waiting import wait_until
from tests.support.wire_client import WireClient, key_for

TOKENS = list(range(1024))


def assert_nothing_is_held(client: WireClient) -> None:
    l1 = client.status()["l1"]
    assert (l1["pins"], l1["write_leases"], l1["pin_leases"], l1["quarantined_bytes"]) == (0, 0, 0, 0)


def test_the_small_requests(client: WireClient) -> None:
    assert client.call("PING", m.Empty()).boot_id == client.hello.boot_id
    assert client.call("NOOP", m.Empty()) == m.Empty()
    assert client.call("GET_CHUNK_SIZE", m.GetChunkSize()).chunk_size == 256
    registered = client.register(block_size=48)
    assert client.call("GET_CHUNK_SIZE", m.GetChunkSize(registered.namespace)).chunk_size == 288


def test_the_eight_scalars_name_the_namespace_on_both_sides(client: WireClient) -> None:
    assert client.hello is not None
    payload = m.RegisterNonGpuContextPayload(7, "tiny", 2, 16, 4, 64, "bfloat16", True)
    registered = client.call("REGISTER_KV_CACHE_NON_GPU_CONTEXT", payload)
    assert registered.namespace == non_gpu_namespace(payload, client.hello.hasher_fingerprint, client.hello.chunk_size)
    assert registered.desc.groups[0].shape == (1, 4, 256, 64)
    instance = client.status()["instances"][0]
    assert instance["mla"] is True
    assert instance["dtype"] == "bfloat16"
    assert instance["bytes_per_token"] == 4 * 64 * 2
    assert client.status()["non_gpu_instance_ids"] == [7]


def test_a_layout_registration_shows_in_the_status(client: WireClient) -> None:
    group = LayerGroup(3, 16, 2, 8, "float16", axes=("plane", "block", "token", "head", "dim"))
    layout = KVLayout("paged", (group,), num_blocks=10)
    namespace = compute_namespace(
        model="m", desc=canonical_desc(layout, 256), hasher_fingerprint="sha256/1", world_size=4
    )
    client.call("REGISTER_KV_CACHE", m.RegisterKvCache(3, "m", 4, 2, namespace, "cpu_gather", layout))
    instance = client.status()["instances"][0]
    expected = {
        "instance_id": 3,
        "model": "m",
        "world_size": 4,
        "rank": 2,
        "transport": "cpu_gather",
        "layers": 3,
        "block_size": 16,
        "logical_block_size": 16,
        "hidden_sizes": [16],
        "dtype": "float16",
        "model_dtype": "float16",
        "mla": False,
        "num_blocks": 10,
        "format": "paged",
        "shapes": [[2, 3, 256, 16]],
        "bytes_per_token": 192.0,
        "group_physical_block_sizes": [16],
        "group_compress_ratios": [1],
    }
    assert {name: instance[name] for name in expected} == expected
    client.call("UNREGISTER_KV_CACHE", m.Unregister(3))
    assert client.status()["instances"] == []


def test_store_then_lookup_and_retrieve_from_another_client(server: ServerProcess, client: WireClient) -> None:
    registered = client.register()
    key = key_for(registered, TOKENS)
    plan = client.prepare_store(key)
    assert [place.chunk for place in plan.ranges] == [0, 1, 2, 3]
    client.write(plan, b"content!")
    assert client.lookup(key).hit_tokens == 0, "unwritten bytes are no hit"
    assert client.call("COMMIT_STORE", m.LeaseRef(plan.lease)).outcome.stored == 4
    with server.client() as other:
        other.register(instance_id=2)
        reply = other.lookup(key_for(registered, [*TOKENS[:600], *range(9000, 9424)]))
        assert reply.hit_tokens == 512
        assert other.call("FREE_LOOKUP_LOCKS", m.TicketRef(reply.ticket)).pins == 2
        found = other.retrieve(key, instance_id=2)
        assert found is not None
        assert found == (b"content!" * len(found))[: len(found)]
        assert other.store(key, b"other", instance_id=2) is None, "all present: nothing to write"
    assert_nothing_is_held(client)


def test_only_missing_chunks_are_handed_out_for_writing(client: WireClient) -> None:
    registered = client.register()
    client.store(key_for(registered, TOKENS[:512]), b"x")
    plan = client.prepare_store(key_for(registered, TOKENS))
    assert [place.chunk for place in plan.ranges] == [2, 3]
    assert plan.outcome.present == 2
    second = client.prepare_store(key_for(registered, TOKENS))
    assert (second.lease, second.outcome.in_flight, second.outcome.present) == ("", 2, 2)
    assert client.call("ABORT", m.LeaseRef(plan.lease)).freed == 2
    assert_nothing_is_held(client)


def test_end_session_frees_no_range_that_may_still_be_written(server: ServerProcess, client: WireClient) -> None:
    registered = client.register()
    key = key_for(registered, TOKENS)
    plan = client.prepare_store(key)
    assert client.call("END_SESSION", m.EndSession("r")).leases == 1
    with server.client() as other:
        other.register(instance_id=2)
        assert other.store(key, b"GOOD", 2) is not None
        client.write(plan, b"EVIL")
        found = other.retrieve(key, 2)
        assert found is not None
        assert found == (b"GOOD" * len(found))[: len(found)]
    assert client.call("COMMIT_STORE", m.LeaseRef(plan.lease)).outcome.stored == 0
    assert_nothing_is_held(client)


def test_pins_keep_objects_over_clear(client: WireClient) -> None:
    registered = client.register()
    key = key_for(registered, TOKENS)
    client.store(key, b"z")
    ticket = client.lookup(key_for(registered, TOKENS[:512])).ticket
    first = client.call("CLEAR", m.Clear())
    assert (first.objects, first.in_use) == (2, 2)
    client.call("FREE_LOOKUP_LOCKS", m.TicketRef(ticket))
    second = client.call("CLEAR", m.Clear())
    assert (second.objects, second.in_use, second.nbytes) == (2, 0, first.nbytes)
    assert client.retrieve(key) is None


def test_a_clients_end_frees_all_that_it_holds(server: ServerProcess, client: WireClient) -> None:
    registered = client.register()
    client.store(key_for(registered, TOKENS), b"z")
    other = server.client()
    other.register(instance_id=5)
    other.lookup(key_for(registered, TOKENS))
    other.prepare_retrieve(key_for(registered, TOKENS), 5)
    other.prepare_store(key_for(registered, [3] * 256), 5)
    assert client.status()["l1"]["pin_leases"] == 2
    other.close()
    wait_until(lambda: client.status()["non_gpu_instance_ids"] == [1], what="the end of the other client")
    assert_nothing_is_held(client)


def test_who_ends_a_request_id_ends_only_its_own_and_each_ticket_is_for_itself(
    server: ServerProcess, client: WireClient
) -> None:
    registered = client.register()
    key = key_for(registered, TOKENS)
    client.store(key, b"x")
    first, second = client.lookup(key).ticket, client.lookup(key_for(registered, TOKENS[:512])).ticket
    plan = client.prepare_store(key_for(registered, [5] * 256))
    with server.client() as other:
        theirs = other.lookup(key).ticket
        with pytest.raises(errors.LeaseUnknown):
            other.call("FREE_LOOKUP_LOCKS", m.TicketRef(first))
        ended = other.call("END_SESSION", m.EndSession(key.request_id))
        assert (ended.leases, ended.tickets) == (0, 1)
        with pytest.raises(errors.LeaseUnknown):
            other.call("FREE_LOOKUP_LOCKS", m.TicketRef(theirs))
    assert client.call("FREE_LOOKUP_LOCKS", m.TicketRef(first)).pins == 4
    assert client.call("FREE_LOOKUP_LOCKS", m.TicketRef(second)).pins == 2
    assert client.call("COMMIT_STORE", m.LeaseRef(plan.lease)).outcome.stored == 1
    assert_nothing_is_held(client)


def bad_keys(registered: m.Registered) -> dict[str, tuple[Any, type[errors.KVFrameworkError]]]:
    key = key_for(registered, TOKENS)
    change = msgspec.structs.replace
    return {
        "start no boundary": (change(key, start=1), errors.BadRange),
        "end no boundary": (key_for(registered, TOKENS[:1000]), errors.BadRange),
        "start after end": (change(key, start=1024), errors.BadRange),
        "negative start": (change(key, start=-256), errors.BadRange),
        "empty content": (change(key, tokens=b""), errors.BadRange),
        "both contents": (change(key, digests=b"d" * 128), errors.BadRange),
        "huge end": (change(key, end=1 << 50), errors.MessageTooLarge),
        "another namespace": (change(key, namespace=b"x" * 16), errors.NamespaceMismatch),
        "short namespace": (change(key, namespace=b"x"), errors.NamespaceMismatch),
        "another model": (change(key, model_name="other"), errors.NamespaceMismatch),
        "another world size": (change(key, world_size=2), errors.NamespaceMismatch),
        "no rank": (change(key, worker_id=None), errors.NamespaceMismatch),
        "a rank beyond the world": (change(key, worker_id=1), errors.NamespaceMismatch),
        "no world": (change(key, world_size=0), errors.NamespaceMismatch),
        "a token too few": (change(key, tokens=key.tokens[:-4]), errors.BadRange),
        "part of a digest": (change(key, tokens=b"", digests=b"d" * 31), errors.BadRange),
        "too many objects": (change(key, end=1 << 30), errors.MessageTooLarge),
        "a long salt": (change(key, cache_salt="x" * 5000), errors.MessageTooLarge),
    }


@pytest.mark.parametrize("request_name", ["PREPARE_STORE", "PREPARE_RETRIEVE"])
def test_bad_keys_are_refused(client: WireClient, request_name: str) -> None:
    registered = client.register()
    for key, error in bad_keys(registered).values():
        with pytest.raises(error):
            client.call(request_name, m.Prepare(key, 1))
    assert_nothing_is_held(client)


def test_bad_lookups_are_refused_and_an_unknown_namespace_is_a_miss(client: WireClient) -> None:
    registered = client.register()
    for name in ("start no boundary", "empty content", "another model", "another world size"):
        key, error = bad_keys(registered)[name]
        with pytest.raises(error):
            client.lookup(key)
    assert client.lookup(key_for(registered, TOKENS, namespace=b"unknown.........")) == m.LookupReply(0)
    assert_nothing_is_held(client)


@pytest.mark.parametrize(
    ("fields", "error"),
    [
        ({"dtype_str": "float33"}, errors.BadDtype),
        ({"block_size": 0}, errors.BadLayout),
        ({"num_layers": -1}, errors.BadLayout),
        ({"hidden_dim_size": 1 << 40}, errors.BadLayout),
        ({"hidden_dim_size": 1 << 23}, errors.BadLayout),
        ({"world_size": 0}, errors.NamespaceMismatch),
        ({"model_name": ""}, errors.MessageTooLarge),
    ],
)
def test_bad_registrations_are_refused(
    client: WireClient, fields: dict[str, object], error: type[errors.KVFrameworkError]
) -> None:
    with pytest.raises(error):
        client.register(**fields)
    assert client.status()["instances"] == []


@pytest.mark.parametrize(("said", "shown"), [("bfloat16", "bfloat16"), ("", ""), ("b" * 200, "b" * 128)])
def test_the_models_dtype_is_shown_beside_that_of_opaque_bytes(client: WireClient, said: str, shown: str) -> None:
    group = LayerGroup(2, 16, 1, 64, "uint8", axes=("block", "dim"), packing="kit/1")
    layout = KVLayout("opaque", (group,), num_blocks=10)
    client.call("REGISTER_KV_CACHE", m.RegisterKvCache(3, "m", 1, 0, bytes(16), "cpu_gather", layout, model_dtype=said))
    (instance,) = client.status()["instances"]
    assert (instance["dtype"], instance["model_dtype"]) == ("uint8", shown)


@pytest.mark.parametrize("said", ["b" * 1025, "b\x1b[2J"])
def test_a_models_dtype_that_cannot_be_shown_is_refused(client: WireClient, said: str) -> None:
    layout = KVLayout(
        "paged", (LayerGroup(3, 16, 2, 8, "float16", axes=("plane", "block", "token", "head", "dim")),), 10
    )
    with pytest.raises((errors.MessageTooLarge, errors.RequestError)):
        client.call(
            "REGISTER_KV_CACHE", m.RegisterKvCache(3, "m", 1, 0, bytes(16), "cpu_gather", layout, model_dtype=said)
        )


def test_registering_twice_and_unregistering_strangers(server: ServerProcess, client: WireClient) -> None:
    client.register()
    with pytest.raises(errors.AlreadyRegistered, match="registered by process"):
        client.register()
    with pytest.raises(errors.NotRegistered):
        client.call("UNREGISTER_KV_CACHE", m.Unregister(99))
    with server.client() as other:
        with pytest.raises(errors.AlreadyRegistered, match="process"):
            other.register()
        with pytest.raises(errors.NotRegistered):
            other.call("UNREGISTER_KV_CACHE", m.Unregister(1))
        with pytest.raises(errors.NotRegistered):
            other.prepare_store(key_for(client.register(instance_id=2), TOKENS), 1)


def test_unknown_transports_layouts_and_handles(client: WireClient) -> None:
    group = LayerGroup(1, 16, 2, 8, "float16")
    good = m.RegisterKvCache(3, "m", 1, 0, b"n" * 16, "cpu_gather", KVLayout("paged", (group,), 4))
    change = msgspec.structs.replace
    for payload, error in (
        (change(good, transport="warp"), errors.TransportMismatch),
        (change(good, layout=KVLayout("nope", (group,))), errors.BadLayout),
        (change(good, layout=KVLayout("paged", ())), errors.BadLayout),
        (change(good, handles=(b"h",)), errors.TransportMismatch),
        (change(good, namespace=b"n"), errors.NamespaceMismatch),
        (change(good, rank=1), errors.NamespaceMismatch),
    ):
        with pytest.raises(error):
            client.call("REGISTER_KV_CACHE", payload)
    assert client.status()["instances"] == []


def test_one_namespace_has_one_meaning(server: ServerProcess, client: WireClient) -> None:
    first = client.register()
    group = LayerGroup(1, 16, 2, 8, "float16")
    payload = m.RegisterKvCache(3, "tiny", 1, 0, first.namespace, "cpu_gather", KVLayout("paged", (group,), 4))
    with server.client() as other, pytest.raises(errors.NamespaceMismatch, match="known as"):
        other.call("REGISTER_KV_CACHE", payload)


def test_server_driven_requests_are_refused_for_an_engine_driven_instance(client: WireClient) -> None:
    key = key_for(client.register(), TOKENS)
    for name in ("STORE", "RETRIEVE"):
        with pytest.raises(errors.TransportMismatch):
            client.call(name, m.TransferRequest(key, 1, (b"",)))


def test_the_server_has_not_loaded_torch(server: ServerProcess) -> None:
    with open(f"/proc/{server.pid}/maps") as maps:
        assert "libtorch" not in maps.read()


def test_two_instances_that_differ_in_mla_alone_share_nothing(client: WireClient) -> None:
    assert client.register(1).namespace != client.register(2, use_mla=True).namespace
