"""The rig of host memory, of torch or of no library, for engine-driven transports: `cpu_gather`, and its like.

Its events hold a copy in any process: a copy waits for its event as long as a file in `directory` says so.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from kvf_dev.testing.transport.rig import TransportRig, nbytes_of
from kvframework.api.layout import MemoryTensor, TensorLike
from kvframework.api.plugin import dtype_bytes

LATER_S = 0.2
_POLL_S = 0.005


class HostRig(TransportRig):
    """Host memory at an address, and a transport that copies it in the engine's thread. No torch."""

    synchronous = True

    def __init__(self, transport: str, directory: str, options: Mapping[str, object] | None = None) -> None:
        self.transport = transport
        self.engine_options = self.server_options = options or {}
        self._hold = Path(directory) / "hold"
        self._held = Path(directory) / "held"
        self._queued: list[threading.Thread] = []

    def empty(self, shape: Sequence[int], dtype: str) -> TensorLike:
        tensor = MemoryTensor(0, shape, dtype)
        memory = ctypes.create_string_buffer(tensor.nbytes + dtype_bytes("float64"))
        # As allocators do, whole elements begin at multiples of their size.
        return MemoryTensor(ctypes.addressof(memory) + 7 & ~7, shape, dtype, owner=memory)

    def write(self, tensor: TensorLike, data: bytes) -> None:
        self._finish_queued()
        _write(tensor, data)

    def read(self, tensor: TensorLike) -> bytes:
        self._finish_queued()
        return ctypes.string_at(tensor.data_ptr(), nbytes_of(tensor))

    def write_later(self, tensor: TensorLike, data: bytes) -> object:
        thread = threading.Timer(LATER_S, _write, (tensor, data))
        thread.start()
        self._queued.append(thread)
        return _Event(self, list(self._queued))

    def event(self) -> object:
        return _Event(self, [])

    @contextmanager
    def holding_copies(self) -> Iterator[None]:
        self._held.unlink(missing_ok=True)
        self._hold.touch()
        try:
            yield
        finally:
            self._hold.unlink()

    def held(self) -> bool:
        return self._held.exists()

    def wait_while_held(self) -> None:
        """Wait in the process that is about to copy."""
        if self._hold.exists():
            self._held.touch()
            while self._hold.exists():
                time.sleep(_POLL_S)

    def close(self) -> None:
        self._finish_queued()

    def _finish_queued(self) -> None:
        for thread in self._queued:
            thread.join()
        self._queued.clear()


class TorchRig(HostRig):
    """CPU tensors of torch."""

    def empty(self, shape: Sequence[int], dtype: str) -> TensorLike:
        import torch

        return torch.zeros(*shape, dtype=getattr(torch, dtype))


class _Event:
    """The part of `torch.Event` that transports of host memory use."""

    def __init__(self, rig: HostRig, behind: Sequence[threading.Thread]) -> None:
        self._rig = rig
        self._behind = behind

    def synchronize(self) -> None:
        for thread in self._behind:
            thread.join()
        self._rig.wait_while_held()


def _write(tensor: TensorLike, data: bytes) -> None:
    ctypes.memmove(tensor.data_ptr(), data, len(data))
