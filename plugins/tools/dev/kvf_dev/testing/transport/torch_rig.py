"""The rig of host memory held by torch, for engine-driven transports: `cpu_gather`, and its like.

Its events hold a copy in any process: a copy waits for its event as long as a file in `directory` says so.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch

from kvf_dev.testing.transport.rig import TransportRig

LATER_S = 0.2
_POLL_S = 0.005


class TorchRig(TransportRig):
    """CPU tensors, and a transport that copies them in the engine's thread."""

    synchronous = True

    def __init__(self, transport: str, directory: str) -> None:
        self.transport = transport
        self._hold = Path(directory) / "hold"
        self._held = Path(directory) / "held"
        self._queued: list[threading.Thread] = []

    def empty(self, shape: Sequence[int], dtype: str) -> torch.Tensor:
        return torch.zeros(*shape, dtype=getattr(torch, dtype))

    def write(self, tensor: torch.Tensor, data: bytes) -> None:
        self._finish_queued()
        _write(tensor, data)

    def read(self, tensor: torch.Tensor) -> bytes:
        self._finish_queued()
        return bytes(tensor.reshape(-1).view(torch.uint8).tolist())

    def write_later(self, tensor: torch.Tensor, data: bytes) -> object:
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


class _Event:
    """The part of `torch.Event` that transports of host memory use."""

    def __init__(self, rig: TorchRig, behind: Sequence[threading.Thread]) -> None:
        self._rig = rig
        self._behind = behind

    def synchronize(self) -> None:
        for thread in self._behind:
            thread.join()
        self._rig.wait_while_held()


def _write(tensor: torch.Tensor, data: bytes) -> None:
    tensor.reshape(-1).view(torch.uint8).copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
