"""The driver's half in the copier process of one GPU: it imports the memory and events of engines, and copies.

The process sees this GPU alone. One thread makes all calls but `pin`, and the context is current for it.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import NamedTuple

from kvf_cuda_ipc import INSTALL, CudaOptions
from kvf_cuda_ipc.batched import BatchedCopies
from kvf_cuda_ipc.driver import MEMORY_HANDLE_BYTES, Driver, Event, RawStream, name_of, same
from kvf_cuda_ipc.gathering import GatherKernel
from kvf_devices import Allocation, Arena, CopierDriver
from kvframework.api.copy_plans import CopyBatch
from kvframework.errors import DeviceError, DeviceLost

_NO_KERNEL = "the copy engines copy small fragments, slowly, because the kernel cannot"


class Stream(NamedTuple):
    raw: RawStream
    loads: bool


class CudaCopier(CopierDriver[Event, Stream]):
    """The copier's half. Raises `DeviceError` if the GPU is not `device`, or has no way to copy."""

    def __init__(self, driver: Driver, options: CudaOptions, device: str, arena: Arena) -> None:
        self._driver = driver
        self._device = device
        self._arena = arena
        self._lock = threading.Lock()
        self._lacks: dict[str, str] = {}
        self._slices: list[int] = []
        self._proven = b""
        self._kernel_below = int(options.kernel_below)
        ordinal = _ordinal(driver, device)
        self._context = driver.retain_context(ordinal)
        driver.set_current(self._context)
        self._batched = None if options.engine == "kernel" else self._copy_engines(driver)
        self._kernel = None if options.engine == "dma" else self._gather_kernel(driver, options, ordinal)
        if self._batched is None and self._kernel is None:
            raise DeviceError(
                f"neither copy engines nor a kernel can copy: {'; '.join(self._lacks.values())}",
                where="cuda_ipc",
                hint=f"install a driver of CUDA 12.8 or later, or NVRTC: {INSTALL}",
            )

    def lacks(self) -> Sequence[str]:
        return tuple(self._lacks.values())

    def pin(self, offset: int, nbytes: int) -> None:
        start = self._arena.address + offset
        with self._driver.current(self._context):
            mapped = self._driver.register_host(start, nbytes)
        with self._lock:
            if mapped != start and self._kernel is not None:
                # Copy engines take the host's own addresses.
                self._leave_out_kernel(f"this GPU maps the arena at another address ({mapped or 'unknown'})")
            self._slices = sorted([*self._slices, start])

    def open(self, allocation: Allocation) -> int:
        if not same(allocation.device, self._device):
            raise DeviceError(f"the memory is of {allocation.device}, the copier of {self._device}", where="cuda_ipc")
        # Behind the memory's handle that of an event, see `CudaEngine`; an engine of a former release sends none.
        self._prove(allocation.handle[MEMORY_HANDLE_BYTES:])
        address = self._driver.open_memory(allocation.handle[:MEMORY_HANDLE_BYTES])
        try:
            base, nbytes = self._driver.allocation_of(address)
        except DeviceLost:
            raise
        except DeviceError as error:
            # The engine's own driver gave it the size, and every view was checked against that.
            self._lacks.setdefault("size", f"the size of opened memory is not verified: {error.fact}")
            return address
        if address + allocation.nbytes > base + nbytes:
            self._driver.close_memory(address)
            raise DeviceError(
                f"the opened allocation has {nbytes} bytes, expected {allocation.nbytes}", where="cuda_ipc"
            )
        return address

    def _prove(self, event: bytes) -> None:
        if event and event != self._proven:
            self._driver.destroy_event(self._driver.open_event(event))
            self._proven = event

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
        try:
            least, greatest = self._driver.stream_priorities()
            return Stream(self._driver.create_stream(greatest if loads else least), loads)
        except DeviceLost:
            raise
        except DeviceError as error:
            self._lacks.setdefault("priority", f"loads get no priority over stores: {error.fact}")
            return Stream(self._driver.create_stream(0), loads)

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

    def _copy_engines(self, driver: Driver) -> BatchedCopies | None:
        try:
            return BatchedCopies.of(driver)
        except DeviceLost:
            raise
        except DeviceError as error:
            self._lacks["dma"] = f"the copy engines cannot copy: {error.fact}"
            return None

    def _gather_kernel(self, driver: Driver, options: CudaOptions, ordinal: int) -> GatherKernel | None:
        try:
            return GatherKernel.built(driver, options.kernel_blocks, ordinal)
        except DeviceLost:
            raise
        except DeviceError as error:
            if options.engine == "kernel":
                raise
            self._lacks["kernel"] = f"{_NO_KERNEL}: {error.fact}"
            return None

    def _leave_out_kernel(self, reason: str) -> None:
        if self._batched is None:
            raise DeviceError(f"{reason}, and no copy engine is in use", where="cuda_ipc", hint='set engine = "dma"')
        self._kernel = None
        self._lacks["kernel"] = f"{_NO_KERNEL}: {reason}"


def _ordinal(driver: Driver, device: str) -> int:
    seen = [name_of(driver.uuid(each), driver.model(each)) for each in driver.devices()]
    found = [ordinal for ordinal, name in enumerate(seen) if same(name, device)]
    if len(found) != 1:
        raise DeviceError(
            f"{device} is not visible to the server",
            where="cuda_ipc",
            available=", ".join(seen) or "no GPU",
            hint="give the server's container the GPUs of the engines",
        )
    return found[0]
