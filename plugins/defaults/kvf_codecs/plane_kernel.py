"""The two ways to split elements into byte planes and to merge them: by the plane kernel (`native/planes.c`), an
optional part of the build, and by NumPy. Both give the same bytes. Blocking; both release the GIL.
"""

from __future__ import annotations

import array
import ctypes
import functools
from collections.abc import Sequence
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path
from typing import Protocol

from kvframework.api.copying import address_of
from kvframework.api.installing import load_library
from kvframework.api.plugin import Buffer

_LIBRARY = Path(__file__).with_name("native") / "libkvf_planes.so"
_ABI = 1


class PlaneKernel(Protocol):
    """Stateless; may be called by several threads. An element has as many bytes as there are planes."""

    def split(self, data: memoryview, planes: Sequence[memoryview]) -> None:
        """Write byte i of each element of `data` to plane i. `data` is as long as all planes together, which are of one
        length, writable, and apart from it."""

    def merge(self, planes: Sequence[Buffer], data: memoryview) -> None:
        """The inverse of `split`."""


class NativeKernel:
    def __init__(self, library: ctypes.CDLL) -> None:
        self._split = library.kvf_planes_split
        self._merge = library.kvf_planes_merge
        for function in (self._split, self._merge):
            function.argtypes = (ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint32, ctypes.c_void_p)
            function.restype = None

    def split(self, data: memoryview, planes: Sequence[memoryview]) -> None:
        self._call(self._split, data, planes, splits=True)

    def merge(self, planes: Sequence[Buffer], data: memoryview) -> None:
        self._call(self._merge, data, planes, splits=False)

    @staticmethod
    def _call(function: ctypes._NamedFuncPointer, data: memoryview, planes: Sequence[Buffer], *, splits: bool) -> None:
        with ExitStack() as stack:
            at, nbytes = stack.enter_context(address_of(data, not splits))
            count, width = nbytes // len(planes), len(planes)
            places = [stack.enter_context(address_of(plane, splits)) for plane in planes]
            check_lengths(nbytes, [length for _, length in places])
            addresses = array.array("Q", [address for address, _ in places])
            function(at, count, width, addresses.buffer_info()[0])


class NumpyKernel:
    """A `PlaneKernel` where the library was not built. Raises `ImportError` without NumPy."""

    def __init__(self) -> None:
        import numpy

        self._bytes = functools.partial(numpy.frombuffer, dtype=numpy.uint8)

    def split(self, data: memoryview, planes: Sequence[memoryview]) -> None:
        check_lengths(data.nbytes, [plane.nbytes for plane in planes])
        elements = self._bytes(data)
        for index, plane in enumerate(planes):
            self._bytes(plane)[:] = elements[index :: len(planes)]

    def merge(self, planes: Sequence[Buffer], data: memoryview) -> None:
        check_lengths(data.nbytes, [memoryview(plane).nbytes for plane in planes])
        elements = self._bytes(data)
        for index, plane in enumerate(planes):
            elements[index :: len(planes)] = self._bytes(plane)


def check_lengths(nbytes: int, planes: Sequence[int]) -> None:
    """Raise `ValueError` unless the planes share `nbytes` evenly."""
    if any(length * len(planes) != nbytes for length in planes):
        raise ValueError(f"the planes have {list(planes)} bytes, the object {nbytes}")


def why_no_kernel() -> str | None:
    """Return the reason why there is no kernel at all, None if there is one."""
    if _library() is None and find_spec("numpy") is None:
        return "the compiled plane kernel is missing, and numpy is not installed: pip install numpy"
    return None


def load_kernel() -> PlaneKernel:
    """Return the kernel of this installation. Raises `ImportError` where `why_no_kernel` has a reason."""
    library = _library()
    return NumpyKernel() if library is None else NativeKernel(library)


@functools.cache
def _library() -> ctypes.CDLL | None:
    return load_library(_LIBRARY, "kvf_planes", _ABI, instead="NumPy splits the planes")
