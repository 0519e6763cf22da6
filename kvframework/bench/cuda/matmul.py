"""Owns the loop of matrix products that an engine's work is played by, timed by the GPU's own clock.

Imports torch when a loop is made. For the thread that opened the device.
"""

from __future__ import annotations

from typing import Any, Protocol

from kvframework.bench.attempt import require_torch
from kvframework.bench.errors import BenchUnavailable


class Loop(Protocol):
    """Work of the GPU that begins with `start` and ends by itself. One run at a time."""

    def start(self) -> None:
        """Never waits."""

    def ended(self) -> bool:
        """Never waits."""

    def seconds(self) -> float:
        """Of the run, by the GPU's clock. Waits until it has ended."""


class MatmulLoop:
    """Products of bfloat16 matrices of `size` x `size`, as many as take about `seconds` on a quiet GPU."""

    def __init__(self, size: int, seconds: float) -> None:
        """Raises `BenchUnavailable` where torch is not installed, or cannot use the GPU."""
        require_torch()
        import torch

        if not torch.cuda.is_available():
            raise BenchUnavailable(
                f"torch {torch.__version__} cannot use the GPU", hint="install a torch that was built for CUDA"
            )
        self._torch = torch
        cuda: Any = torch.cuda
        self._stream = cuda.Stream()
        self._begun, self._done = (cuda.Event(enable_timing=True) for _ in range(2))
        self._left, self._right, self._product = (
            torch.randn(size, size, device="cuda", dtype=torch.bfloat16) for _ in range(3)
        )
        torch.cuda.synchronize()
        self._size = size
        self.products = 1
        for _ in range(3):
            self.start()
            one = self.seconds()
        self.products = max(round(seconds / max(one, 1e-6)), 1)

    @property
    def operations(self) -> int:
        """Of one run."""
        return 2 * self._size**3 * self.products

    def start(self) -> None:
        # Not on the current stream: a transfer without an event of the engine's waits for what that holds.
        with self._torch.cuda.stream(self._stream):
            self._begun.record()
            for _ in range(self.products):
                self._torch.mm(self._left, self._right, out=self._product)
            self._done.record()

    def ended(self) -> bool:
        return bool(self._done.query())

    def seconds(self) -> float:
        self._done.synchronize()
        return float(self._begun.elapsed_time(self._done)) / 1e3
