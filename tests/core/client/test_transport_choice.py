"""With `transport = "auto"` an instance takes the first transport that can lend its memory, and keeps it."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from kvf_dev.testing.accelerator import DeviceTensor, SimulatedNode
from kvf_dev.testing.transport.engine import PATIENCE_S
from kvf_dev.testing.transport.node import status_of
from kvf_devices.endpoints import DeviceTransfer
from kvframework.api.copying import address_of
from kvframework.api.layout import Layout
from kvframework.api.transport import Arena, Registration, TransferContext
from kvframework.client import KVClient, RequestHashes, WorkerAdapter
from kvframework.config.load import load_config
from kvframework.errors import BadLayout, DeviceError, TransportMismatch
from kvframework.registry.registry import PluginRegistry
from kvframework.server import Server
from kvframework.wire import messages as m
from tests.devices import rigs  # noqa: F401 - makes the example importable
from tests.support.waiting import wait_until

import kvf_simdev  # isort: skip
from kvf_simdev import SimEngine  # isort: skip
from tests.devices import faulty  # isort: skip

SHAPE = (2, 64, 16, 2, 4)
GROUPS = {"groups": [{"layers": ["l*"], "axes": ["plane", "block", "token", "head", "dim"], "block_size": 16}]}
REFUSED = "transport lends_nothing is left out, because it cannot use this engine's memory"


@pytest.fixture(autouse=True)
def every_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a kind five lines pass in ten seconds, and these tests make more."""
    monkeypatch.setattr(logging.getLogger("kvframework.client.instance"), "filters", [])


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SimulatedNode]:
    with SimulatedNode(tmp_path_factory.mktemp("node")) as made:
        yield made


@pytest.fixture(autouse=True)
def nothing_is_left_open() -> Iterator[None]:
    yield
    assert faulty.LendsNothing.open == []


def registry() -> PluginRegistry:
    made = PluginRegistry()
    made.register(faulty, distribution="tests")
    return made


@contextmanager
def serving(connected: KVClient, node: SimulatedNode, *transports: str) -> Iterator[None]:
    settings = [f"server.endpoint={connected.endpoint}", "server.chunk_size=16", "l1.capacity=8MiB"]
    for number, name in enumerate(transports):
        settings.append(f"transport.{number}.use={name}")
        if name != "cpu_gather":
            settings.append(f"transport.{number}.node={node.path}")
    server = Server(load_config(None, tuple(settings)), registry())
    server.bind()
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        assert connected.wait_up(PATIENCE_S)
        yield
    finally:
        server.stop()
        thread.join(PATIENCE_S)
        assert not thread.is_alive()


@pytest.fixture
def connected(tmp_path_factory: pytest.TempPathFactory) -> Iterator[KVClient]:
    endpoint = f"ipc://{tmp_path_factory.mktemp('s')}/s.sock"
    with KVClient(endpoint, plugins=registry(), deadline_scale=20.0) as client:
        yield client


def worker(client: KVClient, node: SimulatedNode | None, transport: str = "auto") -> WorkerAdapter:
    options = {} if node is None else {"node": str(node.path)}
    return WorkerAdapter(
        client,
        instance_id=1,
        model_name="m",
        transport=transport,
        transport_options=options,
        layout="paged",
        layout_options=GROUPS,
    )


def on_devices(node: SimulatedNode, *devices: int) -> dict[str, Any]:
    runtime = kvf_simdev.runtime(str(node.path))
    return {
        f"l{number}": DeviceTensor.empty(runtime, runtime.devices[device], SHAPE, "float16")
        for number, device in enumerate(devices)
    }


def taken(client: KVClient) -> list[str]:
    instances = status_of(client)["instances"]
    assert isinstance(instances, list)
    return [instance["transport"] for instance in instances]


def stores(client: KVClient, adapter: WorkerAdapter) -> bool:
    request = RequestHashes(client.hasher, 16, request_id="r")
    request.extend(range(16))
    return adapter.submit_store(request, 0, 16, [[3]]).result(PATIENCE_S)


def refuse_late(monkeypatch: pytest.MonkeyPatch, driver: type[SimEngine]) -> list[Registration]:
    """Make a driver's transport refuse what the server has registered; return the list of them from now on."""
    refused: list[Registration] = []
    original = DeviceTransfer.on_registered

    def on_registered(self: Any, registration: Registration, layout: Layout) -> None:
        if isinstance(self._driver, driver):
            refused.append(registration)
            raise BadLayout("this transport cannot move it")
        original(self, registration, layout)

    monkeypatch.setattr(DeviceTransfer, "on_registered", on_registered)
    return refused


def test_a_transport_that_cannot_lend_the_memory_is_left_out_and_the_next_one_taken(
    node: SimulatedNode, connected: KVClient, caplog: pytest.LogCaptureFixture
) -> None:
    with serving(connected, node, "lends_nothing", "sound"):
        adapter = worker(connected, node)
        with caplog.at_level(logging.WARNING):
            adapter.register_kv_caches(on_devices(node, 0, 0), block_size=16)
        assert faulty.LendsNothing.open == [], "what was given up is closed"
        assert taken(connected) == ["sound"]
        assert stores(connected, adapter)
        (said,) = [record.message for record in caplog.records if record.levelno >= logging.WARNING]
        assert said.startswith(REFUSED)
        assert "this memory is of a virtual pool" in said
        assert faulty.HINT in said
        adapter.close()


def test_the_chosen_transport_stays_after_a_restart(
    node: SimulatedNode, connected: KVClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving(connected, node, "lends_nothing", "sound"):
        adapter = worker(connected, node)
        adapter.register_kv_caches(on_devices(node, 0, 0), block_size=16)
    monkeypatch.setattr(faulty.LendsNothing, "lends", True)
    with serving(connected, node, "lends_nothing", "sound"):
        wait_until(lambda: connected.usable and taken(connected), PATIENCE_S, "the registration at the new server")
        assert taken(connected) == ["sound"]
        assert stores(connected, adapter)
        adapter.close()


def test_a_transport_that_was_named_is_refused(node: SimulatedNode, connected: KVClient) -> None:
    with serving(connected, node, "lends_nothing", "sound"):
        with pytest.raises(DeviceError, match="virtual pool") as refused:
            worker(connected, node, "lends_nothing").register_kv_caches(on_devices(node, 0, 0), block_size=16)
        assert refused.value.hint == faulty.HINT


def test_memory_that_nobody_takes_is_refused_with_every_reason(node: SimulatedNode, connected: KVClient) -> None:
    with serving(connected, node, "lends_nothing", "sound"):
        with pytest.raises(TransportMismatch) as refused:
            worker(connected, node).register_kv_caches(on_devices(node, 0, 1), block_size=16)
        assert f"lends_nothing: this memory is of a virtual pool ({faulty.HINT})" in refused.value.available
        assert "sound: " in refused.value.available
        assert "devices" in refused.value.available


@pytest.mark.torch
def test_host_tensors_go_by_the_transport_of_the_host(
    node: SimulatedNode, connected: KVClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch = pytest.importorskip("torch")
    # Options are for one transport: what all of them are to have comes from the environment.
    monkeypatch.setenv("KVF_SIMULATED_NODE", str(node.path))
    with serving(connected, node, "sound", "cpu_gather"):
        adapter = worker(connected, None)
        adapter.register_kv_caches({"l0": torch.zeros(*SHAPE)}, block_size=16)
        assert taken(connected) == ["cpu_gather"]
        assert stores(connected, adapter)
        adapter.close()


def test_a_transport_whose_copier_cannot_open_the_memory_is_left_out_too(
    node: SimulatedNode, connected: KVClient, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As between containers that share no namespace."""
    monkeypatch.setattr(faulty.LendsNothing, "lends", True)
    with serving(connected, node, "lends_nothing", "sound"):
        adapter = worker(connected, node)
        adapter.register_kv_caches(on_devices(node, 0), block_size=16)
        assert taken(connected) == ["sound"]
        assert stores(connected, adapter)
        assert REFUSED in caplog.text
        assert "it is not shared" in caplog.text
        adapter.close()


def test_what_a_transport_refuses_late_does_not_stay_registered(
    node: SimulatedNode, connected: KVClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server has registered the instance by then: it is taken back, and the next transport can have its id."""
    refuse_late(monkeypatch, faulty.RefusesLate)
    with serving(connected, node, "refuses_late", "sound"):
        with pytest.raises(BadLayout, match="cannot move it"):
            worker(connected, node, "refuses_late").register_kv_caches(on_devices(node, 0), block_size=16)
        assert taken(connected) == []
        adapter = worker(connected, node)
        adapter.register_kv_caches(on_devices(node, 0), block_size=16)
        assert taken(connected) == ["sound"]
        assert stores(connected, adapter)
        adapter.close()


def test_a_refusal_stands_until_there_is_another_server(
    node: SimulatedNode, connected: KVClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A wait mends nothing that does not fit: a lost instance asks once, not every few seconds."""
    with serving(connected, node, "sound"):
        adapter = worker(connected, node)
        adapter.register_kv_caches(on_devices(node, 0), block_size=16)
        with monkeypatch.context() as patch:
            asked = refuse_late(patch, SimEngine)
            connected.request("UNREGISTER_KV_CACHE", m.Unregister(1), m.Empty)
            assert not stores(connected, adapter)
            instance = adapter._instance
            wait_until(lambda: instance._again is not None, PATIENCE_S, "the attempt to register again")
            thread = instance._again
            thread.join(PATIENCE_S)
            assert not thread.is_alive(), "it tries again"
            for _ in range(3):
                assert not stores(connected, adapter)
            assert instance._again is thread
            assert len(asked) == 1
            assert taken(connected) == []
    with serving(connected, node, "sound"):
        wait_until(lambda: connected.usable and taken(connected), PATIENCE_S, "the registration at the new server")
        assert stores(connected, adapter)
        adapter.close()


@pytest.mark.torch
def test_an_instance_that_was_never_made_does_not_register_later(
    node: SimulatedNode, connected: KVClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever error ended its constructor, a new server hears nothing of it."""

    class Fails:
        spare_blocks = (0,)

        def declared(self, layout: object) -> None:
            raise ZeroDivisionError

    with serving(connected, node, "sound"):
        with pytest.raises(ZeroDivisionError):
            worker(connected, node).register_kv_caches(on_devices(node, 0), block_size=16, view=Fails())  # type: ignore[arg-type]
        assert taken(connected) == []
        assert connected._on_up == []


def test_tensors_are_registered_anew_only_after_a_close(node: SimulatedNode, connected: KVClient) -> None:
    with serving(connected, node, "sound"):
        adapter = worker(connected, node)
        adapter.register_kv_caches(on_devices(node, 0), block_size=16)
        with pytest.raises(ValueError, match="instance 1 is already registered") as refused:
            adapter.register_kv_caches(on_devices(node, 0), block_size=16)
        assert "call close() before you free the old tensors, then register the new ones" in refused.value.hint
        adapter.close()
        adapter.register_kv_caches(on_devices(node, 0), block_size=16)
        assert stores(connected, adapter)
        adapter.close()


def test_a_transport_is_offered_the_arena_of_each_server_until_its_end(
    connected: KVClient, node: SimulatedNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Arena | None] = []
    monkeypatch.setattr(TransferContext, "on_arena", lambda _, arena: seen.append(arena))

    def is_offered() -> bool:
        arena = connected.arena
        if arena is None or not seen or (last := seen[-1]) is None:
            return False
        with address_of(arena.view) as place:
            return (last.address, last.view.nbytes) == place

    engine = worker(connected, node, "sound")
    with serving(connected, node, "sound"):
        engine.register_kv_caches(on_devices(node, 0), block_size=16)
        assert is_offered()
    wait_until(lambda: seen[-1] is None)
    seen.clear()
    with serving(connected, node, "sound"):
        wait_until(is_offered)
        engine.close()
        assert [each is None for each in seen] == [False, True]
