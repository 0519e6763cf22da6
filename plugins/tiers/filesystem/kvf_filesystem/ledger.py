"""The bytes of values in the folder, and reservations for new ones. Pure but for its locks; thread-safe.

The bytes are kept by fan-out folder. Changes to a folder that is not counted yet are passed over: the count will
include them. A thread that changes or counts files holds the folder's lock meanwhile, so the sums are exact as long as
no other server uses the folder.
"""

from __future__ import annotations

import threading


class Ledger:
    """Bytes used and reserved. `capacity` bounds the sum of `used` and the values being written."""

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
        """Reserves room for a value of `nbytes` that is about to replace one of `replaced`; False if there is none.
        After True the caller calls `release`."""
        with self._lock:
            if self._used + self._reserved + nbytes - replaced > self.capacity:
                return False
            self._reserved += nbytes
            return True

    def release(self, nbytes: int) -> None:
        with self._lock:
            self._reserved -= nbytes

    def replace(self, folder: int, nbytes: int, replaced: int) -> bool:
        """Books a value whose room is reserved; False if the value that it replaces turns out smaller, and others have
        taken the room."""
        with self._lock:
            if self._used + self._reserved - replaced > self.capacity:
                return False
            self._change(folder, nbytes - replaced)
            return True

    def change(self, folder: int, difference: int) -> None:
        """Books added or, below 0, removed bytes."""
        with self._lock:
            self._change(folder, difference)

    def recount(self, folder: int, nbytes: int) -> None:
        """Books that `folder` holds `nbytes`, replacing the earlier count."""
        with self._lock:
            self._used += nbytes - (self._by_folder[folder] or 0)
            self._by_folder[folder] = nbytes

    def _change(self, folder: int, difference: int) -> None:
        held = self._by_folder[folder]
        if held is not None:
            difference = max(difference, -held)  # other servers may have removed and added files
            self._by_folder[folder] = held + difference
            self._used += difference
