"""What a server keeps: `table`, L1, and `tiers`, L2; and what spans both."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import NamedTuple

from kvframework.api.eviction import EvictionPolicy
from kvframework.api.keys import PackedKey
from kvframework.api.memory import Memory
from kvframework.api.tier import Loan, Node, NodeIdentity
from kvframework.config import L2Keys
from kvframework.errors import TierError
from kvframework.record_ring import NO_RECORDS, RecordRing
from kvframework.storage.envelope import HEADER_BYTES, seal
from kvframework.storage.l1.eviction import Tenant
from kvframework.storage.l1.leases import PinLease
from kvframework.storage.l2.sealed_tier import Shares
from kvframework.storage.l2.tiers import Tiers
from kvframework.storage.l2.writer import AttachedTier
from kvframework.storage.namespaces import NamespaceRecords, is_record_key
from kvframework.storage.recovery import NOT_RECOVERED, Recovery
from kvframework.storage.table import AT_ONCE, Table

log = logging.getLogger(__name__)


# Time beyond its timeout that a call to a tier may take before `close` stops waiting for it.
CLOSE_GRACE_S = 1.0


class ClearedObjects(NamedTuple):
    """What `clear` dropped, and the objects that stay because they are in use; see `kvframework.wire.messages.Cleared`
    for the fields."""

    objects: int
    in_use: int
    nbytes: int
    l2_objects: int
    l2_bytes: int
    unlisted: tuple[str, ...]


class StorageManager:
    """`memory` and the tiers are owned from here on and closed by `close`; `records` are shared with the stores. The
    other arguments are those of `Table`. Without `threads` nothing happens in the background: a simulation drives
    `tiers.controllers` itself."""

    def __init__(
        self,
        memory: Memory,
        policy: EvictionPolicy,
        tiers: Sequence[AttachedTier] = (),
        *,
        records: NamespaceRecords | None = None,
        high_watermark: float = 1.0,
        low_watermark: float = 0.9,
        ghosts: int = 0,
        tenants: Sequence[Tenant] = (),
        recovery: Recovery = NOT_RECOVERED,
        ring: RecordRing = NO_RECORDS,
        clock: Callable[[], float] = time.monotonic,
        threads: bool = True,
    ) -> None:
        # One without records is false.
        self.records = NamespaceRecords() if records is None else records
        self.clock = clock
        self.table = Table(
            memory,
            policy,
            self.records,
            high_watermark=high_watermark,
            low_watermark=low_watermark,
            ghosts=ghosts,
            tenants=tenants,
            recovery=recovery,
            ring=ring,
            clock=clock,
        )
        self.tiers = self.table.tiers = Tiers(self.table, tiers, self.records, clock, ring)
        for tier in tiers:
            if len(tier.shares[0]) == len(self.table.tenants.names):
                tier.store.shares = Shares(self.table.tenants.of, *tier.shares)
        if threads:
            self.tiers.start()
            self.table.verification.start()

    def configure(self, *, high_watermark: float, low_watermark: float, tiers: Sequence[L2Keys]) -> None:
        """Change the watermarks, and the settings of each tier that its objects allow to change."""
        self.table.configure(high_watermark=high_watermark, low_watermark=low_watermark)
        self.tiers.configure(tiers)

    def clear(self, *, l2: bool = False, model: str = "") -> ClearedObjects:
        """Drop the objects, of one model or all, present at the call that are unused at their turn.

        Objects stored meanwhile stay, even under the name of a dropped one. Blocks, but not other callers: takes the
        lock for some hundred objects at a time. With `l2` also deletes, in every tier, the dropped objects and all that
        the tier lists; raises `TierError`, after all were asked, if one failed. Raises `RequestError` for a model that
        is not known.
        """
        if model and l2:
            try:
                self.tiers.learn(self.records)
            except TierError as error:
                hint = (
                    "nothing is cleared, since a namespace of the model may be there alone: clear again when it works"
                )
                raise TierError(error.fact, where=error.where, hint=hint) from None
        of_model = self.records.of_model(model) if model else ()

        def wanted(key: PackedKey) -> bool:
            return (not model or key[:16] in of_model) and not is_record_key(key)

        dropped, in_use = self.table.drop_unused(wanted)
        values, value_bytes = self.tiers.clear(dropped, wanted) if l2 else (0, 0)
        unlisted = tuple(store.name for store in self.tiers.stores if l2 and not store.lists)
        return ClearedObjects(len(dropped), in_use, sum(dropped.values()), values, value_bytes, unlisted)

    def close(self, drain_s: float = 0.0, end_s: float | None = None, *, process_ends: bool = False) -> None:
        """Wait up to `drain_s` for pending writes to L2, then close the tiers, which ends the calls in flight, stop all
        threads and free the arena within `end_s` (None: the longest timeout of a tier). Idempotent; must not be called
        from a storage thread.

        A thread that is stuck in a tier, or an unfinished copy of a transport, keeps the arena mapped, since it may
        still write there. If the process ends right afterwards, the kernel frees memory that ends with it.
        """
        self.tiers.drain(drain_s)
        self.table.write_uses()
        self.tiers.stop()
        end_s = CLOSE_GRACE_S + self.tiers.longest_call_s if end_s is None else end_s
        deadline = time.monotonic() + end_s
        # A closing tier ends its calls in flight after that.
        self.tiers.close(end_s / 2)
        ended = self.table.verification.stop(deadline - time.monotonic())
        if self.tiers.join(deadline - time.monotonic()) and ended:
            self.table.close(deadline, process_ends=process_ends)
        else:
            log.error("a tier blocks a storage thread past its deadline; the arena stays mapped")

    @property
    def at_rest(self) -> bool:
        """Whether nothing is left to do in the background: no write to L2 waits, no load is under way, and L1 is not
        above its high watermark."""
        return not self.table.is_full and self.tiers.at_rest

    def status(self) -> dict[str, object]:
        return {"l1": self.table.status(), **self.tiers.status()}


# What tiers export of L1 to other nodes: objects, pinned and under an envelope that is sealed on demand, and records of
# namespaces. No tier is asked, so no read lease waits for another node.


class PeerExport(Node):
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
            return _RecordLease(key, record[1], layout)
        leases = self._storage.table.pin_present([key])
        return _ObjectLease(self._storage, leases[0], layout) if leases else None

    def models(self) -> Mapping[str, Collection[bytes]]:
        return self._storage.records.models()

    def watch(self, came: Callable[[Sequence[PackedKey]], None]) -> None:
        self._storage.table.watch(came)


class _RecordLease(Loan):
    def __init__(self, key: PackedKey, value: memoryview, layout: bytes) -> None:
        self.nbytes = HEADER_BYTES + value.nbytes
        self._key, self._value, self._layout = key, value, layout

    def parts(self) -> Sequence[memoryview]:
        return _sealed(self._key, self._value, self._layout)

    def close(self) -> None:
        return


class _ObjectLease(Loan):
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
            self._storage.table.release([lease])


def _sealed(key: PackedKey, value: memoryview, layout: bytes) -> Sequence[memoryview]:
    return memoryview(seal(key, [value], object_bytes=value.nbytes, layout=layout)), value
