"""Shards over a server-driven transport: a copier writes and reads the parts of an engine's blocks."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import pytest

from kvf_dev.testing.accelerator.rig import SimulatedRig
from kvf_dev.testing.transport import engine as kit
from kvf_dev.testing.transport import node
from kvf_dev.testing.transport.engine import PAGED
from kvframework.client import KVClient, ModelPart, WorkerAdapter
from kvframework.server import Server

pytestmark = pytest.mark.torch

CASES = ("nhd", "hnd", "dim_before_token", "all_layers_in_one", "window")


@pytest.fixture(scope="module")
def server(rig: SimulatedRig) -> Iterator[Server]:
    plain = node.settings_for
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(
            node, "settings_for", lambda rig, endpoint: [*plain(rig, endpoint), "server.tp_lcm=2", "server.pp_lcm=6"]
        )
        with node.serving(rig) as running:
            yield running


@pytest.mark.parametrize("case", CASES)
def test_a_copier_moves_shards_bit_for_bit(
    rig: SimulatedRig, client: KVClient, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    monkeypatch.setattr(kit, "WorkerAdapter", partial(WorkerAdapter, part=ModelPart(2)))
    one = kit.KitEngine(rig, client, 1, PAGED[case], seed=1)
    other = kit.KitEngine(rig, client, 2, PAGED[case], seed=2)
    shards = 2 * PAGED[case][0].layers
    try:
        request = one.request()
        stored = one.store(request, one.source()).result(node.PATIENCE_S)
        assert (stored.ok, stored.stored) == (True, 3 * shards)
        assert other.registration.namespace == one.registration.namespace
        assert other.hit(request) == 3 * node.CHUNK
        for skip in (0, 5):
            assert other.load(request, other.target(), skip=skip).result(node.PATIENCE_S).ok
            other.expect_loaded(one.snapshot(), one.source(), other.target(), skip)
        other.must_be_right()
        one.must_be_right()
    finally:
        one.close()
        other.close()
