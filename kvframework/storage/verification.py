"""The check of what L1 has from an earlier server: its bytes against the checksums that a tier was given, in a thread
of its own, at half speed. What is damaged is dropped; what no checksum is known of is not read."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from kvframework.api.keys import PackedKey
from kvframework.storage.envelope import UNTOLD_LAYOUT, object_checksum
from kvframework.storage.l1.leases import PinLease

log = logging.getLogger(__name__)

# Objects that are pinned at once.
AT_ONCE = 16
# Until a damaged object that a reader has pinned is tried again.
AGAIN_S = 0.1


class L1(Protocol):
    """What the check needs of L1; thread-safe."""

    def pin_present(self, keys: Sequence[PackedKey]) -> list[PinLease]: ...

    def unpin_internal(self, leases: Sequence[PinLease]) -> None: ...

    def bytes_of(self, lease: PinLease) -> memoryview: ...

    def drop_damaged(self, key: PackedKey) -> bool: ...


class Verification:
    """`known` has the keys and checksums; `layout_of` returns the fingerprint of a namespace's layout. The thread ends
    by itself, or with `stop`."""

    def __init__(self, l1: L1, known: Sequence[tuple[PackedKey, int]], layout_of: Callable[[bytes], bytes]) -> None:
        self._l1 = l1
        self._known = known
        self._layout_of = layout_of
        self._stop = threading.Event()
        self.verified = self.damaged = 0
        self._thread = threading.Thread(target=self._run, name="kvf-verification", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self, timeout_s: float) -> bool:
        """End the check after the object that is read; return False if it has not ended by then."""
        self._stop.set()
        if self._thread.ident is not None:
            self._thread.join(max(timeout_s, 0.0))
        return not self._thread.is_alive()

    def _run(self) -> None:
        for first in range(0, len(self._known), AT_ONCE):
            began = time.monotonic()
            self._check(dict(self._known[first : first + AT_ONCE]))
            if self._stop.wait(time.monotonic() - began):
                return
        if self._known:
            log.info("%d recovered objects are verified, %d were damaged", self.verified, self.damaged)

    def _check(self, checksums: dict[PackedKey, int]) -> None:
        leases = self._l1.pin_present(list(checksums))
        damaged = []
        try:
            for lease in leases:
                key = lease.objects[0].key
                with self._l1.bytes_of(lease) as place:
                    # The layout may have been unknown when the checksum was made.
                    layouts = dict.fromkeys((self._layout_of(key[:16]), UNTOLD_LAYOUT))
                    whole = any(object_checksum(key, place, layout) == checksums[key] for layout in layouts)
                if whole:
                    self.verified += 1
                else:
                    damaged.append(key)
        finally:
            self._l1.unpin_internal(leases)
        for key in damaged:
            self.damaged += 1
            log.error("a recovered object is damaged, and dropped (key %s)", key.hex())
            while not self._l1.drop_damaged(key) and not self._stop.wait(AGAIN_S):
                pass
