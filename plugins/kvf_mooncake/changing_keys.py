"""The keys that this process is changing, each by one call at a time.

Mooncake gives the place of a value that is deleted, or written twice at once, to another one while bytes are still on
their way to it.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from kvframework.api.keys import PackedKey


class ChangingKeys:
    """Thread-safe. A call waits for those that change one of its keys, for as long as they take."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._keys: set[PackedKey] = set()

    @contextmanager
    def alone(self, keys: Sequence[PackedKey]) -> Iterator[None]:
        """Have these keys for one call."""
        wanted = set(keys)
        with self._changed:
            self._changed.wait_for(lambda: not wanted & self._keys)
            self._keys |= wanted
        try:
            yield
        finally:
            with self._changed:
                self._keys -= wanted
                self._changed.notify_all()
