"""The simulated CUDA driver notes what a device would let pass, so that a test that finds no note proves something.

What it does with right calls and with faults, the kit and `test_guesses.py` show.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cuda.building import environment
from tests.cuda.node import CudaNode

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
