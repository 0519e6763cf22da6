"""STORE and RETRIEVE through a server-driven transport: copies, failures, deaths, and cancel in two phases."""

from __future__ import annotations

import array
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvframework import errors
from kvframework.api.keys import compute_namespace
from kvframework.api.layout import KVLayout, LayerGroup, canonical_desc
from kvframework.api.transport import Registration, StoreOutcome
from kvframework.client import KVClient
from kvframework.client.kv_client import checked_transfer
from kvframework.server import Server
from kvframework.wire import messages as m
from tests.core.server.gated_transport import GatedPlugin
from tests.core.server.in_process import serving
from tests.support.waiting import wait_until
from tests.support.wire_client import WireClient, key_for

BLOCKS, BLOCK_BYTES = 64, 16 * 2 * 2 * 8 * 4
LAYOUT = KVLayout("paged", (LayerGroup(2, 16, 1, 8, "float32"),), num_blocks=BLOCKS)
NAMESPACE = compute_namespace(
    model="tiny", desc=canonical_desc(LAYOUT, 256), hasher_fingerprint="sha256/1", world_size=1
)
TOKENS = list(range(512))


@pytest.fixture
def plugin() -> GatedPlugin:
    return GatedPlugin()


@pytest.fixture
def server(plugin: GatedPlugin) -> Iterator[Server]:
    with serving("transport.1.use=gated", plugins=(plugin,)) as running:
        yield running


@pytest.fixture
def memory(tmp_path: Path) -> Path:
    """The engine's memory: block b holds the byte b."""
    path = tmp_path / "memory"
    path.write_bytes(b"".join(bytes([block]) * BLOCK_BYTES for block in range(BLOCKS)))
    return path


@pytest.fixture
def client(server: Server, memory: Path) -> Iterator[WireClient]:
    with WireClient(server.endpoint) as connected:
        register(connected, memory)
        yield connected


def register(client: WireClient, memory: Path, instance_id: int = 1) -> m.Registered:
    payload = m.RegisterKvCache(instance_id, "tiny", 1, 0, NAMESPACE, "gated", LAYOUT, (str(memory).encode(),))
    registered: m.Registered = client.call("REGISTER_KV_CACHE", payload)
    return registered


def transfer(blocks: list[int], tokens: list[int] = TOKENS, **fields: int) -> m.TransferRequest:
    key = key_for(m.Registered(NAMESPACE, canonical_desc(LAYOUT, 256)), tokens)
    return m.TransferRequest(key, 1, (array.array("I", blocks).tobytes(),), **fields)  # type: ignore[arg-type]


def held(client: WireClient) -> tuple[int, int]:
    l1 = client.status()["l1"]
    return l1["pins"], l1["write_leases"]


def test_store_and_retrieve_move_the_named_blocks(client: WireClient, plugin: GatedPlugin, memory: Path) -> None:
    plugin.transport.gate.release(1000)
    source, target = list(range(31, -1, -1)), list(range(32, 64))
    stored = client.call("STORE", transfer(source))
    assert (stored.ok, stored.outcome.stored) == (True, 2)
    assert client.call("STORE", transfer(source)).outcome.present == 2
    assert client.call("RETRIEVE", transfer(target)).ok
    records = client.call("RECENT", m.Recent()).records
    assert [(each.request, each.outcome, each.objects) for each in records] == [
        ("STORE", "stored", 2),
        ("STORE", "present", 0),
        ("RETRIEVE", "hit", 2),
    ]
    assert {each.path for each in records} == {"server"}
    found = memory.read_bytes()
    assert [found[block * BLOCK_BYTES] for block in target] == source
    assert client.status()["gpu_instance_ids"] == [1]
    assert held(client) == (0, 0)


def test_a_retrieve_of_what_is_not_there_is_a_miss(client: WireClient) -> None:
    reply = client.call("RETRIEVE", transfer(list(range(32))))
    assert (reply.ok, reply.reason) == (False, "some objects are not in L1")
    (record,) = client.call("RECENT", m.Recent()).records
    assert (record.request, record.path, record.outcome, record.missing) == ("RETRIEVE", "server", "miss", 0)
    assert record.reason == "never_stored"


def test_cancel_is_answered_only_when_the_blocks_are_touched_no_more(client: WireClient, plugin: GatedPlugin) -> None:
    request = client.send("STORE", transfer(list(range(32))))
    assert plugin.transport.waiting.wait(60)
    plugin.transport.gate.release()
    wait_until(lambda: plugin.transport.copies == 1)
    cancel = client.send("CANCEL", m.Cancel(request))
    assert client.call("PING", m.Empty())
    with pytest.raises(TimeoutError):
        client.receive(timeout=0.2)
    plugin.transport.gate.release()
    answers = {}
    for _ in range(2):
        answered, kind, _payload = client.receive()
        answers[answered] = kind
    assert answers == {request: "STORE", cancel: "CANCEL"}
    assert plugin.transport.copies == 1, "the second fragment was not copied"
    key = transfer(list(range(32))).key
    assert client.lookup(key).hit_tokens == 0, "a cancelled store is never committed"
    assert held(client) == (0, 0)


def test_a_cancelled_retrieve_lets_go_of_its_pins(client: WireClient, plugin: GatedPlugin) -> None:
    plugin.transport.gate.release(32)
    assert client.call("STORE", transfer(list(range(32)))).ok
    request = client.send("RETRIEVE", transfer(list(range(32))))
    wait_until(lambda: client_pins(client) == 2)
    client.send("CANCEL", m.Cancel(request))
    assert client.call("PING", m.Empty()), "requests of one client are taken in order: the cancel is in"
    plugin.transport.gate.release()
    reply = client.answer(request, "RETRIEVE")
    assert reply.ok is False
    wait_until(lambda: held(client) == (0, 0))


def client_pins(client: WireClient) -> int:
    return held(client)[0]


def test_a_failed_copy_publishes_nothing(client: WireClient, plugin: GatedPlugin) -> None:
    plugin.transport.fail = True
    plugin.transport.gate.release()
    reply = client.call("STORE", transfer(list(range(32))))
    assert (reply.ok, reply.outcome.dropped) == (False, 2)
    assert client.lookup(transfer(list(range(32))).key).hit_tokens == 0
    assert held(client) == (0, 0)


def test_one_block_is_gathered_for_the_canary_and_nothing_stays(client: WireClient, plugin: GatedPlugin) -> None:
    plugin.transport.gate.release(1000)
    block = array.array("I", [7]).tobytes()
    (gathered,) = client.call("GATHER_BLOCK", m.GatherBlock(1, (block,))).groups
    assert len(gathered) == BLOCK_BYTES
    assert set(gathered) == {7}
    with pytest.raises(errors.BadBlockIds):
        client.call("GATHER_BLOCK", m.GatherBlock(1, (array.array("I", [BLOCKS]).tobytes(),)))
    plugin.transport.fail = True
    with pytest.raises(errors.StorageError, match="could not gather"):
        client.call("GATHER_BLOCK", m.GatherBlock(1, (block,)))
    assert held(client) == (0, 0)
    assert client.status()["l1"]["objects"] == 0


def test_a_client_that_dies_in_mid_copy_publishes_nothing(
    server: Server, plugin: GatedPlugin, memory: Path, client: WireClient
) -> None:
    doomed = WireClient(server.endpoint)
    register(doomed, memory, instance_id=2)
    payload = transfer(list(range(32)), tokens=[9] * 512)
    doomed.send("STORE", m.TransferRequest(payload.key, 2, payload.block_ids))
    assert plugin.transport.waiting.wait(60)
    doomed.close()
    wait_until(lambda: client.status()["gpu_instance_ids"] == [1])
    plugin.transport.gate.release(1000)
    wait_until(lambda: held(client) == (0, 0))
    assert client.lookup(payload.key).hit_tokens == 0


@pytest.mark.parametrize(
    ("blocks", "word"),
    [
        (list(range(31)), "124 bytes"),
        (list(range(33)), "132 bytes"),
        ([*range(31), BLOCKS], "block id 64"),
        ([*range(31), 2**32 - 1], "block id 4294967295"),
    ],
)
def test_bad_block_ids_are_refused_and_nothing_is_held(client: WireClient, blocks: list[int], word: str) -> None:
    for name in ("STORE", "RETRIEVE"):
        with pytest.raises(errors.BadBlockIds, match=word):
            client.call(name, transfer(blocks))
    assert held(client) == (0, 0)


def test_bad_groups_skips_and_paths_are_refused(client: WireClient) -> None:
    good = transfer(list(range(32)))
    with pytest.raises(errors.BadBlockIds, match="2 layer groups"):
        client.call("STORE", m.TransferRequest(good.key, 1, (b"", b"")))
    for skip in (-1, 512):
        with pytest.raises(errors.BadRange):
            client.call("RETRIEVE", transfer(list(range(32)), skip_first_n_tokens=skip))
    with pytest.raises(errors.TransportMismatch):
        client.call("PREPARE_STORE", m.Prepare(good.key, 1))
    with pytest.raises(errors.TransportMismatch, match="at least one"):
        client.call("REGISTER_KV_CACHE", m.RegisterKvCache(5, "tiny", 1, 0, NAMESPACE, "gated", LAYOUT))


def test_a_transfer_that_is_refused_says_why(server: Server) -> None:
    key = key_for(m.Registered(NAMESPACE, canonical_desc(LAYOUT, 256)), TOKENS)
    registration = Registration(99, 0, NAMESPACE, LAYOUT, canonical_desc(LAYOUT, 256))
    code = errors.NotRegistered.code
    with KVClient(server.endpoint, deadline_scale=20.0) as client:
        assert client.wait_up(20)
        transfer = checked_transfer(registration, key, {}, [range(32)], None, storing=True)
        assert client.store(transfer).result(20) == StoreOutcome(dropped=2, error=code)
        loaded = client.load(transfer, 0).result(20)
        assert (loaded.ok, loaded.error) == (False, code)
