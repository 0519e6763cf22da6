"""Owns the reference of `bench cuda`: one plain asynchronous copy between pinned memory and the GPU, each way, and both
ways at once.

For the thread that opened the device; every call blocks until the bytes are moved.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from kvframework.bench.cuda.device import Device
from kvframework.bench.interleave import timed


class PlainCopies:
    """Each direction has a stream and memory of its own, in one piece. The calls give seconds."""

    def __init__(self, device: Device, places: tuple[int, int, int, int]) -> None:
        self._device = device
        self._from, self._to, self._host_to, self._host_from = places
        self._down, self._up = device.stream(), device.stream()

    def store(self, nbytes: int) -> float:
        """From the GPU to the host."""

        def run() -> None:
            self._start_down(nbytes)
            self._device.synchronize(self._down)

        return timed(run)

    def retrieve(self, nbytes: int) -> float:
        """From the host to the GPU."""

        def run() -> None:
            self._start_up(nbytes)
            self._device.synchronize(self._up)

        return timed(run)

    def both(self, nbytes: int) -> float:
        """So many bytes each way."""

        def run() -> None:
            self._start_up(nbytes)
            self._start_down(nbytes)
            self._device.synchronize(self._up)
            self._device.synchronize(self._down)

        return timed(run)

    def _start_down(self, nbytes: int) -> None:
        self._device.to_host(self._host_to, self._from, nbytes, self._down)

    def _start_up(self, nbytes: int) -> None:
        self._device.to_device(self._to, self._host_from, nbytes, self._up)


@contextmanager
def plain_copies(device: Device, largest: int) -> Iterator[PlainCopies]:
    """Copies of at most `largest` bytes. Raises `BenchFailed` if there is not so much memory."""
    with (
        device.memory(largest) as source,
        device.memory(largest) as target,
        device.pinned(largest) as down,
        device.pinned(largest) as up,
    ):
        yield PlainCopies(device, (source, target, down.address, up.address))
