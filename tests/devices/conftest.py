"""What most of these tests stand on: a node of simulated devices, on which nothing may be done wrong, and the transport
`simdev` on it. A test file that needs another one has its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing

import pytest

from kvf_dev.testing.accelerator import SimulatedNode
from kvf_dev.testing.accelerator.rig import SimulatedRig
from kvf_dev.testing.transport.engine import PAGED, KitEngine
from kvf_dev.testing.transport.node import client_of, serving
from kvframework.client import KVClient
from kvframework.server import Server
from tests.devices.rigs import simdev


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


Start = Callable[..., tuple[KVClient, Callable[..., KitEngine]]]


@pytest.fixture
def start(node: SimulatedNode) -> Iterator[Start]:
    """A server with one of the faulty transports, a client, and how to make an engine by its number."""
    with ExitStack() as stack:

        def starting(transport: str, **options: object) -> tuple[KVClient, Callable[..., KitEngine]]:
            rig = simdev(str(node.path), module="tests.devices.faulty", transport=transport, **options)
            stack.callback(rig.close)
            client = stack.enter_context(client_of(rig, stack.enter_context(serving(rig)).endpoint))

            def engine(number: int = 1) -> KitEngine:
                made = KitEngine(rig, client, number, PAGED["nhd"], seed=number)
                stack.callback(made.close)
                return made

            return client, engine

        yield starting
