"""The operations of L1 that writers and loads use. The storage manager provides them; it stands above this room."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from kvframework.api.keys import PackedKey
from kvframework.storage.l1.leases import PinLease, PromptPart
from kvframework.storage.l2.sealed_tier import L2Store


class L1(Protocol):
    """All methods are thread-safe; pins and reservations belong to the server itself and end with the writer or
    load."""

    def which_present(self, keys: Sequence[PackedKey]) -> list[bool]: ...

    def any_writing(self, keys: Sequence[PackedKey]) -> bool: ...

    def pin_present(self, keys: Sequence[PackedKey]) -> list[PinLease]: ...

    def unpin_internal(self, leases: Sequence[PinLease]) -> None: ...

    def bytes_of(self, lease: PinLease) -> memoryview: ...

    def reserve_load(
        self, key: PackedKey, nbytes: int, prompt: PromptPart, client: int
    ) -> tuple[str, memoryview] | None: ...

    def finish_load(self, lease_id: str, good: bool) -> PinLease | None: ...

    def sealed(self, checksums: Mapping[PackedKey, int]) -> None: ...

    def damaged(self, key: PackedKey) -> None: ...

    def loaded(self, keys: Sequence[PackedKey], source: L2Store) -> None: ...
