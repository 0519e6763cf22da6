"""The driver's half in the copier process of one GPU: it imports the memory and events of engines, and copies.

The process sees this GPU alone. One thread makes all calls but `pin`, and the context is current for it.
"""

from __future__ import annotations

import logging
import threading
from typing import NamedTuple

from kvf_cuda_ipc.batched import BatchedCopies
from kvf_cuda_ipc.driver import Driver, Event, RawStream
from kvf_cuda_ipc.gathering import GatherKernel
from kvf_cuda_ipc.identity import name_of
from kvf_cuda_ipc.options import CudaOptions
from kvframework.api.driver import Allocation, Arena, CopierDriver, CopyBatch
from kvframework.api.installing import install_command
from kvframework.errors import DeviceError, DeviceLost

log = logging.getLogger(__name__)


class Stream(NamedTuple):
    raw: RawStream
    loads: bool


class CudaCopier(CopierDriver[Event, Stream]):
    """The copier's half. Raises `DeviceError` if the GPU is not `device`, or has no way to copy."""

    def __init__(self, driver: Driver, options: CudaOptions, device: str, arena: Arena) -> None:
        self._driver = driver
        self._device = device
        self._arena = arena
        seen = [name_of(driver.uuid(each), driver.model(each)) for each in driver.devices()]
        if seen != [device]:
            raise DeviceError(
                f"{device} is not here",
                where="cuda_ipc",
                available=", ".join(seen) or "no GPU",
                hint="give the server's container the GPUs of the engines",
            )
        if not driver.shares_events(0):
            raise DeviceError(f"{driver.model(0)} cannot share memory and events", where="cuda_ipc")
        self._context = driver.retain_context(0)
        driver.set_current(self._context)
        self._batched = None if options.engine == "kernel" else BatchedCopies.of(driver)
        self._kernel = None if options.engine == "dma" else _kernel(driver, options)
        if self._batched is None and self._kernel is None:
            raise DeviceError(
                "nothing can copy here: the driver has no batched copies, and there is no kernel",
                where="cuda_ipc",
                hint=f"install a driver of CUDA 12.8 or later, or NVRTC: {install_command('cuda')}, or [cuda12]",
            )
        self._kernel_below = int(options.kernel_below)
        self._slices: list[int] = []
        self._lock = threading.Lock()

    def pin(self, offset: int, nbytes: int) -> None:
        with self._driver.current(self._context):
            mapped = self._driver.register_host(self._arena.address + offset, nbytes)
        if mapped != self._arena.address + offset and self._kernel is not None:
            raise DeviceError(
                "the arena has another address on this GPU, which the kernel does not know of",
                where="cuda_ipc",
                hint='set engine = "dma"',
            )
        with self._lock:
            self._slices = sorted([*self._slices, self._arena.address + offset])

    def open(self, allocation: Allocation) -> int:
        if allocation.device != self._device:
            raise DeviceError(f"memory of {allocation.device} on {self._device}", where="cuda_ipc")
        address = self._driver.open_memory(allocation.handle)
        base, nbytes = self._driver.allocation_of(address)
        if address + allocation.nbytes > base + nbytes:
            self._driver.close_memory(address)
            raise DeviceError(
                f"an allocation of {nbytes} bytes was opened, not of {allocation.nbytes}", where="cuda_ipc"
            )
        return address

    def close_memory(self, address: int) -> None:
        self._driver.close_memory(address)

    def open_event(self, handle: bytes) -> Event:
        return self._driver.open_event(handle)

    def create_event(self) -> Event:
        return self._driver.create_event(interprocess=False)

    def destroy_event(self, event: Event) -> None:
        self._driver.destroy_event(event)

    def create_stream(self, *, loads: bool) -> Stream:
        """Make a stream. Loads have the greatest priority, since a request waits for each; stores have the least."""
        least, greatest = self._driver.stream_priorities()
        return Stream(self._driver.create_stream(greatest if loads else least), loads)

    def wait(self, stream: Stream, event: Event) -> None:
        self._driver.wait_event(stream.raw, event)

    def copy(self, stream: Stream, batch: CopyBatch, *, to_arena: bool) -> None:
        kernel, batched = self._kernel, self._batched
        if kernel is not None and (batched is None or batch.run < self._kernel_below):
            kernel.copy(stream.raw, batch, self._arena.address, to_arena=to_arena)
        elif batched is not None:
            batched.copy(stream.raw, batch, self._arena.address, self._slices, to_arena=to_arena)

    def record(self, event: Event, behind: Stream) -> None:
        self._driver.record(event, behind.raw)

    def reached(self, event: Event) -> bool:
        return self._driver.reached(event)


def _kernel(driver: Driver, options: CudaOptions) -> GatherKernel | None:
    try:
        return GatherKernel.built(driver, options.kernel_blocks)
    except DeviceLost:
        raise
    except DeviceError as error:
        if options.engine == "kernel":
            raise
        log.warning("no kernel copies small fragments here, the copy engines do, slowly: %s", error)
        return None
