"""The device as the transport uses it. No call waits for the device."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import numpy as np
import pyopencl as cl
from kvframework.api.copy_plans import CopyBatch
from kvframework.api.layout import TensorLike
from kvframework.api.transport import Arena
from kvframework.errors import DeviceError

from kvf_opencl.runtime import Runtime, translated

# In an unordered queue no single event stands for all work before it once a part of that work has failed.
Event = list[cl.Event]
COMPLETE = cl.command_execution_status.COMPLETE


class Pinned:
    """The arena as buffers over host memory that stay mapped: by these a discrete GPU copies without staging."""

    @translated
    def __init__(self, runtime: Runtime, arena: Arena) -> None:
        name, *_ = runtime.devices
        self._queue = runtime.queue(name)
        self._maps = []
        memory = np.frombuffer(arena.view, np.uint8)
        largest = min(device.max_mem_alloc_size for device in runtime.devices.values()) // 4096 * 4096
        flags = cl.mem_flags.READ_WRITE | cl.mem_flags.USE_HOST_PTR
        for at in range(0, memory.nbytes, largest):
            part = memory[at : at + largest]
            buffer = cl.Buffer(runtime.context, flags, hostbuf=part)
            found, _ = cl.enqueue_map_buffer(
                self._queue, buffer, cl.map_flags.WRITE, 0, part.shape, part.dtype, is_blocking=False
            )
            self._maps.append(found.base)
        self._queue.flush()

    @translated
    def release(self) -> None:
        """No copy is under way."""
        for found in self._maps:
            found.release(self._queue)
        self._maps.clear()
        self._queue.flush()


class Device:
    """The device of a tensor. Loads and stores have an unordered queue each. Raises `DeviceError`."""

    @translated
    def __init__(self, runtime: Runtime, tensor: TensorLike) -> None:
        self._runtime = runtime
        self.name = str(tensor.device)
        self.queues = {to_arena: runtime.queue(self.name) for to_arena in (False, True)}
        self._started: dict[bool, Event] = {False: [], True: []}

    @translated
    def mark(self, event: object | None) -> Event:
        """The event that a copy has to wait for: the engine's own, or one behind all work that is now in the calling
        thread's current queue."""
        if event is None:
            queue = self._runtime.current(self.name)
            event = cl.enqueue_marker(queue)
            queue.flush()
        if not isinstance(event, cl.Event):
            raise DeviceError(
                f"the engine's event is a {type(event).__name__}",
                where="opencl",
                available="None, or a pyopencl.Event of a queue that has been flushed",
            )
        return [event]

    @translated
    def reached(self, event: Event) -> bool:
        """Whether the work before the event is done. Raises the error of that work, once all of it has ended."""
        states = [each.command_execution_status for each in event]
        if any(state > COMPLETE for state in states):
            return False
        if (worst := min(states, default=COMPLETE)) < COMPLETE:
            raise DeviceError(f"a command ended with status {worst}", where="opencl")
        return True

    @translated
    def copy(self, host: memoryview, batch: CopyBatch, *, to_arena: bool) -> None:
        """Start one batch; offsets count from the first byte of `host`, the arena or other memory."""
        begin = ctypes.addressof(ctypes.c_char.from_buffer(host))
        addresses, offsets, length = batch.fragments()
        for address, offset in zip(addresses, offsets, strict=True):
            device, arena = svm(address, length), svm(begin + offset, length)
            target, source = (arena, device) if to_arena else (device, arena)
            started = cl.enqueue_copy(self.queues[to_arena], target, source, is_blocking=False)
            self._started[to_arena].append(started)
        self.queues[to_arena].flush()

    @translated
    def end_of_copies(self, *, to_arena: bool) -> Event:
        """An event behind the copies started in this direction since the last call."""
        started, self._started[to_arena] = self._started[to_arena], []
        return started

    @translated
    def block_stream(self, stream: object | None) -> Callable[[], None]:
        """Holds the later work of one of the engine's queues until the returned release is called."""
        queue = self._runtime.current(self.name) if stream is None else stream
        if not isinstance(queue, cl.CommandQueue):
            raise DeviceError(
                f"a {type(stream).__name__} cannot wait", where="opencl", available="None, or a pyopencl.CommandQueue"
            )
        gate = cl.UserEvent(self._runtime.context)
        cl.enqueue_barrier(queue, wait_for=[gate])
        queue.flush()
        return lambda: gate.set_status(COMPLETE)

    def close(self) -> None:
        """Gives the queues back."""
        self.queues.clear()


def svm(address: int, length: int) -> cl.SVM[Any]:
    """Memory at an address, of SVM or of the host, which copies may name alike."""
    return cl.SVM((ctypes.c_char * length).from_address(address))
