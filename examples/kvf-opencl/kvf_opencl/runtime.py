"""This process's OpenCL, which engine and transport share, and the meaning of its errors."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import cache, wraps
from typing import ParamSpec, TypeVar

import pyopencl as cl
from kvframework.api.layout import MemoryTensor
from kvframework.errors import DeviceError, DeviceLost

P = ParamSpec("P")
R = TypeVar("R")


def translated(call: Callable[P, R]) -> Callable[P, R]:
    """Translates the runtime's errors to the framework's: one of the context, or of one operation."""

    @wraps(call)
    def translating(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return call(*args, **kwargs)
        except cl.Error as error:
            lost = error.code == cl.status_code.DEVICE_NOT_AVAILABLE
            raise (DeviceLost if lost else DeviceError)(str(error), where="opencl") from error

    return translating


def platforms() -> list[cl.Platform]:
    """The platforms with a device that has SVM. Raises `cl.Error` where no driver is installed."""
    return [each for each in cl.get_platforms() if any(device.svm_capabilities for device in each.get_devices())]


class Runtime:
    """The devices of a platform in one context. SVM belongs to its context: the engine's KV must come from here."""

    def __init__(self, platform: str) -> None:
        found = [each for each in platforms() if platform in each.name]
        if not found:
            available = ", ".join(each.name for each in platforms())
            raise DeviceError(f"no OpenCL platform {platform!r} has SVM", where="opencl", available=available)
        self.context = cl.Context(found[0].get_devices())
        self.devices = {f"opencl:{index}": device for index, device in enumerate(self.context.devices)}
        self._current = threading.local()

    def empty(self, shape: Sequence[int], dtype: str, device: str = "opencl:0") -> MemoryTensor:
        """SVM of this shape, freed with the last tensor that refers to it."""
        nbytes = MemoryTensor(0, shape, dtype).nbytes
        memory = cl.SVMAllocation(self.context, nbytes, 64, cl.svm_mem_flags.READ_WRITE)
        return MemoryTensor(memory.svm_ptr, shape, dtype, device=device, owner=memory)

    def queue(self, device: str) -> cl.CommandQueue:
        """An unordered queue."""
        unordered = cl.command_queue_properties.OUT_OF_ORDER_EXEC_MODE_ENABLE
        return cl.CommandQueue(self.context, self.devices[device], unordered)

    def current(self, device: str) -> cl.CommandQueue:
        """The calling thread's current queue, which OpenCL itself does not know: that of `event=None`."""
        queues = self._current.__dict__
        if device not in queues:
            queues[device] = self.queue(device)
        found: cl.CommandQueue = queues[device]
        return found


@cache
@translated
def runtime(platform: str) -> Runtime:
    """This process's runtime of a platform."""
    return Runtime(platform)
