"""Owns how many bytes of values the folder holds, and who may add some. Pure but for its locks; thread-safe.

The bytes are kept by fan-out folder. A folder that was not counted yet changes by nothing: counting it will see. Who
changes or counts files holds the folder's lock meanwhile, so the sums are exact as long as nobody else uses the folder.
"""

from __future__ import annotations

import threading


class Ledger:
    """`capacity` is the most that `used` and what is being written may be together."""

    def __init__(self, capacity: int, folders: int) -> None:
        self.capacity = capacity
        self.locks = [threading.Lock() for _ in range(folders)]
        self._by_folder: list[int | None] = [None] * folders
        self._used = 0
        self._reserved = 0
        self._lock = threading.Lock()

    @property
    def used(self) -> int:
        """Bytes of values, as far as they are counted."""
        return self._used

    def reserve(self, nbytes: int, replaced: int) -> bool:
        """Room for a value of `nbytes` that is about to be written over one of `replaced`; False if there is none.
        True asks for a `release`."""
        with self._lock:
            if self._used + self._reserved + nbytes - replaced > self.capacity:
                return False
            self._reserved += nbytes
            return True

    def release(self, nbytes: int) -> None:
        with self._lock:
            self._reserved -= nbytes

    def replace(self, folder: int, nbytes: int, replaced: int) -> bool:
        """Books a value whose room is reserved; False if what it replaces is smaller than was thought, and others have
        taken the room."""
        with self._lock:
            if self._used + self._reserved - replaced > self.capacity:
                return False
            self._change(folder, nbytes - replaced)
            return True

    def change(self, folder: int, difference: int) -> None:
        """Books bytes that have come or, below 0, gone."""
        with self._lock:
            self._change(folder, difference)

    def recount(self, folder: int, nbytes: int) -> None:
        """Books that `folder` holds `nbytes`, whatever was thought before."""
        with self._lock:
            self._used += nbytes - (self._by_folder[folder] or 0)
            self._by_folder[folder] = nbytes

    def _change(self, folder: int, difference: int) -> None:
        held = self._by_folder[folder]
        if held is not None:
            difference = max(difference, -held)  # others may have removed and added files
            self._by_folder[folder] = held + difference
            self._used += difference
