"""Copies of bytes that release the interpreter lock: an object of 256 MiB takes 100 ms and more.

A slice assignment between memoryviews, `bytes(view)` and `b"".join(views)` hold the lock to their end, and stop every
other thread of the process, the one that answers the engines too. Thread-safe; each call blocks for the copy.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from kvframework.api.installing import load_library
from kvframework.api.plugin import Buffer

__all__ = ["address_of", "copy_bytes", "copy_past_caches", "fresh_memory", "joined"]

_LIBRARY = Path(__file__).with_name("native") / "libkvf_streaming.so"
_ABI = 1

_WRITABLE = 1
# Below this a copy is quicker than anything that avoids it.
_SMALL = 64 << 10
# Shorter copies are often read again from the CPU's caches.
_MUCH = 1 << 20


class _PyBuffer(ctypes.Structure):
    """CPython's `Py_buffer`."""

    _fields_ = (
        ("buf", ctypes.c_void_p),
        ("obj", ctypes.c_void_p),
        ("len", ctypes.c_ssize_t),
        ("itemsize", ctypes.c_ssize_t),
        ("readonly", ctypes.c_int),
        ("ndim", ctypes.c_int),
        ("format", ctypes.c_char_p),
        ("shape", ctypes.c_void_p),
        ("strides", ctypes.c_void_p),
        ("suboffsets", ctypes.c_void_p),
        ("internal", ctypes.c_void_p),
    )


_get = ctypes.pythonapi.PyObject_GetBuffer
_get.argtypes = (ctypes.py_object, ctypes.POINTER(_PyBuffer), ctypes.c_int)
_release = ctypes.pythonapi.PyBuffer_Release
_release.argtypes = (ctypes.POINTER(_PyBuffer),)
_release.restype = None


def copy_bytes(target: memoryview, source: Buffer) -> None:
    """Copy `source` into the writable `target` of equal length; both may overlap. Borrows both until it returns.
    Raises `ValueError` for unequal lengths, `BufferError` for memory that is not contiguous or not writable."""
    with address_of(target, True) as (to, room), address_of(source) as (origin, nbytes):
        if nbytes != room:
            raise ValueError(f"the source has {nbytes} bytes, the target {room}")
        ctypes.memmove(to, origin, nbytes)


def copy_past_caches(target: memoryview, source: Buffer) -> None:
    """Copy as `copy_bytes`, past the processor's caches, for bytes that this process does not read again soon. A
    small copy, or one without the compiled kernel, goes through the caches."""
    with address_of(target, True) as (to, room), address_of(source) as (origin, nbytes):
        if nbytes != room:
            raise ValueError(f"the source has {nbytes} bytes, the target {room}")
        much = nbytes >= _MUCH and abs(to - origin) >= nbytes
        (_streaming() if much else ctypes.memmove)(to, origin, nbytes)


@functools.cache
def _streaming() -> Callable[[int, int, int], object]:
    """Return the kernel (`native/streaming.c`), else the C library's copy."""
    library = load_library(_LIBRARY, "kvf_streaming", _ABI, instead="memmove copies")
    if library is None:
        return ctypes.memmove
    stream: Callable[[int, int, int], object] = library.kvf_stream
    library.kvf_stream.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint64)
    library.kvf_stream.restype = None
    return stream


def fresh_memory(nbytes: int) -> memoryview:
    """Return writable memory of zeros, whose pages are taken as they are written and go back to the kernel with the
    last view of it. Raises `OSError` if there is no memory."""
    if nbytes < _SMALL:
        return memoryview(bytearray(nbytes))
    # The kernel clears pages as a write comes to them; a bytearray is cleared under the lock.
    return memoryview(mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))


def joined(parts: Sequence[Buffer]) -> memoryview:
    """Return a copy of all parts in order. Raises `BufferError` for parts that are not contiguous, and `OSError`."""
    nbytes = sum(memoryview(part).nbytes for part in parts)
    if nbytes < _SMALL:
        return memoryview(b"".join(parts))
    memory = fresh_memory(nbytes)
    start = 0
    for part in parts:
        end = start + memoryview(part).nbytes
        copy_bytes(memory[start:end], part)
        start = end
    return memory.toreadonly()


@contextmanager
def address_of(buffer: Buffer, writable: bool = False) -> Iterator[tuple[int, int]]:
    """Address and bytes of a contiguous buffer, which cannot be freed or resized within the context: for a call into C.
    Raises `BufferError` for memory that is not contiguous, or not writable where it is to be `writable`."""
    view = _PyBuffer()
    _get(buffer, view, _WRITABLE if writable else 0)
    try:
        yield view.buf or 0, view.len
    finally:
        _release(view)
