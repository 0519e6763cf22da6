"""The engine's memory in the layout kit: tensors cut from slabs, none at the beginning, with foreign bytes between."""

from __future__ import annotations

import math
import weakref

import torch

_SLAB_BYTES = 1 << 20
_GAP_BYTES = 192
_FOREIGN = 0x5A


class _Buffer(bytearray):
    """Memory that can be watched."""


class Slab:
    """Call it with a shape for a contiguous tensor, as an engine calls its allocator."""

    def __init__(self) -> None:
        self._slabs: list[torch.Tensor] = []
        # Alive as long as a tensor, or a view of one, is.
        self.buffers: list[weakref.ref[bytearray]] = []
        self._used = 0
        self._own: list[tuple[int, int, int]] = []

    def __call__(self, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        nbytes = math.prod(shape) * dtype.itemsize
        if not self._slabs or self._used + nbytes + 2 * _GAP_BYTES > self._slabs[-1].numel():
            buffer = _Buffer(bytes([_FOREIGN]) * max(_SLAB_BYTES, nbytes + 3 * _GAP_BYTES))
            self._slabs.append(torch.frombuffer(buffer, dtype=torch.uint8))
            self.buffers.append(weakref.ref(buffer))
            self._used = 0
        start = self._used + _GAP_BYTES
        self._used = -(-(start + nbytes) // 64) * 64
        self._own.append((len(self._slabs) - 1, start, nbytes))
        return self._slabs[-1][start : start + nbytes].view(dtype).view(shape)

    def foreign_bytes_changed(self) -> int:
        """Return how many bytes beside the tensors were written."""
        rest = [slab.clone() for slab in self._slabs]
        for slab, start, nbytes in self._own:
            rest[slab][start : start + nbytes] = _FOREIGN
        return sum(int((each != _FOREIGN).sum()) for each in rest)
