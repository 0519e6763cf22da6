from collections.abc import Iterator

import pytest

from kvf_dev.testing import TransportConformance
from kvf_dev.testing.accelerator import SimulatedNode
from kvf_dev.testing.transport import RigSpec


class TestSimdev(TransportConformance):
    @pytest.fixture(scope="class")
    @classmethod
    def spec(cls, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RigSpec]:
        with SimulatedNode(tmp_path_factory.mktemp("node")) as node:
            yield RigSpec("simdev_rig:make", {"node": str(node.path)})
