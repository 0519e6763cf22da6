"""What a client does over the kill of its server: it writes late, reads on, commits, connects again, forks. Server-
driven copies over the kill of their server: the copier ends with it, before the next one hands anything out."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from kvf_dev.testing.accelerator import SimulatedNode
from kvf_dev.testing.transport import RigSpec
from kvf_dev.testing.transport.engine import PAGED, PATIENCE_S, KitEngine, must_work
from kvf_dev.testing.transport.node import Program, client_of
from kvframework.errors import KVFrameworkError
from kvframework.wire import messages as m
from tests.core.restart.device_server import RIG
from tests.core.restart.prompts import CAPACITY, OBJECT, fill_of, overwrite_all
from tests.devices.rigs import simdev
from tests.support.held_server import HeldServer
from tests.support.line_process import LineProcess
from tests.support.processes import arenas, children, has_ended
from tests.support.server_process import fixture_of
from tests.support.waiting import wait_until
from tests.support.wire_client import WireClient, key_for

pytestmark = pytest.mark.timeout(300)

PROGRAM = "tests.core.restart.writer_program"
KILLS = 10


server = fixture_of(HeldServer, capacity=CAPACITY)


def quarantined(client: WireClient) -> int:
    return int(client.status()["l1"]["quarantined_bytes"])


def test_a_writer_that_was_killed_with_its_server_holds_nothing(server: HeldServer) -> None:
    with engine(server, "waits") as running:
        running.said("ranges")
        running.process.kill()
        server.kill9()
        server.start()
        server.unwritten()


def test_a_reader_that_was_pinned_over_the_kill_learns_that_it_read_nothing(server: HeldServer) -> None:
    with server.client() as reader:
        key = key_for(reader.register(1), [7] * 512)
        reader.store(key, b"seven")
        plan = reader.prepare_retrieve(key)
        assert plan.hit
        server.kill9()
        server.start()
        with server.client() as other:
            overwrite_all(other, 2)
            other.register(3)
            with pytest.raises(KVFrameworkError):
                other.call("COMMIT_RETRIEVE", m.LeaseRef(plan.lease))
        # The same connection goes to the new server, which does not know its session.
        with pytest.raises(KVFrameworkError):
            reader.call("COMMIT_RETRIEVE", m.LeaseRef(plan.lease))


def test_a_commit_in_flight_is_all_or_nothing(server: HeldServer) -> None:
    outcomes = []
    for number in range(KILLS):
        server.has_served()
        with server.client() as client:
            registered = client.register(1)
            key = key_for(registered, [number] * 512)
            plan = client.prepare_store(key)
            client.write(plan, fill_of(number))
            # More that ends at any point.
            for further in range(number):
                client.send("PREPARE_STORE", m.Prepare(key_for(registered, [100 * number + further + 50] * 512), 1))
            client.send("COMMIT_STORE", m.LeaseRef(plan.lease))
            server.kill9()
        server.start()
        with server.client() as client:
            assert client.status()["l1"]["recovered"]["why_cold"] == ""
            server.unwritten(client)
            client.register(1)
            found = client.retrieve(key)
            outcomes.append(found is not None)
            assert found in (None, (fill_of(number) * OBJECT)[:OBJECT] * 2), f"wrong bytes in object {number}"
            for further in range(number):
                unwritten = key_for(registered, [100 * number + further + 50] * 512)
                assert client.retrieve(unwritten) is None
    print(f"commits that counted: {sum(outcomes)} of {KILLS}")


class Running(LineProcess):
    """The writer's process, and what it says."""

    def said(self, name: str) -> dict[str, Any]:
        """Return its next line with this fact."""
        while True:
            line = json.loads(self.hear())
            if name in line:
                assert isinstance(line, dict)
                return line


def engine(server: HeldServer, how: str) -> Running:
    return Running("-m", PROGRAM, server.endpoint, how)


def test_a_copy_that_runs_on_after_its_client_has_connected_again(server: HeldServer) -> None:
    with engine(server, "waits") as running:
        ranges = {tuple(place) for place in running.said("ranges")["ranges"]}
        server.kill9()
        server.start()
        with server.client() as other:
            # It has the new server's arena beside the old one.
            wait_until(lambda: arenas(running.pid) == 2, what="the second mapping")
            taken = overwrite_all(other, 2)
            assert taken.isdisjoint(offset for offset, _ in ranges)
            assert quarantined(other) == 4 * OBJECT
            running.tell()
            assert running.said("reconnected") == {"pid": running.pid, "reconnected": True, "stored": 0}
            assert overwrite_all(other, 3, first=5000).isdisjoint(offset for offset, _ in ranges)
            running.tell()
            running.said("ended")
            server.unwritten(other)
            assert arenas(running.pid) == 1


def test_a_forked_child_of_a_writer_holds_nothing(server: HeldServer) -> None:
    """It cannot write: its range is free once the writer has ended."""
    with engine(server, "forks") as running:
        running.said("ranges")
        (child,) = children(running.pid)
        server.kill9()
        server.start()
        with server.client() as other:
            wait_until(lambda: arenas(running.pid) == 2, what="the second mapping")
            assert quarantined(other) == 4 * OBJECT
            running.process.kill()
            running.process.wait()
            server.unwritten(other)
            assert not has_ended(child)
            overwrite_all(other, 2)


@pytest.fixture
def node(tmp_path: Path) -> Iterator[SimulatedNode]:
    with SimulatedNode(tmp_path) as made:
        yield made
        assert made.violations() == []


def test_a_copy_that_stands_still_at_the_kill(node: SimulatedNode, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = {"node": str(node.path), "stall_s": 60.0}
    spec = RigSpec("tests.devices.rigs:simdev", arguments)
    monkeypatch.setenv(RIG, json.dumps([spec.factory, arguments]))
    with (
        HeldServer(program=("-m", "tests.core.restart.device_server")) as server,
        closing(Program("engine", spec, server.endpoint, "1", "nhd")) as engine,
    ):
        copies = node.hits("hold")
        node.inject("hold", node.devices[0])
        engine.send("begin", "store", 1)
        wait_until(lambda: node.hits("hold") > copies, PATIENCE_S, "a copy that is held")
        copiers = children(server.pid)
        assert copiers
        server.kill9()
        server.start()
        assert all(has_ended(copier) for copier in copiers)
        assert server.recovered()["why_cold"] == ""
        node.release()
        with closing(simdev(str(node.path), device=1, stall_s=60.0)) as rig, client_of(rig, server.endpoint) as client:
            other = KitEngine(rig, client, 2, PAGED["nhd"], seed=2)
            must_work(other)
            server.kill9()
            server.start()
            wait_until(lambda: client.usable, PATIENCE_S, "the next server")
            must_work(other)
            other.close()
        engine.kill()
        server.unwritten()
        assert "Traceback" not in server.log
