"""Owns the registration of the arena with the device: slice by slice, several at once, beside the first copies.

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

# Drivers may hold up other calls of the process while one slice is pinned.
SLICE_BYTES = 4 << 30
THREADS = 4


class Pinning:
    """Registers all `size` bytes of the arena, from `start` on in the background."""

    def __init__(self, driver: CopierDriver[Any, Any], size: int) -> None:
        self._driver = driver
        self._starts = list(range(0, size, SLICE_BYTES))
        self._size = size
        self._done = [False] * len(self._starts)
        self._usable = 0
        self._lock = threading.Lock()
        self._error: DeviceError | None = None

    def start(self) -> None:
        threading.Thread(target=self._run, name="kvf-pin", daemon=True).start()

    def usable(self) -> int:
        """Up to which byte the arena is registered, from its beginning."""
        return self._usable

    def check(self) -> None:
        """Raises what went wrong."""
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        with ThreadPoolExecutor(THREADS) as threads:
            for _ in threads.map(self._pin, range(len(self._starts))):
                pass

    def _pin(self, index: int) -> None:
        start = self._starts[index]
        try:
            self._driver.pin(start, min(SLICE_BYTES, self._size - start))
        except DeviceError as error:
            self._error = error
            return
        except Exception as error:
            # Else copies would wait for it for ever.
            log.exception("pinning the arena failed")
            self._error = DeviceError(f"the arena could not be pinned: {type(error).__name__}: {error}")
            return
        with self._lock:
            self._done[index] = True
            first_missing = self._done.index(False) if False in self._done else len(self._done)
            self._usable = max(self._usable, min(first_missing * SLICE_BYTES, self._size))
