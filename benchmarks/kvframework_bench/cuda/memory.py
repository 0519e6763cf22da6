"""An engine's paged KV memory on a GPU: blocks to store, blocks to load into, and their comparison.

For the thread that opened the device; every call blocks until the device is done.
"""

from __future__ import annotations

import random
from contextlib import ExitStack
from types import TracebackType
from typing import TYPE_CHECKING, cast

from kvf_dev.testing.accelerator.runtime import DeviceTensor, contiguous
from kvframework_bench.cuda.device import Device, PinnedMemory
from kvframework_bench.cuda.workload import CudaShape
from kvframework_bench.errors import WrongBytes

if TYPE_CHECKING:
    import torch

    from kvf_dev.testing.accelerator.runtime import Accelerator

_POISON = 0xA5
# A prime, so that no two blocks of a memory have the same content.
_PERIOD = (1 << 22) - 3
_NEXT_LAYER = 1_000_003


class DeviceMemory:
    """One allocation a layer with `source` and `target` blocks of one request each, which are scattered, as after a
    while in an engine. Every byte has known content. `kv` stands for tensors in layouts."""

    def __init__(self, device: Device, shape: CudaShape, chunks: int, *, seed: int = 1) -> None:
        """Raises `BenchFailed` if there is not so much memory."""
        blocks = shape.blocks(chunks)
        ids = list(range(2 * blocks))
        random.Random(seed).shuffle(ids)
        self.source, self.target = ids[:blocks], ids[blocks:]
        self.shape = shape
        self._device = device
        self._stream = device.stream()
        self._blocks = len(ids)
        self._nbytes = shape.tensor_bytes(self._blocks)
        self._pattern = random.Random(seed).randbytes(_PERIOD) * 2
        self._stack = ExitStack()
        with ExitStack() as stack:
            self._layers = [stack.enter_context(device.memory(self._nbytes)) for _ in range(shape.layers)]
            with device.pinned(len(self._pattern)) as pinned:
                self._write(pinned)
            self._stack = stack.pop_all()
        dims = shape.dims(self._blocks)
        # Only layouts use them, for addresses and strides.
        runtime = cast("Accelerator", None)
        tensors = {
            f"layers.{index}": DeviceTensor(runtime, address, dims, contiguous(dims), shape.dtype)
            for index, address in enumerate(self._layers)
        }
        self.kv = cast("dict[str, torch.Tensor]", tensors)

    def __enter__(self) -> DeviceMemory:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def poison(self, chunks: int) -> None:
        """Fill the first `chunks` of the target with one repeated byte, so that missing loads are seen."""
        piece = self.shape.piece_bytes
        for address in self._layers:
            for start in range(0, self._nbytes, self._blocks * piece):
                for block in self.target[: self.shape.blocks(chunks)]:
                    self._device.fill(address + start + block * piece, _POISON, piece)
        self._device.synchronize()

    def verify(self, chunks: int) -> None:
        """Raise `WrongBytes`, naming the first place, unless the first `chunks` of the target equal the source's
        original content, byte for byte."""
        piece, blocks = self.shape.piece_bytes, self.shape.blocks(chunks)
        with self._device.pinned(self._nbytes) as pinned:
            for layer, address in enumerate(self._layers):
                self._device.to_host(pinned.address, address, self._nbytes, self._stream)
                self._device.synchronize(self._stream)
                for start in range(0, self._nbytes, self._blocks * piece):
                    for index in range(blocks):
                        at = start + self.target[index] * piece
                        expected = self._expected(layer, start + self.source[index] * piece, piece)
                        if bytes(pinned.view[at : at + piece]) != expected:
                            raise WrongBytes(
                                f"a retrieved block of layers.{layer} differs from the stored block",
                                where=f"{self.shape.name}, block {index} of {blocks}, byte {start} of the planes",
                                hint="this is a bug of the transport; no figures are reported",
                            )

    def _write(self, pinned: PinnedMemory) -> None:
        pinned.view[:] = self._pattern
        for layer, address in enumerate(self._layers):
            first = layer * _NEXT_LAYER % _PERIOD
            for at in range(0, self._nbytes, _PERIOD):
                nbytes = min(_PERIOD, self._nbytes - at)
                self._device.to_device(address + at, pinned.address + first, nbytes, self._stream)
        self._device.synchronize(self._stream)

    def _expected(self, layer: int, at: int, nbytes: int) -> bytes:
        first = (layer * _NEXT_LAYER + at) % _PERIOD
        return self._pattern[first : first + nbytes]
