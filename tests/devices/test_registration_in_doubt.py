"""Registering and letting go while the server is silent, restarts, or has a copier that takes its time: what is mapped
is known, and one instance's trouble is nobody else's."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from kvf_dev.testing.accelerator import SimulatedNode
from kvf_dev.testing.accelerator.rig import SimulatedRig
from kvf_dev.testing.transport import RigSpec
from kvf_dev.testing.transport.engine import PAGED, PATIENCE_S, KitEngine
from kvf_dev.testing.transport.node import Program, client_of, endpoint_in, status_of
from kvf_devices.supervisor import START_S
from kvframework.client import KVClient
from kvframework.errors import DeadlineExceeded
from kvframework.wire import messages as m
from kvframework.wire.protocol import LOCAL, REQUESTS
from tests.devices.rigs import simdev
from tests.devices.slow_copier import OPENS_NOTHING, STARTS_LATER
from tests.support.processes import send
from tests.support.waiting import wait_until

NHD = PAGED["nhd"]


@pytest.fixture
def spec(node: SimulatedNode) -> RigSpec:
    arguments = {"node": str(node.path), "module": "tests.devices.slow_copier", "transport": "slow"}
    return RigSpec("tests.devices.rigs:simdev", arguments)


@pytest.fixture
def rig(spec: RigSpec) -> Iterator[SimulatedRig]:
    with closing(simdev(**spec.arguments)) as made:  # type: ignore[arg-type]
        yield made


class Servers:
    """One after the other at the same place."""

    def __init__(self, spec: RigSpec, endpoint: str) -> None:
        self._spec = spec
        self.endpoint = endpoint
        self.now = Program("server", spec, endpoint)

    def another(self) -> None:
        self.now.kill()
        self.now = Program("server", self._spec, self.endpoint)


@pytest.fixture
def servers(spec: RigSpec, tmp_path: Path) -> Iterator[Servers]:
    made = Servers(spec, endpoint_in(tmp_path))
    yield made
    made.now.close()


@pytest.fixture
def client(rig: SimulatedRig, servers: Servers) -> Iterator[KVClient]:
    with closing(client_of(rig, servers.endpoint)) as connected:
        yield connected


def registers(client: KVClient) -> bool:
    return bool(status_of(client)["instances"])


def closing_in_background(engine: KitEngine) -> threading.Thread:
    thread = threading.Thread(target=engine.close)
    thread.start()
    return thread


def test_a_close_under_a_silent_server_waits_until_nothing_is_mapped(
    rig: SimulatedRig, servers: Servers, client: KVClient
) -> None:
    engine = KitEngine(rig, client, 1, NHD)
    pid = servers.now.process.pid
    send(pid, signal.SIGSTOP)
    try:
        with pytest.raises(DeadlineExceeded):
            client.request("NOOP", m.Empty(), m.Empty, timeout=0.2)
        assert not client.usable
        thread = closing_in_background(engine)
        thread.join(0.3)
        assert thread.is_alive(), "the server may be in the midst of a copy"
    finally:
        os.kill(pid, signal.SIGCONT)
    thread.join(PATIENCE_S)
    assert not thread.is_alive()
    assert rig.open_elsewhere() == 0


def test_a_close_during_a_registration_leaves_nothing_mapped(
    rig: SimulatedRig, node: SimulatedNode, servers: Servers, client: KVClient
) -> None:
    engine = KitEngine(rig, client, 1, NHD)
    later = node.path / STARTS_LATER
    later.touch()
    servers.another()
    with closing(client_of(rig, servers.endpoint)) as observer:
        wait_until(lambda: registers(observer), PATIENCE_S, "the registration at the new server")
        thread = closing_in_background(engine)
        thread.join(0.2)
        later.unlink()
        thread.join(PATIENCE_S)
        assert not thread.is_alive()
        assert not registers(observer)
        assert rig.open_elsewhere() == 0
    KitEngine(rig, client, 1, NHD).close()


def test_a_registration_that_comes_too_late_is_taken_back(
    rig: SimulatedRig, node: SimulatedNode, servers: Servers, client: KVClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    later = node.path / STARTS_LATER
    later.touch()
    with closing(client_of(rig, servers.endpoint)) as observer:
        with monkeypatch.context() as patch:
            patch.setattr(client, "deadlines", replace(client.deadlines, export_s=0.3))
            with pytest.raises(DeadlineExceeded):
                KitEngine(rig, client, 1, NHD)
        assert registers(observer)
        later.unlink()
        wait_until(lambda: not registers(observer), PATIENCE_S, "the end of what nobody waits for")
    wait_until(lambda: client.usable and rig.open_elsewhere() == 0, PATIENCE_S, "the end of its mappings")
    KitEngine(rig, client, 1, NHD).close()


def test_a_registration_waits_longer_than_a_copier_may_take_to_start() -> None:
    assert START_S < REQUESTS["REGISTER_KV_CACHE"].deadline_s < LOCAL.export_s


def test_an_instance_that_a_new_server_cannot_open_is_nobody_elses_trouble(
    rig: SimulatedRig, node: SimulatedNode, servers: Servers, client: KVClient
) -> None:
    engine = KitEngine(rig, client, 1, NHD)
    nothing = node.path / OPENS_NOTHING
    nothing.touch()
    servers.another()
    wait_until(lambda: client.usable, PATIENCE_S, "the connection to the new server")
    assert status_of(client)["transports"]
    assert rig.open_elsewhere() == 0
    nothing.unlink()
    wait_until(lambda: rig.open_elsewhere() == len(engine.tensors), PATIENCE_S, "the registration, by itself")
    request = engine.request()
    wait_until(lambda: engine.store(request, engine.source()).result(PATIENCE_S), PATIENCE_S, "a store")
    engine.close()
