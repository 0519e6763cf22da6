"""The calls of the CUDA driver that this transport makes, typed, with the framework's errors.

A thin layer over `cuda.bindings.driver`. The caller makes the right context current; no call waits for the device
unless documented. Error numbers: cuda.h, `CUresult`.
"""

from __future__ import annotations

import ctypes
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NewType

from cuda.bindings import driver as cu

from kvframework.errors import DeviceError, DeviceLost

Context = NewType("Context", int)
Event = NewType("Event", int)
RawStream = NewType("RawStream", int)
Function = NewType("Function", int)

MEMORY_HANDLE_BYTES = EVENT_HANDLE_BYTES = 64
DEFAULT_STREAM = RawStream(0)
# Batched copies in their first form: since CUDA 12.8.
_BATCH_VERSION = 12080

# After these errors nothing works in the context any more, or in the process.
_STICKY = frozenset(
    {
        "DEINITIALIZED",
        "DEVICE_UNAVAILABLE",
        "ECC_UNCORRECTABLE",
        "NVLINK_UNCORRECTABLE",
        "CONTAINED",
        "ILLEGAL_ADDRESS",
        "LAUNCH_TIMEOUT",
        "CONTEXT_IS_DESTROYED",
        "ASSERT",
        "HARDWARE_STACK_ERROR",
        "ILLEGAL_INSTRUCTION",
        "MISALIGNED_ADDRESS",
        "INVALID_ADDRESS_SPACE",
        "INVALID_PC",
        "LAUNCH_FAILED",
        "TENSOR_MEMORY_LEAK",
        "SYSTEM_NOT_READY",
        "SYSTEM_DRIVER_MISMATCH",
        "EXTERNAL_DEVICE",
        "MPS_CONNECTION_FAILED",
        "MPS_RPC_FAILURE",
        "MPS_SERVER_NOT_READY",
        "MPS_CLIENT_TERMINATED",
        "UNKNOWN",
    }
)
_HINTS = {
    "NO_DEVICE": "give the server's process the GPUs of the engines",
    "INVALID_DEVICE": "give the server's process the GPUs of the engines",
    "OUT_OF_MEMORY": "leave room on the GPU: the server's copier needs a CUDA context there",
    "DEVICE_UNAVAILABLE": "set the GPU's compute mode to Default (nvidia-smi -c 0); other modes admit only one process",
    "COMPAT_NOT_SUPPORTED_ON_DEVICE": "the driver is older than cuda-bindings: install a newer driver",
}


class Driver:
    """The driver in this process. The constructor initialises CUDA and raises `DeviceError` where there is no driver or
    no device."""

    def __init__(self) -> None:
        _call(cu.cuInit, 0)

    # devices and contexts

    def devices(self) -> list[int]:
        """Return the ordinals of the visible devices, in torch's order."""
        return list(range(_call(cu.cuDeviceGetCount)))

    def uuid(self, ordinal: int) -> bytes:
        """Return the device's UUID; a MIG instance has its own, different from that of the GPU around it."""
        # The bindings for CUDA 12 have both, and the first one returns that of the whole GPU.
        get = getattr(cu, "cuDeviceGetUuid_v2", cu.cuDeviceGetUuid)
        return bytes(_call(get, self._device(ordinal)).bytes)

    def model(self, ordinal: int) -> str:
        name = _call(cu.cuDeviceGetName, 256, self._device(ordinal))
        return bytes(name).split(b"\0", 1)[0].decode(errors="replace")

    def compute_capability(self, ordinal: int) -> int:
        """Return the compute capability, such as 90 for 9.0."""
        device, attribute = self._device(ordinal), cu.CUdevice_attribute
        major = _call(cu.cuDeviceGetAttribute, attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, device)
        return 10 * int(major) + int(
            _call(cu.cuDeviceGetAttribute, attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR, device)
        )

    def shares_events(self, ordinal: int) -> bool | None:
        """Return whether the device can export memory and events to other processes; None if the driver does not
        say."""
        attribute = cu.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_IPC_EVENT_SUPPORTED
        return _answered(cu.cuDeviceGetAttribute, attribute, self._device(ordinal))

    def version(self) -> int:
        """Return the driver's version of CUDA, such as 12080 for 12.8."""
        return int(_call(cu.cuDriverGetVersion))

    def has_context(self, ordinal: int) -> bool:
        _flags, active = _call(cu.cuDevicePrimaryCtxGetState, self._device(ordinal))
        return bool(active)

    def retain_context(self, ordinal: int) -> Context:
        """Return the primary context, which torch uses as well; created if there is none yet, which takes a moment."""
        return Context(int(_call(cu.cuDevicePrimaryCtxRetain, self._device(ordinal))))

    def release_context(self, ordinal: int) -> None:
        _call(cu.cuDevicePrimaryCtxRelease, self._device(ordinal))

    def set_current(self, context: Context) -> None:
        """Make the context current for this thread, until the thread ends."""
        _call(cu.cuCtxSetCurrent, cu.CUcontext(context))

    @contextmanager
    def current(self, context: Context) -> Iterator[None]:
        """Make the context current for this thread within a `with` block; the former one is current again
        afterwards."""
        _call(cu.cuCtxPushCurrent, cu.CUcontext(context))
        try:
            yield
        finally:
            _call(cu.cuCtxPopCurrent)

    def stream_priorities(self) -> tuple[int, int]:
        """Return the least and the greatest priority of the current context. Raises `DeviceError` where it knows
        none."""
        least, greatest = _call(cu.cuCtxGetStreamPriorityRange)
        return int(least), int(greatest)

    # memory

    def allocation_of(self, address: int) -> tuple[int, int]:
        """Return the address of the allocation around a device address, and its bytes. Raises `DeviceError` if the
        driver has no answer: of memory of another process none is promised."""
        place, attribute = cu.CUdeviceptr(address), cu.CUpointer_attribute
        try:
            found = _call(cu.cuMemGetAddressRange, place)
        except DeviceLost:
            raise
        except DeviceError:
            ends = (attribute.CU_POINTER_ATTRIBUTE_RANGE_START_ADDR, attribute.CU_POINTER_ATTRIBUTE_RANGE_SIZE)
            found = [_call(cu.cuPointerGetAttribute, each, place) for each in ends]
        base, nbytes = map(int, found)
        if not base <= address < base + nbytes:
            raise DeviceError(f"{address:#x} is outside its allocation, {nbytes} bytes at {base:#x}", where="cuda_ipc")
        return base, nbytes

    def ordinal_of(self, address: int) -> int:
        """Return the ordinal of a device address's device. Raises `DeviceError` for host memory."""
        kind = _call(
            cu.cuPointerGetAttribute, cu.CUpointer_attribute.CU_POINTER_ATTRIBUTE_MEMORY_TYPE, cu.CUdeviceptr(address)
        )
        if int(kind) != int(cu.CUmemorytype.CU_MEMORYTYPE_DEVICE):
            raise DeviceError(f"address {address:#x} is not memory of a GPU", where="cuda_ipc")
        attribute = cu.CUpointer_attribute.CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL
        return int(_call(cu.cuPointerGetAttribute, attribute, cu.CUdeviceptr(address)))

    def is_exportable(self, address: int) -> bool | None:
        """Return whether the memory has a handle for other processes: that of virtual memory management and managed
        memory has none. None if the driver does not say."""
        attribute = cu.CUpointer_attribute.CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE
        return _answered(cu.cuPointerGetAttribute, attribute, cu.CUdeviceptr(address))

    def export_memory(self, base: int) -> bytes:
        return _bytes_of(_call(cu.cuIpcGetMemHandle, cu.CUdeviceptr(base)), MEMORY_HANDLE_BYTES)

    def open_memory(self, handle: bytes) -> int:
        flag = cu.CUipcMem_flags.CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS
        return int(_call(cu.cuIpcOpenMemHandle, _filled(cu.CUipcMemHandle(), handle), int(flag)))

    def close_memory(self, address: int) -> None:
        """Close another process's memory. Waits for the device, for a moment."""
        _call(cu.cuIpcCloseMemHandle, cu.CUdeviceptr(address))

    def register_host(self, address: int, nbytes: int) -> int | None:
        """Pin host memory and map it for the device; returns its address there, None if the driver does not say.
        Blocking."""
        _call(cu.cuMemHostRegister, address, nbytes, cu.CU_MEMHOSTREGISTER_PORTABLE | cu.CU_MEMHOSTREGISTER_DEVICEMAP)
        return self._on_device(address)

    def allocate_host(self, nbytes: int) -> tuple[int, int | None]:
        """Allocate pinned memory, not zeroed; returns its address here and on the device, None if the driver does not
        say."""
        flags = cu.CU_MEMHOSTALLOC_PORTABLE | cu.CU_MEMHOSTALLOC_DEVICEMAP
        address = int(_call(cu.cuMemHostAlloc, nbytes, flags))
        return address, self._on_device(address)

    def free_host(self, address: int) -> None:
        """Free what `allocate_host` gave. Waits for the device."""
        _call(cu.cuMemFreeHost, address)

    def allocate(self, nbytes: int) -> int:
        """Allocate memory of the device, not zeroed; may wait for the device."""
        return int(_call(cu.cuMemAlloc, nbytes))

    def free(self, address: int) -> None:
        """Free what `allocate` gave. Waits for the device."""
        _call(cu.cuMemFree, cu.CUdeviceptr(address))

    def _on_device(self, address: int) -> int | None:
        try:
            return int(_call(cu.cuMemHostGetDevicePointer, address, 0))
        except DeviceLost:
            raise
        except DeviceError:
            return None

    # events

    def create_event(self, *, interprocess: bool) -> Event:
        flags = cu.CUevent_flags.CU_EVENT_DISABLE_TIMING
        chosen = int(flags) | (int(cu.CUevent_flags.CU_EVENT_INTERPROCESS) if interprocess else 0)
        return Event(int(_call(cu.cuEventCreate, chosen)))

    def export_event(self, event: Event) -> bytes:
        return _bytes_of(_call(cu.cuIpcGetEventHandle, cu.CUevent(event)), EVENT_HANDLE_BYTES)

    def open_event(self, handle: bytes) -> Event:
        return Event(int(_call(cu.cuIpcOpenEventHandle, _filled(cu.CUipcEventHandle(), handle))))

    def destroy_event(self, event: Event) -> None:
        _call(cu.cuEventDestroy, cu.CUevent(event))

    def record(self, event: Event, stream: RawStream) -> None:
        _call(cu.cuEventRecord, cu.CUevent(event), cu.CUstream(stream))

    def reached(self, event: Event) -> bool:
        """Return whether the event was reached. Raises an error of the device's work before it."""
        (status,) = cu.cuEventQuery(cu.CUevent(event))
        if status == cu.CUresult.CUDA_ERROR_NOT_READY:
            return False
        _check(status, "cuEventQuery")
        return True

    # streams

    def create_stream(self, priority: int) -> RawStream:
        """Create a stream that does not wait for the legacy default stream."""
        flags = int(cu.CUstream_flags.CU_STREAM_NON_BLOCKING)
        return RawStream(int(_call(cu.cuStreamCreateWithPriority, flags, priority)))

    def destroy_stream(self, stream: RawStream) -> None:
        """End the stream once its queued work is done; does not wait."""
        _call(cu.cuStreamDestroy, cu.CUstream(stream))

    def wait_event(self, stream: RawStream, event: Event) -> None:
        _call(cu.cuStreamWaitEvent, cu.CUstream(stream), cu.CUevent(event), 0)

    def wait_word(self, stream: RawStream, address: int, value: int) -> None:
        """Make the stream wait until the 32-bit word at a device address is `value` or later, cyclically."""
        flag = int(cu.CUstreamWaitValue_flags.CU_STREAM_WAIT_VALUE_GEQ)
        _call(cu.cuStreamWaitValue32, cu.CUstream(stream), cu.CUdeviceptr(address), value, flag)

    # work

    def batch_copy_address(self) -> int:
        """Return the address of the driver's `cuMemcpyBatchAsync`, with the parameters of CUDA 12.8; 0 if it has none.

        The address is used since the bindings take a Python object for each fragment.
        """
        try:
            address, *_ = _call(cu.cuGetProcAddress, b"cuMemcpyBatchAsync", _BATCH_VERSION, 0)
        except DeviceError:
            return 0
        return int(address or 0)

    def load_functions(self, image: bytes, names: Mapping[int, str]) -> dict[int, Function]:
        """Return the functions of an image, valid for the context's lifetime."""
        module = _call(cu.cuModuleLoadData, image)
        return {key: Function(int(_call(cu.cuModuleGetFunction, module, name.encode()))) for key, name in names.items()}

    def launch(self, function: Function, blocks: int, threads: int, stream: RawStream, parameter: int) -> None:
        """Start a kernel with one parameter, a struct at host address `parameter`, which is copied now."""
        pointers = (ctypes.c_void_p * 1)(parameter)
        _call(
            cu.cuLaunchKernel,
            cu.CUfunction(function),
            blocks,
            1,
            1,
            threads,
            1,
            1,
            0,
            cu.CUstream(stream),
            ctypes.addressof(pointers),
            0,
        )

    def _device(self, ordinal: int) -> Any:
        return _call(cu.cuDeviceGet, ordinal)


def check_status(status: int, call: str) -> None:
    """Raise the error of a call that was made by its address, by its `CUresult`."""
    if status:
        _check(cu.CUresult(status), call)


def _call(function: Any, *arguments: object) -> Any:
    """Return the call's one value, a list of several, or None."""
    try:
        status, *values = function(*arguments)
    except RuntimeError as error:
        # The bindings find no driver, or the driver lacks this function.
        raise DeviceError(f"{function.__name__}: {error}", where="cuda_ipc", hint="install a newer driver") from None
    _check(status, function.__name__)
    return values[0] if len(values) == 1 else values or None


def _answered(function: Any, *arguments: object) -> bool | None:
    """Return the answer to a yes-or-no question; None if the driver cannot tell. Raises `DeviceLost`."""
    try:
        return bool(_call(function, *arguments))
    except DeviceLost:
        raise
    except DeviceError:
        return None


def _check(status: Any, call: str) -> None:
    if status == cu.CUresult.CUDA_SUCCESS:
        return
    name = status.name.removeprefix("CUDA_ERROR_")
    kind = DeviceLost if name in _STICKY else DeviceError
    raise kind(f"{call}: {status.name}", where="cuda_ipc", hint=_HINTS.get(name, ""))


def _bytes_of(handle: Any, size: int) -> bytes:
    return ctypes.string_at(handle.getPtr(), size)


def _filled(handle: Any, data: bytes) -> Any:
    if len(data) != MEMORY_HANDLE_BYTES:
        raise DeviceError(f"the handle has {len(data)} bytes", where="cuda_ipc", available=f"{MEMORY_HANDLE_BYTES}")
    ctypes.memmove(handle.getPtr(), data, len(data))
    return handle


_NAME = re.compile(r"(GPU|MIG)-[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")


def name_of(uuid: bytes, model: str) -> str:
    """Return the name that CUDA_VISIBLE_DEVICES takes; `model` is the device's name, which distinguishes a MIG instance
    from a whole GPU."""
    digits = uuid.hex()
    parts = (digits[:8], digits[8:12], digits[12:16], digits[16:20], digits[20:])
    return ("MIG-" if " MIG " in f"{model} " else "GPU-") + "-".join(parts)


def same(one: str, other: str) -> bool:
    """Return whether both names mean one device: by their UUIDs, since what tells an instance of a divided GPU from a
    whole one is only the model's name."""
    return one[4:] == other[4:]


def show_only(device: str) -> None:
    """Hide all other GPUs from this process, also those that the server sees; before CUDA is initialised. Raises
    `DeviceError` for an invalid name of a GPU."""
    if not _NAME.fullmatch(device):
        raise DeviceError(
            f"{device!r} is not the name of a GPU",
            where="cuda_ipc",
            available="GPU- or MIG- and a UUID, in small letters",
        )
    os.environ["CUDA_VISIBLE_DEVICES"] = device
