"""The kit on every planted bug, for `test_planted_bugs.py`, which runs it in a process of its own: a class per bug."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kvf_dev.testing import TransportConformance
from kvf_dev.testing.accelerator import SimulatedNode
from kvf_dev.testing.transport import RigSpec
from tests.devices.rigs import simdev  # noqa: F401 - makes the example importable
from tests.devices.test_planted_bugs import BUGS


def _class_for(bug: str) -> type:
    @pytest.fixture(scope="class")
    @classmethod
    def spec(cls: type, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RigSpec]:
        with SimulatedNode(tmp_path_factory.mktemp("node"), max_delay_s=0.0005) as node:
            arguments = {"node": str(node.path), "module": "tests.devices.planted", "transport": bug, "device": -1}
            yield RigSpec("tests.devices.rigs:simdev", arguments)

    return type(f"Test_{bug}", (TransportConformance,), {"spec": spec, "patience_s": 3.0})


for each in BUGS:
    globals()[f"Test_{each}"] = _class_for(each)
