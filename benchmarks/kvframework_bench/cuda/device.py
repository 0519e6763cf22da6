"""The GPU as a benchmark uses it: memory, pinned memory, streams and plain copies, by the CUDA driver API alone.

`PlainCopies` is the reference: one plain asynchronous copy between pinned memory and the GPU, each way and both
ways at once. In the benchmark's process, for the thread that opened the device. `cuda.bindings` is imported
when a GPU is opened.
"""

from __future__ import annotations

import ctypes
import importlib
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from importlib import metadata
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

from kvframework.api.installing import install_command
from kvframework.text import one_line
from kvframework_bench.cuda.figures import Gpu
from kvframework_bench.errors import BenchFailed, BenchUnavailable
from kvframework_bench.rounds import timed

_BINDINGS = "cuda-bindings"
_KERNEL_MODULE = Path("/sys/module/nvidia/version")
_PCI_DEVICES = Path("/sys/bus/pci/devices")


class PinnedMemory(NamedTuple):
    """Page-locked host memory: `view` shows it, as long as the device is open."""

    address: int
    view: memoryview


class Device:
    """The first GPU that this process sees. As a context manager it frees everything allocated from it."""

    def __init__(self) -> None:
        """Raises `BenchUnavailable` where there is no GPU, no driver, or no bindings of it."""
        self._cu = _bindings()
        self._made = ExitStack()
        try:
            self._call("cuInit", 0)
            if not int(self._call("cuDeviceGetCount")):
                raise BenchFailed("cuDeviceGetCount: no device")
            self._device = self._call("cuDeviceGet", 0)
            context = self._call("cuDevicePrimaryCtxRetain", self._device)
            self._made.callback(self._call, "cuDevicePrimaryCtxRelease", self._device)
            # torch uses the same context.
            self._call("cuCtxSetCurrent", context)
        except BenchFailed as error:
            self._made.close()
            raise BenchUnavailable(
                f"no GPU can be used here: {error.fact}",
                hint="run nvidia-smi to see whether the driver finds a GPU; pass the GPU to a container",
            ) from None

    def __enter__(self) -> Device:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # A lost context takes all allocations with it, and fails each of these calls.
        with suppress(BenchFailed):
            self._made.close()

    def describe(self) -> Gpu:
        """Return the GPU's description by the driver and the kernel. The link saves power between copies: ask right
        after some."""
        name = bytes(self._call("cuDeviceGetName", 256, self._device)).split(b"\0", 1)[0].decode(errors="replace")
        bus = bytes(self._call("cuDeviceGetPCIBusId", 64, self._device)).split(b"\0", 1)[0].decode(errors="replace")
        version = int(self._call("cuDriverGetVersion"))
        return Gpu(
            name=name,
            memory_bytes=self._memory()[1],
            multiprocessors=self._attribute("MULTIPROCESSOR_COUNT"),
            compute_capability=f"{self._attribute('COMPUTE_CAPABILITY_MAJOR')}.{self._attribute('COMPUTE_CAPABILITY_MINOR')}",
            cuda=f"{version // 1000}.{version % 1000 // 10}",
            driver=_line(_KERNEL_MODULE),
            bindings=metadata.version(_BINDINGS),
            link=link_of(bus, _PCI_DEVICES),
        )

    def free_bytes(self) -> int:
        """Free memory of the GPU."""
        return self._memory()[0]

    @contextmanager
    def memory(self, nbytes: int) -> Iterator[int]:
        """Yield the address of a separate allocation, of any content. Raises `BenchFailed`."""
        address = self._call("cuMemAlloc", nbytes)
        try:
            yield int(address)
        finally:
            with suppress(BenchFailed):
                self._call("cuMemFree", address)

    @contextmanager
    def pinned(self, nbytes: int) -> Iterator[PinnedMemory]:
        """Yield pinned memory, touched, of any content. Raises `BenchFailed`."""
        address = int(self._call("cuMemHostAlloc", nbytes, 0))
        try:
            ctypes.memset(address, 1, nbytes)
            yield PinnedMemory(address, memoryview((ctypes.c_ubyte * nbytes).from_address(address)).cast("B"))
        finally:
            with suppress(BenchFailed):
                self._call("cuMemFreeHost", address)

    def stream(self) -> Any:
        """Return a stream that waits for no other; it lives as long as the device is open."""
        stream = self._call("cuStreamCreate", int(self._cu.CUstream_flags.CU_STREAM_NON_BLOCKING))
        self._made.callback(self._call, "cuStreamDestroy", stream)
        return stream

    def to_host(self, host: int, device: int, nbytes: int, stream: Any) -> None:
        """Start one plain copy into pinned memory."""
        self._call("cuMemcpyDtoHAsync", host, self._cu.CUdeviceptr(device), nbytes, stream)

    def to_device(self, device: int, host: int, nbytes: int, stream: Any) -> None:
        """Start one plain copy out of pinned memory."""
        self._call("cuMemcpyHtoDAsync", self._cu.CUdeviceptr(device), host, nbytes, stream)

    def fill(self, device: int, byte: int, nbytes: int) -> None:
        """Start filling memory; `synchronize` waits for it as well."""
        self._call("cuMemsetD8", self._cu.CUdeviceptr(device), byte, nbytes)

    def synchronize(self, stream: Any = None) -> None:
        """Wait for a stream; None: for all work of this process on the device."""
        if stream is None:
            self._call("cuCtxSynchronize")
        else:
            self._call("cuStreamSynchronize", stream)

    def _memory(self) -> tuple[int, int]:
        free, total = self._call("cuMemGetInfo")
        return int(free), int(total)

    def _attribute(self, name: str) -> int:
        attribute = getattr(self._cu.CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{name}")
        return int(self._call("cuDeviceGetAttribute", attribute, self._device))

    def _call(self, name: str, *arguments: object) -> Any:
        """Return the call's one value, or a list of several. Raises `BenchFailed`."""
        try:
            status, *values = getattr(self._cu, name)(*arguments)
        except RuntimeError as error:
            # The bindings find no driver, or the driver lacks this call.
            raise BenchFailed(f"{name}: {one_line(str(error))}") from None
        if status != self._cu.CUresult.CUDA_SUCCESS:
            raise BenchFailed(f"{name}: {status.name}")
        return values[0] if len(values) == 1 else values


def link_of(bus: str, devices: Path) -> str:
    """Return the link of a GPU at a PCI address such as "0000:65:00.0" from the kernel: "32.0 GT/s PCIe x16"; "" if
    unknown."""
    folder = devices / bus.lower()[-12:]
    speed, width = _line(folder / "current_link_speed"), _line(folder / "current_link_width")
    return f"{speed} x{width}" if speed and width not in ("", "0") else ""


def _bindings() -> Any:
    try:
        return importlib.import_module("cuda.bindings.driver")
    except ImportError:
        raise BenchUnavailable(
            f"not installed: {_BINDINGS}", hint=install_command("cuda13", distribution="kvframework-cuda")
        ) from None


def _line(file: Path) -> str:
    try:
        return file.read_text().strip()
    except OSError:
        return ""


class PlainCopies:
    """Plain copies; each direction has a stream and memory of its own, in one piece. The calls return seconds."""

    def __init__(self, device: Device, places: tuple[int, int, int, int]) -> None:
        self._device = device
        self._from, self._to, self._host_to, self._host_from = places
        self._down, self._up = device.stream(), device.stream()

    def store(self, nbytes: int) -> float:
        """Copy from the GPU to the host."""

        def run() -> None:
            self._start_down(nbytes)
            self._device.synchronize(self._down)

        return timed(run)

    def retrieve(self, nbytes: int) -> float:
        """Copy from the host to the GPU."""

        def run() -> None:
            self._start_up(nbytes)
            self._device.synchronize(self._up)

        return timed(run)

    def both(self, nbytes: int) -> float:
        """Copy `nbytes` each way at once."""

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
    """Yield copies of at most `largest` bytes. Raises `BenchFailed` if there is too little memory."""
    with (
        device.memory(largest) as source,
        device.memory(largest) as target,
        device.pinned(largest) as down,
        device.pinned(largest) as up,
    ):
        yield PlainCopies(device, (source, target, down.address, up.address))
