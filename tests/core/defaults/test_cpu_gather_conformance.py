"""`cpu_gather` obeys the contract of every transport."""

from __future__ import annotations

import pytest

from kvf_dev.testing import TransportConformance
from kvf_dev.testing.transport import RigSpec

pytestmark = pytest.mark.torch


class TestCpuGather(TransportConformance):
    limit_s = 240.0  # its engine processes import torch

    @pytest.fixture(scope="class")
    @classmethod
    def spec(cls, tmp_path_factory: pytest.TempPathFactory) -> RigSpec:
        arguments = {"transport": "cpu_gather", "directory": str(tmp_path_factory.mktemp("rig"))}
        return RigSpec("kvf_dev.testing.transport.rig:TorchRig", arguments)
