"""The words of pinned host memory that streams of the engine wait for, one for each wait under way. Pure but for the
given memory; thread-safe.

A word only grows, and a wait is for its value or later (cyclically, as `cuStreamWaitValue32` compares): so it can serve
the next wait at once, also while a stream has not reached the last one yet.
"""

from __future__ import annotations

import ctypes
import threading

from kvframework.errors import DeviceError

_WORD = 4
_CYCLE = 1 << 32


class Words:
    """The words of one page at `address` here and `device_address` on the device, which the owner frees."""

    NBYTES = 4096

    def __init__(self, address: int, device_address: int) -> None:
        ctypes.memset(address, 0, self.NBYTES)
        count = self.NBYTES // _WORD
        self._memory = (ctypes.c_uint32 * count).from_address(address)
        self._device_address = device_address
        self._lock = threading.Lock()
        self._spare = list(range(count))

    def take(self) -> Word:
        """Return a free word. Raises `DeviceError` if all are in use."""
        with self._lock:
            if not self._spare:
                raise DeviceError(f"{len(self._memory)} transfers are waited for by streams at once", where="cuda_ipc")
            index = self._spare.pop()
        return Word(self, index, (self._memory[index] + 1) % _CYCLE, self._device_address + index * _WORD)

    def release(self, index: int, value: int) -> None:
        self._memory[index] = value
        with self._lock:
            self._spare.append(index)


class Word:
    """The condition of one wait: the word at `device_address` is `value`."""

    def __init__(self, words: Words, index: int, value: int, device_address: int) -> None:
        self._words = words
        self._index = index
        self._lock = threading.Lock()
        self._released = False
        self.value = value
        self.device_address = device_address

    def release(self) -> None:
        """Release the stream. Idempotent, from any thread."""
        with self._lock:
            if self._released:
                return
            self._released = True
        self._words.release(self._index, self.value)
