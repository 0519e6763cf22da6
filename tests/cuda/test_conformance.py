"""`kvf_cuda_ipc` obeys the contract: on the simulated driver, by either copy engine, and on a real GPU."""

from __future__ import annotations

import pytest

from kvf_dev.testing import TransportConformance
from kvf_dev.testing.transport import RigSpec
from kvf_dev.testing.transport.memory import Content, Faults
from tests.cuda.building import is_simulated
from tests.cuda.node import CudaNode


class TestSimulatedDma(TransportConformance):
    limit_s = 240.0  # its engine processes import torch

    @pytest.fixture(scope="class")
    @classmethod
    def spec(cls, cuda_node: CudaNode) -> RigSpec:
        return RigSpec("tests.cuda.rig:make_simulated", {"node": str(cuda_node.path), "engine": "dma"})


@pytest.mark.usefixtures("cuda_kernels")
class TestSimulatedKernel(Content, Faults):
    """Tests that depend on the copy engine: the bytes, and the effect of a failed copy."""

    @pytest.fixture(scope="class")
    @classmethod
    def spec(cls, cuda_node: CudaNode) -> RigSpec:
        return RigSpec("tests.cuda.rig:make_simulated", {"node": str(cuda_node.path), "engine": "kernel"})


class OnGpu(TransportConformance):
    engine: str

    @pytest.fixture(scope="class")
    @classmethod
    def spec(cls) -> RigSpec:
        if is_simulated():
            pytest.skip("this process has the simulated driver: run these alone, -m gpu")
        cu = pytest.importorskip("cuda.bindings.driver", reason="needs cuda-bindings")
        try:
            (status,) = cu.cuInit(0)
        except RuntimeError:
            pytest.skip("libcuda.so.1 cannot be loaded: install an NVIDIA driver, or give the container GPUs, with")
        if status:
            pytest.skip(f"there is no GPU here: {status.name}")
        return RigSpec("tests.cuda.rig:make", {"engine": cls.engine})


@pytest.mark.gpu
class TestGpuDma(OnGpu):
    engine = "dma"


@pytest.mark.gpu
class TestGpuKernel(OnGpu):
    engine = "kernel"
