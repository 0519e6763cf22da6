"""A process on a simulated node, for tests. One JSON list a line: a name for the result, a call, its arguments.

The call is one of `cuda.bindings.driver`, made in the primary context of the first visible device if it has one, or one
of those below. `$name` stands for the result with that name; `name+1` for an address behind it. Answers with one list:
"ok" or the driver's name of the error, and the printable part of the value. Bytes travel as hex.
"""

from __future__ import annotations

import ctypes
import json
import re
import sys
import threading
from typing import Any

from cuda.bindings import driver as cu

kept: dict[str, Any] = {}


def main() -> None:
    for line in sys.stdin:
        name, function, *arguments = json.loads(line)
        called = OWN.get(function) or getattr(cu, function)
        try:
            status, *values = called(*map(_meant, arguments))
        except RuntimeError as error:
            # The driver has no such function.
            verdict, values = str(error), []
        else:
            verdict = status.name if status else "ok"
        kept[name] = values[0] if len(values) == 1 else values
        print(json.dumps([verdict, _told(kept[name])]), flush=True)


def start(ordinal: int = 0) -> tuple[Any, ...]:
    """Initialises, and makes a device's primary context current."""
    (status,) = cu.cuInit(0)
    if status:
        return (status,)
    _, device = cu.cuDeviceGet(ordinal)
    _, context = cu.cuDevicePrimaryCtxRetain(device)
    return cu.cuCtxPushCurrent(context)


def uuids() -> tuple[Any, ...]:
    status, count = cu.cuDeviceGetCount()
    # In the bindings of CUDA 12 the plain name is the old form's.
    uuid_of = getattr(cu, "cuDeviceGetUuid_v2", cu.cuDeviceGetUuid)
    return status, [bytes(uuid_of(ordinal)[1].bytes).hex() for ordinal in range(count)]


def read(address: int, nbytes: int) -> tuple[Any, ...]:
    found = bytearray(nbytes)
    (status,) = cu.cuMemcpyDtoH(found, address, nbytes)
    return status, bytes(found)


def peek(address: int, nbytes: int) -> tuple[Any, ...]:
    """Of host memory."""
    return cu.CUresult.CUDA_SUCCESS, ctypes.string_at(address, nbytes)


def poke(address: int, data: bytes) -> tuple[Any, ...]:
    ctypes.memmove(address, data, len(data))
    return (cu.CUresult.CUDA_SUCCESS,)


def page(nbytes: int) -> tuple[Any, ...]:
    """Host memory that is not registered."""
    kept["pages", len(kept)] = memory = ctypes.create_string_buffer(nbytes)
    return cu.CUresult.CUDA_SUCCESS, ctypes.addressof(memory)


def is_lendable(address: int) -> tuple[Any, ...]:
    attribute = cu.CUpointer_attribute.CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE
    return cu.cuPointerGetAttribute(attribute, address)  # type: ignore[no-any-return]


def batch(to: list[Any], source: list[Any], sizes: list[int], stream: int, order: int = 1) -> tuple[Any, ...]:
    attributes = cu.CUmemcpyAttributes()
    attributes.srcAccessOrder = cu.CUmemcpySrcAccessOrder(order)
    pointers = ([cu.CUdeviceptr(_meant(each)) for each in column] for column in (to, source))
    return cu.cuMemcpyBatchAsync(*pointers, sizes, len(sizes), [attributes], [0], 1, stream)  # type: ignore[no-any-return]


def launch(function: Any, blocks: int, threads: int, stream: int, parameters: bytes) -> tuple[Any, ...]:
    pointer = (ctypes.c_void_p * 1)(ctypes.cast(ctypes.create_string_buffer(parameters), ctypes.c_void_p))
    sizes = (blocks, 1, 1, threads, 1, 1, 0)
    return cu.cuLaunchKernel(function, *sizes, stream, ctypes.addressof(pointer), 0)  # type: ignore[no-any-return]


def elsewhere(function: str, *arguments: object) -> tuple[Any, ...]:
    """Call in a thread that has no context."""
    found: list[tuple[Any, ...]] = []
    thread = threading.Thread(target=lambda: found.append(getattr(cu, function)(*arguments)))
    thread.start()
    thread.join()
    return found[0]


OWN = {each.__name__: each for each in (start, uuids, read, peek, poke, page, is_lendable, batch, launch, elsewhere)}


def _meant(argument: Any) -> Any:
    if not isinstance(argument, str):
        return argument
    kind, colon, value = argument.partition(":")
    if colon:
        data = bytes.fromhex(value)
        handle = {"mem": cu.CUipcMemHandle, "event": cu.CUipcEventHandle}.get(kind)
        if handle is None:
            return data
        made = handle()
        ctypes.memmove(made.getPtr(), data, len(data))
        return made
    reference = re.fullmatch(r"\$(\w+)(?:\+(\d+))?", argument)
    if reference is None:
        return argument
    found = kept[reference[1]]
    return found if reference[2] is None else int(found) + int(reference[2])


def _told(value: Any) -> Any:
    if isinstance(value, cu.CUipcMemHandle | cu.CUipcEventHandle):
        value = ctypes.string_at(value.getPtr(), 64)
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, list) and all(isinstance(each, str) for each in value):
        return value
    try:
        return int(value)
    except TypeError:
        return None


if __name__ == "__main__":
    main()
