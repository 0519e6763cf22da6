"""Nobody is told that blocks are free while something may still touch them, whatever was late or gone."""

from __future__ import annotations

import time
from dataclasses import replace

import msgspec
import pytest

from kvf_dev.testing.accelerator.rig import SimulatedRig
from kvf_dev.testing.transport.engine import PAGED, PATIENCE_S, KitEngine
from kvf_dev.testing.transport.node import held_by, status_of
from kvframework.client import KVClient
from kvframework.errors import BadLayout, TransportMismatch
from kvframework.server import Server
from kvframework.wire import messages as m
from tests.support.waiting import wait_until
from tests.support.wire_client import WireClient

NHD = PAGED["nhd"]


def test_a_load_that_is_late_is_not_given_up_before_the_server_has_let_go(
    monkeypatch: pytest.MonkeyPatch, rig: SimulatedRig, client: KVClient
) -> None:
    engine = KitEngine(rig, client, 1, NHD)
    request = engine.stored()
    monkeypatch.setattr(client, "deadlines", replace(client.deadlines, transfer_s=0.2))
    with rig.holding_copies():
        late = engine.load(request, engine.target())
        wait_until(rig.held, PATIENCE_S, "a copy that is held")
        given_up = time.monotonic() + 0.8
        while time.monotonic() < given_up:
            assert not late.query(), "its blocks are still written"
            time.sleep(0.01)
    assert not late.result(PATIENCE_S).ok
    engine.overwrite()
    engine.must_be_right()
    engine.close()
    wait_until(lambda: held_by(status_of(client)) == (0, 0), PATIENCE_S)


def test_unregistering_waits_for_copies_that_are_under_way(rig: SimulatedRig, client: KVClient) -> None:
    engine = KitEngine(rig, client, 2, NHD)
    request = engine.request()
    with rig.holding_copies():
        future = engine.store(request, engine.source())
        wait_until(rig.held, PATIENCE_S, "a copy that is held")
        answer = client._connection.begin("UNREGISTER_KV_CACHE", m.Unregister(2), timeout=PATIENCE_S)
        with pytest.raises(TimeoutError):
            answer.result(0.3)
        assert rig.open_elsewhere() == 2
    assert answer.result(PATIENCE_S).payload == m.Empty()
    assert rig.open_elsewhere() == 0
    assert future.query(), "what it had launched is done"


def test_memory_is_lent_to_clients_of_this_node_only(rig: SimulatedRig, client: KVClient, server: Server) -> None:
    engine = KitEngine(rig, client, 3, NHD)
    instance = engine.worker._instance
    payload = m.RegisterKvCache(
        4,
        "kit",
        1,
        0,
        engine.registration.namespace,
        "simdev",
        engine.registration.layout,
        instance.transfer.memory_handles(engine.caches),
    )
    with WireClient(server.endpoint, liveness=False) as remote, pytest.raises(TransportMismatch, match="server's node"):
        remote.call("REGISTER_KV_CACHE", payload)
    with WireClient(server.endpoint) as local:
        local.call("REGISTER_KV_CACHE", payload)
        with pytest.raises(TransportMismatch):
            local.call("REGISTER_KV_CACHE", msgspec.structs.replace(payload, instance_id=5, handles=()))
    engine.close()


def test_other_tensors_than_registered_are_refused(rig: SimulatedRig, client: KVClient) -> None:
    engine = KitEngine(rig, client, 6, NHD)
    request = engine.request()
    same = dict(engine.caches)
    submit = engine.worker.submit_store
    assert submit(request, 0, 48, engine.source(), kv_caches=same).result(PATIENCE_S).ok
    name = next(iter(same))
    moved = {**same, name: rig.empty(same[name].shape, "float32")}
    with pytest.raises(BadLayout, match="the tensors differ from the registered tensors"):
        submit(request, 0, 48, engine.source(), kv_caches=moved)
    engine.close()


@pytest.mark.parametrize("swap", ["another tensor", "other memory of the same tensor"])
def test_a_tensor_that_is_swapped_in_the_registered_mapping_is_refused(
    rig: SimulatedRig, client: KVClient, swap: str
) -> None:
    """The server would copy the memory that the engine had before, as if nothing were wrong."""
    engine = KitEngine(rig, client, 7, NHD)
    request = engine.request()
    name, before = next(iter(engine.caches.items()))
    other = rig.empty(before.shape, "float32")
    if swap == "another tensor":
        engine.caches[name] = other
    else:
        address, before.address = before.address, other.data_ptr()
    with pytest.raises(BadLayout, match="the tensors differ from the registered tensors"):
        engine.store(request, engine.source())
    with pytest.raises(BadLayout, match="the tensors differ from the registered tensors"):
        engine.load(request, engine.target())
    assert engine.hit(request) == 0
    if swap == "another tensor":
        engine.caches[name] = before
    else:
        before.address = address
    assert engine.store(request, engine.source()).result(PATIENCE_S).ok
    engine.close()
