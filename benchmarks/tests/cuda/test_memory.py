"""Paged memory of a device: loaded blocks verify, and no others do."""

from __future__ import annotations

import ctypes

import pytest

from benchmarks.tests.cuda.host_device import HostDevice
from kvframework_bench.cuda.memory import DeviceMemory
from kvframework_bench.cuda.workload import SHAPES, CudaShape, fragment_shape
from kvframework_bench.errors import WrongBytes

SMALL = [
    CudaShape("plane first", 2, ("plane", "block", "token", "head", "dim"), 8, heads=2),
    CudaShape("block first", 2, ("block", "plane", "token", "head", "dim"), 8, heads=2),
    CudaShape("latent", 3, ("block", "token", "dim"), 8, block_tokens=64),
]
shapes = pytest.mark.parametrize("shape", SMALL, ids=lambda shape: shape.name)


def pieces(memory: DeviceMemory, layer: int, block: int) -> list[int]:
    """Return the addresses of a block's parts in one layer, a plane's or all of it, by the tensor's own strides."""
    tensor = memory.kv[f"layers.{layer}"]
    axes, size = memory.shape.axes, tensor.element_size()
    at = tensor.data_ptr() + block * tensor.stride()[axes.index("block")] * size
    if axes[0] != "plane":
        return [at]
    return [at + plane * tensor.stride()[0] * size for plane in range(2)]


def load(memory: DeviceMemory, chunks: int, *, from_layer: int = 0) -> None:
    """Copy as a transfer does."""
    for layer in range(memory.shape.layers):
        other = (layer + from_layer) % memory.shape.layers
        for source, target in list(zip(memory.source, memory.target, strict=True))[: memory.shape.blocks(chunks)]:
            for here, there in zip(pieces(memory, other, source), pieces(memory, layer, target), strict=True):
                ctypes.memmove(there, here, memory.shape.piece_bytes)


@shapes
def test_what_was_loaded_verifies(shape: CudaShape) -> None:
    device = HostDevice()
    with DeviceMemory(device, shape, 2) as memory:
        assert sorted(memory.source + memory.target) == list(range(2 * shape.blocks(2)))
        assert memory.source != sorted(memory.source)
        for chunks in (1, 2):
            memory.poison(chunks)
            with pytest.raises(WrongBytes):
                memory.verify(chunks)
            load(memory, chunks)
            memory.verify(chunks)
    assert device.allocated == 0


@shapes
@pytest.mark.parametrize("index", [0, -1])
@pytest.mark.parametrize("layer", [0, 1])
def test_a_single_wrong_bit_is_found(shape: CudaShape, layer: int, index: int) -> None:
    with DeviceMemory(HostDevice(), shape, 1) as memory:
        load(memory, 1)
        last = pieces(memory, layer, memory.target[index])[-1] + shape.piece_bytes - 1
        ctypes.c_ubyte.from_address(last).value ^= 1
        with pytest.raises(WrongBytes, match=rf"a retrieved block of layers\.{layer} ") as found:
            memory.verify(1)
        assert f"block {index % shape.blocks(1)} of {shape.blocks(1)}," in found.value.where


@shapes
def test_layers_in_another_order_are_found(shape: CudaShape) -> None:
    with DeviceMemory(HostDevice(), shape, 1) as memory:
        load(memory, 1, from_layer=1)
        with pytest.raises(WrongBytes):
            memory.verify(1)


def test_a_source_that_was_written_to_is_found() -> None:
    """A store that writes into the engine's memory, and loads what it wrote."""
    with DeviceMemory(HostDevice(), SMALL[0], 1) as memory:
        (at, _) = pieces(memory, 0, memory.source[3])
        ctypes.memset(at, 7, 16)
        load(memory, 1)
        with pytest.raises(WrongBytes):
            memory.verify(1)


def test_no_two_blocks_are_alike() -> None:
    """Also where a layer is longer than the pattern."""
    shape, chunks = fragment_shape(1 << 17, 1 << 23)
    assert shape.tensor_bytes(2 * shape.blocks(chunks)) > 1 << 21
    with DeviceMemory(HostDevice(), shape, chunks) as memory:
        seen = {
            ctypes.string_at(pieces(memory, layer, block)[0], shape.piece_bytes)
            for layer in range(shape.layers)
            for block in memory.source + memory.target
        }
    assert len(seen) == shape.layers * 2 * shape.blocks(chunks)


def test_memory_that_cannot_be_had_is_given_back() -> None:
    class Full(HostDevice):
        def synchronize(self, stream: object = None) -> None:
            raise MemoryError

    device = Full()
    with pytest.raises(MemoryError):
        DeviceMemory(device, SHAPES["deepseek-v3"], 1)
    assert device.allocated == 0
