"""The registration of the arena with the device: slice by slice, several at once, during the first copies.

In the copier process, in threads of its own.
"""

from __future__ import annotations

import logging
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from kvframework.api.driver import CopierDriver
from kvframework.errors import DeviceError

log = logging.getLogger(__name__)

# Drivers may block other calls of the process while one slice is pinned.
SLICE_BYTES = 4 << 30
THREADS = 4


class Pinning:
    """Registers all `size` bytes of the arena, from `start` on in the background."""

    def __init__(self, driver: CopierDriver[Any, Any], size: int, slice_bytes: int = 0) -> None:
        self._driver = driver
        self._slice = slice_bytes or SLICE_BYTES
        self._starts = list(range(0, size, self._slice))
        self._size = size
        self._done = [False] * len(self._starts)
        self._usable = 0
        self._lock = threading.Lock()
        self._error: DeviceError | None = None

    def start(self) -> None:
        threading.Thread(target=self._run, name="kvf-pin", daemon=True).start()

    def usable(self) -> int:
        """The number of bytes that are registered, from the arena's beginning."""
        return self._usable

    def check(self) -> None:
        """Raise the error at which pinning failed, if any."""
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        with ThreadPoolExecutor(THREADS) as threads:
            for _ in threads.map(self._pin, range(len(self._starts))):
                pass

    def _pin(self, index: int) -> None:
        start = self._starts[index]
        try:
            self._driver.pin(start, min(self._slice, self._size - start))
        except DeviceError as error:
            self._error = error
            return
        except Exception as error:
            # Otherwise copies would wait for it for ever.
            log.exception("pinning the arena failed")
            self._error = DeviceError(f"the arena could not be pinned: {type(error).__name__}: {error}")
            return
        with self._lock:
            self._done[index] = True
            first_missing = self._done.index(False) if False in self._done else len(self._done)
            self._usable = max(self._usable, min(first_missing * self._slice, self._size))
