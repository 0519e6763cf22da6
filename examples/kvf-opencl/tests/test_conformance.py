"""The transport moves the right bytes, in order, and leaves nothing behind after the death of any process."""

import pytest
from kvf_dev.testing import TransportConformance
from kvf_dev.testing.transport import RigSpec


class TestOpencl(TransportConformance):
    @pytest.fixture(scope="class")
    @classmethod
    def spec(cls, tmp_path_factory: pytest.TempPathFactory) -> RigSpec:
        return RigSpec("opencl_rig:OpenclRig", {"directory": str(tmp_path_factory.mktemp("rig"))})
