"""The conformance kit's access to the device: it acts as an engine, in any process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pyopencl as cl
from kvf_dev.testing.transport import DeviceRig
from kvframework.api.layout import MemoryTensor

from kvf_opencl.device import COMPLETE, Device, svm
from kvf_opencl.runtime import runtime, translated


class OpenclRig(DeviceRig):
    copies = "kvf_opencl.device:Device.copy"

    def __init__(self, directory: str) -> None:
        super().__init__("opencl", directory)
        self._runtime = runtime("")
        self._device = list(self._runtime.devices)[-1]

    def empty(self, shape: Sequence[int], dtype: str) -> MemoryTensor:
        return self._runtime.empty(shape, dtype, self._device)

    @translated
    def queue(self, address: int, host: memoryview, stream: object | None, *, to_device: bool) -> cl.Event:
        queue = self._queue(stream)
        ends = svm(address, host.nbytes), svm(np.frombuffer(host, np.uint8).ctypes.data, host.nbytes)
        cl.enqueue_copy(queue, *(ends if to_device else ends[::-1]), is_blocking=False)
        event = cl.enqueue_marker(queue)  # behind all before it: the queue has no order
        queue.flush()
        return event

    def reached(self, event: object) -> bool:
        assert isinstance(event, cl.Event)
        return bool(event.command_execution_status == COMPLETE)

    def hold(self, stream: object | None) -> Callable[[], None]:
        gate = cl.UserEvent(self._runtime.context)
        cl.enqueue_barrier(self._queue(stream), wait_for=[gate])
        return lambda: gate.set_status(COMPLETE)

    def new_stream(self) -> cl.CommandQueue:
        return self._runtime.queue(self._device)

    def stream_of(self, device: Device, *_batch: Any, to_arena: bool) -> cl.CommandQueue:
        return device.queues[to_arena]

    def _queue(self, stream: object | None) -> cl.CommandQueue:
        return stream if isinstance(stream, cl.CommandQueue) else self._runtime.current(self._device)
