"""The example's transport obeys the contract, as it would when it is not installed but registered."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kvf_dev.testing import TransportConformance
from kvf_dev.testing.accelerator import SimulatedNode
from kvf_dev.testing.transport import RigSpec


class TestSimdev(TransportConformance):
    limit_s = 240.0  # its engine processes import torch

    @pytest.fixture(scope="class")
    @classmethod
    def spec(cls, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RigSpec]:
        with SimulatedNode(tmp_path_factory.mktemp("node"), max_delay_s=0.0005) as node:
            yield RigSpec("tests.devices.rigs:simdev", {"node": str(node.path), "device": -1})
