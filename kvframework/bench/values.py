"""Owns the memory that values come from and go to, as an arena holds them: page-aligned, touched, compared by bytes."""

from __future__ import annotations

import ctypes
import mmap
import os

from kvframework.bench.errors import WrongBytes

_memcmp = ctypes.CDLL(None).memcmp
_memcmp.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
_memcmp.restype = ctypes.c_int


class Values:
    """`count` random values of `nbytes` each, and touched memory to receive them. It goes with its last view."""

    def __init__(self, nbytes: int, count: int) -> None:
        self.nbytes = nbytes
        self.total = nbytes * count
        source, target = mmap.mmap(-1, self.total), mmap.mmap(-1, self.total)
        for start in range(0, self.total, nbytes):
            source[start : start + nbytes] = os.urandom(nbytes)
        self._source_at, self._target_at = _address(source), _address(target)
        self.sources = _cut(source, nbytes)
        self.targets = _cut(target, nbytes)
        self.poison()

    def poison(self) -> None:
        """Fills the targets with one byte over and over, so that what is not received is seen."""
        ctypes.memset(self._target_at, 0xA5, self.total)

    def verify(self, way: str) -> None:
        """Raises `WrongBytes` unless the targets equal the sources byte for byte. `way` is how they came."""
        if _memcmp(self._source_at, self._target_at, self.total):
            raise WrongBytes(f"what came back by {way} is not what was stored", hint="no figures are reported")


def _cut(buffer: mmap.mmap, nbytes: int) -> list[memoryview]:
    view = memoryview(buffer)
    return [view[start : start + nbytes] for start in range(0, view.nbytes, nbytes)]


def _address(buffer: mmap.mmap) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(buffer))
