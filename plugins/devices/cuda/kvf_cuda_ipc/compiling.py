"""The compilation of CUDA source for a GPU: NVRTC, through its bindings. In the copier, at its start."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from cuda.bindings import nvrtc

from kvf_cuda_ipc.options import INSTALL
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
            f"NVRTC compiles for no GPU as old as compute capability {capability}",
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
