"""The transport in the engine's thread of docs/plugins/transports.md, at a real server: what it cannot do is refused at
its registration, and what fails later is a miss."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from kvf_dev.testing.accelerator import Accelerator, SimulatedNode
from kvf_dev.testing.accelerator.rig import SimulatedRig
from kvf_dev.testing.kit import wait_until
from kvf_dev.testing.transport.engine import PAGED, PATIENCE_S, KitEngine
from kvf_dev.testing.transport.node import client_of, held_by, serving, status_of
from kvframework.client import KVClient
from kvframework.errors import ServerGone, TransportMismatch
from tests.core.registry.fake_distributions import install
from tests.docs.shown import blocks
from tests.docs.test_transports import GUIDE

NHD = PAGED["nhd"]


@pytest.fixture
def rig(site: Path, tmp_path: Path) -> Iterator[SimulatedRig]:
    install(site, "example", {"transport.copy": "kvf_copy"}, {"kvf_copy": blocks(GUIDE, "python")[-1]})
    with SimulatedNode(tmp_path / "node") as node:
        runtime = Accelerator(str(node.path))
        with closing(SimulatedRig(runtime, str(node.path), "copy", options={})) as made:
            yield made


@pytest.fixture
def client(rig: SimulatedRig) -> Iterator[KVClient]:
    with serving(rig) as server, client_of(rig, server.endpoint) as connected:
        yield connected


def test_it_stores_and_loads(rig: SimulatedRig, client: KVClient) -> None:
    engine = KitEngine(rig, client, 1, NHD)
    request = engine.stored()
    assert engine.hit(request) == engine.chunks * engine.registration.desc.chunk_tokens
    assert engine.load(request, engine.target()).result(PATIENCE_S).ok
    assert not engine.load(engine.request(), engine.target()).result(PATIENCE_S).ok
    # The end of the lookup goes with a later message.
    wait_until(lambda: held_by(status_of(client)) == (0, 0), "the end of all pins and reservations")


def test_without_the_arena_it_is_refused_at_once(
    rig: SimulatedRig, client: KVClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(KVClient, "maps_arena", property(lambda _: False))
    with pytest.raises(TransportMismatch, match="which is not mapped here"):
        KitEngine(rig, client, 1, NHD)
    assert status_of(client)["instances"] == []


def test_an_arena_that_goes_away_later_is_a_miss(
    rig: SimulatedRig, client: KVClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As it does between the end of a server and the moment in which the client knows it."""
    engine = KitEngine(rig, client, 1, NHD)
    request = engine.request()
    monkeypatch.setattr(client, "_arena", None)
    outcome = engine.store(request, engine.source()).result(PATIENCE_S)
    assert (outcome.stored, outcome.error) == (0, ServerGone.code)
    assert engine.hit(request) == 0
