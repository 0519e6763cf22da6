"""Copier processes that die, hang or lose their device: who is harmed, who is not, and how all comes back."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest

from kvf_dev.testing.accelerator import SimulatedNode
from kvf_dev.testing.accelerator.rig import SimulatedRig
from kvf_dev.testing.transport.engine import PAGED, PATIENCE_S, KitEngine, must_work
from kvf_dev.testing.transport.node import Program, client_of, held_by, status_of
from kvf_dev.testing.transport.rig import RigSpec
from kvf_devices.handles import export_memory
from kvframework.client import KVClient
from kvframework.errors import DeviceError
from kvframework.server import Server
from tests.devices.rigs import simdev
from tests.support.processes import children, send
from tests.support.waiting import wait_until

NHD = PAGED["nhd"]


@pytest.fixture(scope="module")
def rigs(node: SimulatedNode) -> Iterator[list[SimulatedRig]]:
    made = [simdev(str(node.path), device=number, stall_s=1.0) for number in range(2)]
    yield made
    for rig in made:
        rig.close()


@pytest.fixture(scope="module")
def rig(rigs: list[SimulatedRig]) -> SimulatedRig:
    return rigs[0]


@pytest.fixture
def pids(server: Server) -> Callable[[], dict[str, int]]:
    transport = server.service._transports["simdev"].server

    def running() -> dict[str, int]:
        devices: list[dict[str, Any]] = transport.status()["devices"]  # type: ignore[assignment]
        return {each["device"]: each["pid"] for each in devices if each["pid"] is not None}

    return running


@pytest.fixture
def engines(rigs: list[SimulatedRig], client: KVClient, node: SimulatedNode) -> Iterator[list[KitEngine]]:
    """Two on the first device, one on the second, all at work."""
    made = [KitEngine(rig, client, number, NHD, seed=number) for number, rig in enumerate([rigs[0], rigs[0], rigs[1]])]
    for engine in made:
        must_work(engine)
    yield made
    node.release()
    for engine in made:
        engine.close()
    wait_until(lambda: held_by(status_of(client)) == (0, 0))
    assert node.violations() == []


def comes_back(engine: KitEngine) -> None:
    """It misses for a while, registers again by itself, and works."""
    wait_until(lambda: engine.store(engine.request(), engine.source()).result(PATIENCE_S), PATIENCE_S, "a store")
    must_work(engine)


@contextmanager
def held_copy(node: SimulatedNode, device: str) -> Iterator[None]:
    before = node.hits("hold")
    node.inject("hold", device)
    yield
    wait_until(lambda: node.hits("hold") > before, what="a copy that is held")


def test_a_poisoned_context_harms_no_other_device(
    engines: list[KitEngine], node: SimulatedNode, pids: Callable[[], dict[str, int]]
) -> None:
    first, second, other = engines
    before = pids()
    node.inject("poison", node.devices[0])
    assert not first.store(first.request(), first.source()).result(PATIENCE_S).ok
    must_work(other)
    comes_back(first)
    comes_back(second)
    after = pids()
    assert after[node.devices[1]] == before[node.devices[1]]
    assert after[node.devices[0]] != before[node.devices[0]]
    must_work(other)


def copiers(client: KVClient) -> dict[str, Any]:
    return {device["device"]: device for device in status_of(client)["transports"]["simdev"]["devices"]}


def test_a_copier_killed_in_mid_copy_is_a_miss_and_comes_back(
    engines: list[KitEngine],
    node: SimulatedNode,
    client: KVClient,
    pids: Callable[[], dict[str, int]],
    caplog: pytest.LogCaptureFixture,
) -> None:
    first, second, other = engines
    before = copiers(client)
    request = first.request()
    with held_copy(node, node.devices[0]):
        held = first.store(request, first.source())
    waiting = second.store(second.request(), second.source())
    os.kill(pids()[node.devices[0]], signal.SIGKILL)
    assert not held.result(PATIENCE_S).ok
    assert not waiting.result(PATIENCE_S).ok
    node.release()
    must_work(other)
    comes_back(first)
    comes_back(second)
    assert first.hit(request) == 0, "nothing of it was published"
    after = copiers(client)
    killed, unharmed = node.devices[:2]
    assert after[killed]["starts"] == before[killed]["starts"] + 1
    assert after[killed]["pid"] == pids()[killed]
    assert "ended by signal SIGKILL" in after[killed]["last_error"]
    assert after[unharmed] == before[unharmed]
    assert f"the copier of {killed} ended by signal SIGKILL; its instances must register again" in caplog.text
    # What these tests do to copiers costs clients several stores, which the status tells for a minute.
    wait_until(
        lambda: {each["where"] for each in status_of(client)["problems"]} <= {"losses"},
        what="both instances to be there again",
    )


def test_a_copier_that_hangs_is_killed(
    engines: list[KitEngine], node: SimulatedNode, pids: Callable[[], dict[str, int]]
) -> None:
    first, _, other = engines
    before = pids()
    with held_copy(node, node.devices[0]):
        stuck = first.store(first.request(), first.source())
    assert not stuck.result(PATIENCE_S).ok
    node.release()
    must_work(other)
    comes_back(first)
    assert pids()[node.devices[0]] != before[node.devices[0]]


def test_a_copier_that_is_stopped_is_killed(
    engines: list[KitEngine], node: SimulatedNode, pids: Callable[[], dict[str, int]]
) -> None:
    first, _, other = engines
    send(pids()[node.devices[0]], signal.SIGSTOP)
    assert not first.store(first.request(), first.source()).result(PATIENCE_S).ok
    must_work(other)
    comes_back(first)


def test_a_device_that_vanishes_comes_back(
    engines: list[KitEngine], node: SimulatedNode, rigs: list[SimulatedRig], client: KVClient
) -> None:
    first, _, other = engines
    node.vanish(node.devices[1])
    for _ in range(3):
        # The engine's own driver may be the first to see it.
        assert not other.worker.submit_store(other.request(), 0, 48, other.source()).result(PATIENCE_S).ok
    must_work(first)
    node.vanish(node.devices[1], back=True)
    comes_back(other)


def test_devices_that_are_none_keep_no_room_from_others(
    rigs: list[SimulatedRig], client: KVClient, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    transport = server.service._transports["simdev"].server
    monkeypatch.setattr("kvf_devices.endpoints.MAX_DEVICES", len(transport._copiers) + 1)
    engine = KitEngine(rigs[0], client, 60, NHD)
    engine.close()
    for number in range(2):
        device = f"none-{number}".ljust(36, "-")

        def lend_of_none(*lent: Any, device: str = device) -> tuple[str, tuple[bytes, ...]]:
            real, handles = export_memory(*lent)
            return device, tuple(handle.replace(real.encode(), device.encode()) for handle in handles)

        monkeypatch.setattr("kvf_devices.endpoints.export_memory", lend_of_none)
        with pytest.raises(DeviceError, match=f"no device {device}"):
            engine.worker.register_kv_caches(engine.caches, block_size=4)
    monkeypatch.setattr("kvf_devices.endpoints.export_memory", export_memory)
    engine.worker.register_kv_caches(engine.caches, block_size=4)
    must_work(engine)
    engine.close()


def test_the_copier_says_to_the_engine_that_it_lives(
    engines: list[KitEngine], pids: Callable[[], dict[str, int]]
) -> None:
    """It holds the engines' liveness sockets, so that they take the server for dead only when the copier is, too."""
    for pid, count in zip(pids().values(), (2, 1), strict=True):
        high = [fd for fd in Path(f"/proc/{pid}/fd").iterdir() if int(fd.name) >= 1024]
        assert len(high) == count
        assert all(os.readlink(fd).startswith("socket:") for fd in high)


def test_a_copier_ends_with_its_server(tmp_path: Path, node: SimulatedNode) -> None:
    endpoint = f"ipc://{tmp_path}/s.sock"
    spec = RigSpec("tests.devices.rigs:simdev", {"node": str(node.path)})
    with (
        closing(Program("server", spec, endpoint)) as program,
        closing(spec.make()) as rig,
        client_of(rig, endpoint) as client,
    ):
        engine = KitEngine(rig, client, 1, NHD)
        must_work(engine)
        copiers = children(program.process.pid)
        assert len(copiers) == 1
        program.process.kill()
        wait_until(lambda: not any(lives(pid) for pid in copiers), PATIENCE_S, "the end of the copier")
        assert rig.open_elsewhere() == 0


def lives(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in "ZX"
