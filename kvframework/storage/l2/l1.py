"""What write-back and loads need of L1. The storage manager is one; it stands above this room."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from kvframework.api import PackedKey
from kvframework.storage.l1.leases import PinLease
from kvframework.storage.l2.store import L2Store


class L1(Protocol):
    """All thread-safe; pins and reservations are the server's own and end with what made them."""

    def which_present(self, keys: Sequence[PackedKey]) -> list[bool]: ...

    def any_writing(self, keys: Sequence[PackedKey]) -> bool: ...

    def pin_present(self, keys: Sequence[PackedKey]) -> list[PinLease]: ...

    def unpin_internal(self, leases: Sequence[PinLease]) -> None: ...

    def bytes_of(self, lease: PinLease) -> memoryview: ...

    def reserve_load(self, key: PackedKey, nbytes: int) -> tuple[str, memoryview] | None: ...

    def finish_load(self, lease_id: str, good: bool) -> PinLease | None: ...

    def loaded(self, keys: Sequence[PackedKey], source: L2Store) -> None: ...
