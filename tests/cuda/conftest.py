"""Fixtures of the CUDA tests: the simulated driver, in the test's own process or in others."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kvf_dev.testing.transport.node import client_of, serving
from kvframework.client import KVClient
from tests.cuda.building import KERNELS_VARIABLE, environment, preload
from tests.cuda.node import CudaNode
from tests.cuda.rig import CudaRig, make_simulated


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
def engine_option() -> str:
    return "dma"


@pytest.fixture
def rig(cuda_node: CudaNode, engine_option: str) -> Iterator[CudaRig]:
    """On the first GPU; nothing wrong may be done there."""
    made = make_simulated(str(cuda_node.path), device=0, engine=engine_option)
    made.empty((1,), "uint8")  # an engine uses its GPU before it registers
    yield made
    made.close()
    assert cuda_node.violations() == []


@pytest.fixture
def client(rig: CudaRig) -> Iterator[KVClient]:
    with serving(rig) as server, client_of(rig, server.endpoint) as connected:
        yield connected
