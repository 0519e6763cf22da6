"""What most of these tests stand on: a node of simulated devices, on which nothing may be done wrong, and the transport
`simdev` on it. A test file that needs another one has its own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing

import pytest

from kvf_dev.testing.accelerator import SimulatedNode
from kvf_dev.testing.accelerator.rig import SimulatedRig
from kvf_dev.testing.transport.node import client_of, serving
from kvframework.client import KVClient
from kvframework.server import Server
from tests.core.devices.rigs import simdev


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SimulatedNode]:
    with SimulatedNode(tmp_path_factory.mktemp("node"), max_delay_s=0.0005) as made:
        yield made
        assert made.violations() == []


@pytest.fixture(scope="module")
def rig(node: SimulatedNode) -> Iterator[SimulatedRig]:
    with closing(simdev(str(node.path))) as made:
        yield made


@pytest.fixture(scope="module")
def server(rig: SimulatedRig) -> Iterator[Server]:
    with serving(rig) as running:
        yield running


@pytest.fixture
def client(rig: SimulatedRig, server: Server) -> Iterator[KVClient]:
    with client_of(rig, server.endpoint) as connected:
        yield connected
