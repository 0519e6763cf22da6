"""Fixtures of the CUDA tests: the simulated driver, in the test's own process or in others."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cuda.building import KERNELS_VARIABLE, driver_library, environment, preload
from tests.cuda.node import CudaNode
from tests.cuda.peers import Peer


@pytest.fixture(scope="session")
def _node_of_process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CudaNode]:
    """One per process, since a process has one driver."""
    preload()
    with CudaNode(tmp_path_factory.mktemp("cuda") / "node", seed=5, max_delay_s=0.0005) as node:
        yield node
        for left in node.path.glob("memory-*"):
            left.unlink(missing_ok=True)


@pytest.fixture(scope="class")
def cuda_node(_node_of_process: CudaNode) -> Iterator[CudaNode]:
    """The simulated node of this process and of processes started while it exists."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in environment(_node_of_process.path).items():
            patch.setenv(name, value)
        yield _node_of_process


@pytest.fixture(scope="class")
def cuda_kernels(cuda_node: CudaNode) -> Iterator[None]:
    """A node on which kernels run as well, on the host; for a GPU they are compiled beforehand."""
    pytest.importorskip("cuda.bindings.nvrtc")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(KERNELS_VARIABLE, environment(cuda_node.path, kernels=True)[KERNELS_VARIABLE])
        yield


@pytest.fixture
def node(tmp_path: Path) -> Iterator[CudaNode]:
    """A node for processes that the test starts."""
    driver_library()
    with CudaNode(tmp_path / "node", nbytes=1 << 20, seed=11) as made:
        yield made


@pytest.fixture
def peer(node: CudaNode) -> Iterator[Peer]:
    with Peer(node) as made:
        yield made


@pytest.fixture
def other(node: CudaNode) -> Iterator[Peer]:
    with Peer(node) as made:
        yield made
