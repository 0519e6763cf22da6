"""The simulated CUDA driver notes what a device would let pass, so that a test that finds no note proves something.
What it does with right calls and with faults, the kit and `test_guesses.py` show. What only this transport meets, on
the simulated driver: GPUs that are seen otherwise elsewhere or fall off the bus, memory that cannot be exported,
drivers and installations that lack one of the copy engines."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from kvf_dev.testing.transport import RigSpec
from kvf_dev.testing.transport.engine import PAGED, PATIENCE_S, KitEngine
from kvf_dev.testing.transport.node import Program, endpoint_in
from kvframework.client import KVClient
from tests.cuda.building import KERNELS_VARIABLE, environment
from tests.cuda.node import CudaNode
from tests.cuda.rig import CudaRig, make_simulated
from tests.support.waiting import wait_until

SET_UP = """
import ctypes
from cuda.bindings import driver as cu
from tests.cuda.device import CudaDevice, call

gpu = CudaDevice()
memory, stream, other = gpu.allocate(1000), gpu.new_stream(), gpu.new_stream()
call(cu.cuCtxPushCurrent, gpu._context)
host = int(call(cu.cuMemHostAlloc, 4096, 3))


def batch(to, source, sizes, order=1):
    attributes = cu.CUmemcpyAttributes()
    attributes.srcAccessOrder = cu.CUmemcpySrcAccessOrder(order)
    columns = ([cu.CUdeviceptr(each) for each in column] for column in (to, source))
    cu.cuMemcpyBatchAsync(*columns, sizes, len(sizes), [attributes], [0], 1, stream)
"""
UNORDERED = """
import sys, time
from tests.cuda.node import CudaNode
node = CudaNode.attached(sys.argv[1])
node.inject("hold", node.devices[0])
batch([memory, memory + 500], [host, host], [100, 100])
done = call(cu.cuEventCreate, 2)
call(cu.cuEventRecord, done, stream)
while not node.hits("hold"):
    time.sleep(0.001)
if {ordered}:
    call(cu.cuStreamWaitEvent, other, done, 0)
call(cu.cuMemcpyDtoHAsync, host + 1000, memory + 200, 300, other)  # which the copy leaves alone
call(cu.cuMemcpyDtoHAsync, host + 2000, memory + 599, 1, other)
while not {ordered} and not node.violations():
    time.sleep(0.001)
node.release()
gpu.finish(other)
"""


@pytest.mark.parametrize(
    ("done", "noted"),
    [
        ("cu.cuMemcpyHtoDAsync(memory, ctypes.addressof(ctypes.create_string_buffer(8)), 8, stream)", "not_pinned"),
        ("cu.cuMemcpyHtoDAsync(memory + 999, host, 2, stream)", "out_of_bounds"),
        ("batch([memory, memory + 4], [host, host], [5, 5])", "overlap"),
        ("batch([memory], [host], [5], order=3)", "source_order"),
        ("CudaDevice(1); cu.cuMemcpyHtoDAsync(memory, host, 5, CudaDevice(1).new_stream())", "wrong_device"),
        ("event = call(cu.cuEventCreate, 6); call(cu.cuEventDestroy, event); cu.cuEventQuery(event)", "use_after_free"),
        (UNORDERED.format(ordered=False), "unordered"),
        (UNORDERED.format(ordered=True), None),
    ],
    ids=lambda each: each if each is None or len(each) < 20 else "",
)
def test_what_a_device_would_let_pass_is_noted(tmp_path: Path, done: str, noted: str | None) -> None:
    with CudaNode(tmp_path / "node", nbytes=32 << 20, seed=11) as node:
        command = [sys.executable, "-c", SET_UP + done, str(node.path)]
        ended = subprocess.run(command, env={**os.environ, **environment(node.path)}, capture_output=True, text=True)
        assert ended.returncode == 0, ended.stderr
        assert {each.kind for each in node.violations()} == ({noted} if noted else set())


NHD = PAGED["nhd"]


def test_engines_on_two_gpus_share_what_one_server_keeps(cuda_node: CudaNode, rig: CudaRig, client: KVClient) -> None:
    other_rig = make_simulated(str(cuda_node.path), device=1)
    one, other = KitEngine(rig, client, 1, NHD, seed=1), KitEngine(other_rig, client, 2, NHD, seed=2)
    request = one.stored()
    assert other.load(request, other.target()).result(PATIENCE_S).ok
    other.expect_loaded(one.model, one.source(), other.target())
    assert (one.differences(), other.differences()) == ([], [])
    one.close()
    other.close()
    other_rig.close()


def test_a_gpu_that_falls_off_the_bus_is_a_miss_and_comes_back(
    cuda_node: CudaNode, rig: CudaRig, client: KVClient
) -> None:
    engine = KitEngine(rig, client, 1, NHD)
    request = engine.stored()
    cuda_node.vanish(cuda_node.devices[0])
    try:
        assert not engine.load(request, engine.target()).result(PATIENCE_S).ok
    finally:
        cuda_node.vanish(cuda_node.devices[0], back=True)
    wait_until(lambda: engine.load(request, engine.target()).result(PATIENCE_S), what="a load after it is back")
    engine.expect_loaded(engine.snapshot(), engine.source(), engine.target())
    engine.must_be_right()
    engine.close()


BLOCKS_TWICE = """
from kvf_cuda_ipc import create_engine
from kvf_cuda_ipc import CudaOptions
from tests.cuda.device import CudaDevice
for _ in range(2):
    gpu, engine = CudaDevice(), create_engine(CudaOptions())
    engine.export(gpu.allocate(1000))
    engine.block_stream(gpu.new_stream())()
    engine.close()
    gpu.close()
"""


def test_a_stream_can_be_blocked_again_after_the_context_was_given_back(cuda_node: CudaNode) -> None:
    """A context owns its pinned memory, and an engine without torch may make another context."""
    done = subprocess.run([sys.executable, "-c", BLOCKS_TWICE], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert cuda_node.violations() == []


DMA, KERNEL = (True, False), (False, True)


@pytest.mark.parametrize(
    ("of_node", "options", "seen", "kernels", "copied_by"),
    [
        pytest.param({}, {"engine": "dma"}, "{2},{0}", False, DMA, id="GPUs that the server sees otherwise"),
        pytest.param({"mig": True}, {"engine": "dma"}, "{1}", False, DMA, id="an instance of a divided GPU"),
        pytest.param({"driver_version": 12040}, {}, "{0}", True, KERNEL, id="no batched copies"),
        pytest.param({}, {"kernel_below": "1MiB"}, "{0}", False, DMA, id="no kernel"),
        pytest.param({}, {"kernel_below": "50B"}, "{0}", True, (True, True), id="both"),
    ],
)
def test_it_works_where_there_are(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    of_node: dict[str, object],
    options: dict[str, object],
    seen: str,
    kernels: bool,
    copied_by: tuple[bool, bool],
) -> None:
    if options.get("engine") != "dma":
        pytest.importorskip("cuda.bindings.nvrtc")
    with CudaNode(tmp_path / "node", devices=3, max_delay_s=0.0005, **of_node) as node:  # type: ignore[arg-type]
        monkeypatch.delenv(KERNELS_VARIABLE, raising=False)
        for name, value in environment(node.path, kernels=kernels).items():
            monkeypatch.setenv(name, value)
        spec = RigSpec("tests.cuda.rig:make_simulated", {"node": str(node.path), **options})
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
        server = Program("server", spec, endpoint_in(tmp_path))
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", seen.format(*node.devices))
        engine = Program("engine", spec, endpoint_in(tmp_path), "1", "hybrid")
        assert engine.ask("store", 1) is True
        assert engine.ask("load", 1) is True
        assert engine.ask("check", 1) == []
        engine.close()
        server.close()
        assert node.violations() == []
        batches, launches = node.launched()
        assert (batches > 0, launches > 0) == copied_by
