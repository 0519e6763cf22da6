"""The conformance kit's access to the device: it acts as an engine, in any process."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pyopencl as cl
from kvf_dev.testing.transport import TransportRig
from kvf_dev.testing.transport.rig import nbytes_of
from kvframework.api.layout import MemoryTensor, TensorLike
from kvframework.errors import DeviceError

from kvf_opencl.device import COMPLETE, Device, svm
from kvf_opencl.runtime import runtime

LATER_S = 0.2


class OpenclRig(TransportRig):
    """Files in `directory` make the next copy of any process stand still, or fail."""

    transport = "opencl"

    def __init__(self, directory: str) -> None:
        self._runtime = runtime("")
        self._device = list(self._runtime.devices)[-1]
        self._late = self._runtime.queue(self._device)
        self._gates: list[Callable[[], None]] | None = None
        self._kept: list[np.ndarray[Any, Any]] = []  # what queued copies read or write
        self._hold, self._held, self._fail = (Path(directory) / name for name in ("hold", "held", "fail"))
        self._see_copies()

    def empty(self, shape: Sequence[int], dtype: str) -> MemoryTensor:
        return self._runtime.empty(shape, dtype, self._device)

    def write(self, tensor: TensorLike, data: bytes) -> None:
        self._late.finish()
        self._queue(self._late, tensor, np.array(bytearray(data)), to_device=True).wait()

    def read(self, tensor: TensorLike) -> bytes:
        self._late.finish()
        found = np.empty(nbytes_of(tensor), np.uint8)
        self._queue(self._late, tensor, found, to_device=False).wait()
        return found.tobytes()

    def write_later(self, tensor: TensorLike, data: bytes) -> cl.Event:
        release = self._hold_queue(self._late)
        if self._gates is None:
            threading.Timer(LATER_S, release).start()
        else:
            self._gates.append(release)
        self._queue(self._late, tensor, np.array(bytearray(data)), to_device=True)
        event = cl.enqueue_marker(self._late)
        self._late.flush()
        return event

    @contextmanager
    def holding_writes(self) -> Iterator[None]:
        self._gates = []
        try:
            yield
        finally:
            for release in self._gates:
                release()
            self._gates = None

    def stream(self) -> cl.CommandQueue:
        return self._runtime.queue(self._device)

    def read_later(self, tensor: TensorLike, stream: object | None) -> Callable[[], bytes | None]:
        queue = stream if isinstance(stream, cl.CommandQueue) else self._runtime.current(self._device)
        found = np.empty(nbytes_of(tensor), np.uint8)
        event = self._queue(queue, tensor, found, to_device=False)
        return lambda: found.tobytes() if event.command_execution_status == COMPLETE else None

    @contextmanager
    def holding_copies(self) -> Iterator[None]:
        self._hold.touch()
        try:
            yield
        finally:
            self._hold.unlink(missing_ok=True)
            self._held.unlink(missing_ok=True)

    def held(self) -> bool:
        return self._held.exists()

    def fail_copy(self) -> None:
        self._fail.touch()

    def close(self) -> None:
        self._late.finish()
        Device.copy = self._right  # type: ignore[method-assign]

    def _queue(
        self, queue: cl.CommandQueue, tensor: TensorLike, host: np.ndarray[Any, Any], *, to_device: bool
    ) -> cl.Event:
        ends = svm(tensor.data_ptr(), host.nbytes), cl.SVM(host)
        event = cl.enqueue_copy(queue, *(ends if to_device else ends[::-1]), is_blocking=False)
        self._kept.append(host)
        queue.flush()
        return event

    def _hold_queue(self, queue: cl.CommandQueue) -> Callable[[], None]:
        """Later work of the queue waits until the release is called."""
        gate = cl.UserEvent(self._runtime.context)
        cl.enqueue_barrier(queue, wait_for=[gate])
        return lambda: gate.set_status(COMPLETE)

    def _see_copies(self) -> None:
        self._right = right = Device.copy

        def copy(device: Device, host: memoryview, batch: Any, *, to_arena: bool) -> None:
            with contextlib.suppress(FileNotFoundError):
                self._hold.rename(self._held)
                release = self._hold_queue(device.queues[to_arena])
                threading.Thread(target=self._stand_still, args=[release], daemon=True).start()
            right(device, host, batch, to_arena=to_arena)
            with contextlib.suppress(FileNotFoundError):
                self._fail.unlink()
                raise DeviceError("a fault of the rig")

        Device.copy = copy  # type: ignore[method-assign, assignment]

    def _stand_still(self, release: Callable[[], None]) -> None:
        while self._held.exists():
            time.sleep(0.002)
        release()
