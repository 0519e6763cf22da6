"""Server-driven copies over the kill of their server: the copier ends with it, before the next one hands anything
out."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from kvf_dev.testing.accelerator import SimulatedNode
from kvf_dev.testing.transport import RigSpec
from kvf_dev.testing.transport.engine import PAGED, PATIENCE_S, KitEngine, must_work
from kvf_dev.testing.transport.node import Program, client_of
from tests.core.restart.device_server import RIG
from tests.devices.rigs import simdev
from tests.support.held_server import HeldServer
from tests.support.processes import children, has_ended
from tests.support.waiting import wait_until

pytestmark = pytest.mark.timeout(300)


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
