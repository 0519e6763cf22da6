"""Copies by a kernel (`gather.cu`): a batch's many small fragments in as few launches as its table allows.

In the copier process.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Iterator, Sequence
from importlib import resources
from typing import Any

from cuda.bindings import nvrtc

from kvf_cuda_ipc import INSTALL
from kvf_cuda_ipc.batched import prove
from kvf_cuda_ipc.driver import Driver, Function, RawStream
from kvframework.api.copy_plans import CopyBatch, Step
from kvframework.errors import DeviceError


def compiled(source: str, name: str, capability: int) -> bytes:
    """Return machine code for GPUs of a compute capability such as 90; for a GPU newer than the compiler PTX, which the
    driver translates. Raises `DeviceError` with the compiler's log, or if there is no compiler."""
    architecture = _architecture(capability, _call(nvrtc.nvrtcGetSupportedArchs))
    program = _call(nvrtc.nvrtcCreateProgram, source.encode(), name.encode(), 0, [], [])
    options = [f"--gpu-architecture={architecture}".encode(), b"--std=c++17"]
    try:
        try:
            _call(nvrtc.nvrtcCompileProgram, program, len(options), options)
        except DeviceError as error:
            log = _filled(program, nvrtc.nvrtcGetProgramLogSize, nvrtc.nvrtcGetProgramLog).rstrip(b"\0 \n").decode()
            raise DeviceError(f"{name} for {architecture}: {log or error.fact}", where="cuda_ipc") from None
        if architecture.startswith("sm_"):
            return _filled(program, nvrtc.nvrtcGetCUBINSize, nvrtc.nvrtcGetCUBIN)
        return _filled(program, nvrtc.nvrtcGetPTXSize, nvrtc.nvrtcGetPTX)
    finally:
        _call(nvrtc.nvrtcDestroyProgram, program)


def _architecture(capability: int, known: Sequence[int]) -> str:
    if capability in known:
        return f"sm_{capability}"
    older = [each for each in known if each < capability]
    if not older:
        raise DeviceError(
            f"NVRTC cannot compile for compute capability {capability}",
            where="cuda_ipc",
            available=f"{min(known)} and later",
            hint='set engine = "dma"',
        )
    return f"compute_{max(older)}"


def _filled(program: Any, size: Any, get: Any) -> bytes:
    data = bytearray(_call(size, program))
    _call(get, program, data)
    return bytes(data)


def _call(function: Any, *arguments: object) -> Any:
    try:
        status, *values = function(*arguments)
    except RuntimeError as error:
        raise DeviceError(f"NVRTC cannot be used: {error}", where="cuda_ipc", hint=INSTALL) from None
    if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
        raise DeviceError(f"{function.__name__}: {status.name}", where="cuda_ipc")
    return values[0] if values else None


# The same as in gather.cu.
PAIRS = 240
_STEPS = 4
_SIZES = (16, 8, 4, 2, 1)
_THREADS = 512
# The kernel counts in 32 bits, one round of all its threads beyond the last word.
_MOST_WORDS = 1 << 31


class Batch(ctypes.Structure):
    """`kvf_batch` of gather.cu, at most 4096 bytes: the limit of any GPU for parameters."""

    _fields_ = (
        ("arena", ctypes.c_uint64),
        ("lanes", ctypes.c_uint32),
        ("places", ctypes.c_uint32),
        ("words", ctypes.c_uint32),
        ("to_arena", ctypes.c_uint32),
        ("total", ctypes.c_uint32),
        ("numbers", ctypes.c_uint32 * _STEPS),
        ("device_steps", ctypes.c_uint64 * _STEPS),
        ("arena_steps", ctypes.c_uint64 * _STEPS),
        ("addresses", ctypes.c_uint64 * PAIRS),
        ("offsets", ctypes.c_uint64 * PAIRS),
    )


class GatherKernel:
    """The compiled kernel: `functions` by the bytes of a word, `blocks` of threads at most. Never blocks."""

    def __init__(self, driver: Driver, functions: dict[int, Function], blocks: int) -> None:
        self._driver = driver
        self._functions = functions
        self._blocks = blocks

    @classmethod
    def built(cls, driver: Driver, blocks: int, ordinal: int = 0) -> GatherKernel:
        """Compile for a GPU, whose context is the current one, and prove it by a trial: some 0.2 s. Raises
        `DeviceError` without NVRTC, and if the trial fails."""
        image = compiled(source(), "gather.cu", driver.compute_capability(ordinal))
        names = {size: f"kvf_copy_{size}" for size in _SIZES}
        made = cls(driver, driver.load_functions(image, names), blocks)
        prove(driver, made._try)
        return made

    def _try(self, stream: RawStream, batch: CopyBatch, here: int, further: int | None, to_arena: bool) -> None:
        if further is None:
            raise DeviceError("the driver does not report the GPU's address of pinned memory", where="cuda_ipc")
        self.copy(stream, batch, here + further, to_arena=to_arena)

    def copy(self, stream: RawStream, batch: CopyBatch, arena: int, *, to_arena: bool) -> None:
        """Start a copy; `arena` is its address on the GPU."""
        for part in parts(batch):
            size, parameters = described(part, arena, to_arena=to_arena)
            blocks = min(self._blocks, -(-parameters.total // _THREADS))
            self._driver.launch(self._functions[size], blocks, _THREADS, stream, ctypes.addressof(parameters))


def source() -> str:
    return resources.files("kvf_cuda_ipc").joinpath("gather.cu").read_text()


def parts(batch: CopyBatch) -> Iterator[CopyBatch]:
    """Yield the parts of a batch: as many lanes and places at once as the table holds, and as many bytes as the kernel
    can count."""
    lanes, places = len(batch.lane_addresses), len(batch.place_addresses)
    if lanes + places > PAIRS:
        lanes = min(lanes, PAIRS // 2)
        places = min(places, PAIRS - lanes)
    cell = batch.nbytes // (len(batch.lane_addresses) * len(batch.place_addresses))
    places = max(min(places, _MOST_WORDS // cell), 1)
    lanes = max(min(lanes, _MOST_WORDS // (cell * places)), 1)
    if cell > _MOST_WORDS:
        raise DeviceError(f"one fragment has {cell} bytes", where="cuda_ipc", available=f"at most {_MOST_WORDS}")
    yield from batch.tiles(lanes, places)


def described(batch: CopyBatch, arena: int, *, to_arena: bool) -> tuple[int, Batch]:
    """Return the bytes of a word, the largest that divides all addresses and lengths, and the kernel's parameter."""
    steps = [*(Step(1, 0, 0) for _ in range(_STEPS - len(batch.steps))), *batch.steps]
    addresses = [*batch.lane_addresses, *batch.place_addresses]
    offsets = [*batch.lane_offsets, *batch.place_offsets]
    distances = [each for step in steps for each in (step.device, step.arena)]
    size = math.gcd(_SIZES[0], arena, batch.run, *addresses, *offsets, *distances)
    parameters = Batch(
        arena=arena,
        lanes=len(batch.lane_addresses),
        places=len(batch.place_addresses),
        words=batch.run // size,
        to_arena=to_arena,
        total=batch.nbytes // size,
    )
    parameters.numbers[:] = [step.number for step in steps]
    parameters.device_steps[:] = [step.device for step in steps]
    parameters.arena_steps[:] = [step.arena for step in steps]
    parameters.addresses[: len(addresses)] = addresses
    parameters.offsets[: len(offsets)] = offsets
    return size, parameters
