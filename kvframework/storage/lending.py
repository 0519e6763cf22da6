"""The lender: a server's node as its tiers see it. It lends objects of L1, pinned, under an envelope that is sealed on
demand, and the records of namespaces. Never asks a tier, so no loan waits for another node."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

from kvframework.api.keys import PackedKey
from kvframework.api.node import Loan, Node, NodeIdentity
from kvframework.storage.envelope import HEADER_BYTES, seal
from kvframework.storage.l1.leases import PinLease
from kvframework.storage.manager import StorageManager
from kvframework.storage.namespaces import is_record_key
from kvframework.storage.table import AT_ONCE


class LendingNode(Node):
    """Lends of one storage, which outlives it. See `Node`."""

    def __init__(self, storage: StorageManager, identity: NodeIdentity) -> None:
        self.identity = identity
        self.arena_fd = storage.table.arena_fd
        self.arena_bytes = storage.table.capacity
        self._storage = storage

    def holds(self, keys: Sequence[PackedKey]) -> Sequence[bool]:
        held: list[bool] = []
        for first in range(0, len(keys), AT_ONCE):
            held += self._storage.table.which_present(keys[first : first + AT_ONCE])
        records = self._storage.records
        return [
            here or (is_record_key(key) and records.get(key[:16]) is not None)
            for key, here in zip(keys, held, strict=True)
        ]

    def lend(self, key: PackedKey) -> Loan | None:
        layout = self._storage.records.layout_of(key[:16])
        record = self._storage.records.encoded(key[:16]) if is_record_key(key) else None
        if record is not None:
            return _LentRecord(key, record[1], layout)
        leases = self._storage.table.pin_present([key])
        return _LentObject(self._storage, leases[0], layout) if leases else None

    def models(self) -> Mapping[str, Collection[bytes]]:
        return self._storage.records.models()

    def watch(self, came: Callable[[Sequence[PackedKey]], None]) -> None:
        self._storage.table.watch(came)


class _LentRecord(Loan):
    def __init__(self, key: PackedKey, value: memoryview, layout: bytes) -> None:
        self.nbytes = HEADER_BYTES + value.nbytes
        self._key, self._value, self._layout = key, value, layout

    def parts(self) -> Sequence[memoryview]:
        return _sealed(self._key, self._value, self._layout)

    def close(self) -> None:
        return


class _LentObject(Loan):
    def __init__(self, storage: StorageManager, lease: PinLease, layout: bytes) -> None:
        self._storage, self._layout = storage, layout
        self._key = lease.objects[0].key
        self._lease: PinLease | None = lease
        self._value = storage.table.bytes_of(lease).toreadonly()
        self.nbytes = HEADER_BYTES + self._value.nbytes

    def parts(self) -> Sequence[memoryview]:
        return _sealed(self._key, self._value, self._layout)

    def close(self) -> None:
        lease, self._lease = self._lease, None
        if lease is not None:
            self._value.release()
            self._storage.table.unpin_internal([lease])


def _sealed(key: PackedKey, value: memoryview, layout: bytes) -> Sequence[memoryview]:
    return memoryview(seal(key, [value], object_bytes=value.nbytes, layout=layout)), value
