"""The example's transport obeys the contract, as it would when it is not installed but registered."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kvframework.testing import TransportConformance
from kvframework.testing.accelerator import SimulatedNode
from kvframework.testing.transport import RigSpec


class TestSimdev(TransportConformance):
    limit_s = 240.0  # its engine processes import torch

    @pytest.fixture(scope="class")
    @classmethod
    def spec(cls, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RigSpec]:
        with SimulatedNode(tmp_path_factory.mktemp("node"), seed=3, max_delay_s=0.0005) as node:
            yield RigSpec("tests.devices.rigs:simdev", {"node": str(node.path), "device": -1})
