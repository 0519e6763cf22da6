from collections.abc import Iterator

import pytest

from kvframework.testing import TransportConformance
from kvframework.testing.accelerator import SimulatedNode
from kvframework.testing.transport import RigSpec


class TestSimdev(TransportConformance):
    @pytest.fixture(scope="class")
    @classmethod
    def spec(cls, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RigSpec]:
        with SimulatedNode(tmp_path_factory.mktemp("node")) as node:
            yield RigSpec("simdev_rig:make", {"node": str(node.path)})
