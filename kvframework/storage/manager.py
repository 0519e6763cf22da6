"""What a server keeps: `table`, L1, and `tiers`, L2; and what spans both."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Collection, Mapping, Sequence

from msgspec.structs import replace

from kvframework.api.keys import PackedKey
from kvframework.api.tier import Loan, Node, NodeIdentity
from kvframework.errors import TierError
from kvframework.storage.l2.sealed_tier import L2Store, Shares
from kvframework.storage.l2.tiers import Tiers
from kvframework.storage.l2.writer import AttachedTier
from kvframework.storage.namespaces import HEADER_BYTES, is_record_key, seal
from kvframework.storage.table import AT_ONCE, Table
from kvframework.wire.messages import Cleared, PlaceForgotten

log = logging.getLogger(__name__)


# Time beyond its timeout that a call to a tier may take before `close` stops waiting for it.
CLOSE_GRACE_S = 1.0
# How often `forget` looks at L1 and the tiers, since a load may bring an object back; and how soon again at pins.
FORGET_ROUNDS = 3
FORGET_AGAIN_S = 0.05


class StorageManager:
    """`table` and the tiers are owned from here on and closed by `close`. Without `threads` nothing happens in the
    background: a simulation drives `tiers.controllers` itself."""

    def __init__(self, table: Table, tiers: Sequence[AttachedTier] = (), *, threads: bool = True) -> None:
        self.table, self.records, self.clock = table, table.records, table.clock
        self.tiers = table.tiers = Tiers(table, tiers, self.records, self.clock, table.ring)
        for tier in tiers:
            if len(tier.shares[0]) == len(table.tenants.names):
                tier.store.shares = Shares(table.tenants.of, *tier.shares)
        watching = [writer for writer in self.tiers.writers if writer.watches_removals]
        if watching and len(table):  # of an earlier server, and sent to no tier
            sent = {key for key, _ in table.verification.known}
            for writer in watching:
                writer.committed([stored.key for stored in table.objects() if stored.key not in sent])
        if threads:
            self.tiers.start()
            self.table.verification.start()

    def clear(self, *, l2: bool = False, model: str = "") -> Cleared:
        """Drop the objects, of one model or all, present at the call that are unused at their turn. Objects stored
        meanwhile stay, even under the name of a dropped one. Blocks, but not other callers: takes the lock for some
        hundred objects at a time. With `l2` deletes these, and all that a tier lists, in every tier; raises
        `TierError`, after all were asked, if one failed. Raises `RequestError` for an unknown model."""
        if model and l2:
            try:
                self.tiers.learn(self.records)
            except TierError as error:
                hint = "nothing is cleared: the tier may have objects of the model; clear again when the tier works"
                raise TierError(error.fact, where=error.where, hint=hint) from None
        of_model = self.records.of_model(model) if model else ()

        def wanted(key: PackedKey) -> bool:
            return (not model or key[:16] in of_model) and not is_record_key(key)

        dropped, in_use = self.table.clear(wanted)
        values, value_bytes = self.tiers.clear(dropped, wanted) if l2 else (0, 0)
        unlisted = tuple(store.name for store in self.tiers.stores if l2 and not store.lists)
        return Cleared(len(dropped), in_use, sum(dropped.values()), values, value_bytes, unlisted)

    def forget(self, wanted: Callable[[PackedKey], bool], wait_s: float) -> tuple[list[PlaceForgotten], int, int]:
        """Delete the wanted objects in L1 and in every tier, and overwrite what L1 has free: (a receipt by place, bytes
        overwritten, bytes that stay, because they are reserved). Waits up to `wait_s` for the ends of uses. Raises
        nothing for a tier that fails: its receipt says so. Blocks, but not other callers.

        An object is pinned while it is written to a tier, so none that L1 lacks is on its way there. A load from a tier
        may bring an object back as long as the tier has it, so L1 is looked at again behind the tiers."""
        until = self.clock() + wait_s
        dropped: dict[PackedKey, int] = {}
        tiers = [PlaceForgotten(store.name) for store in self.tiers.stores]
        for _ in range(FORGET_ROUNDS):
            while True:
                found, _ = self.table.clear(wanted)
                dropped |= found
                here, writing = self.table.held(wanted)
                if not here + writing or self.clock() >= until:
                    break
                time.sleep(FORGET_AGAIN_S)
            tiers = [_forget(*each, dropped, wanted) for each in zip(self.tiers.stores, tiers, strict=True)]
            here, writing = self.table.held(wanted)
            if not here + writing or self.clock() >= until:
                break
        erased, reserved = self.table.erase()
        why = f"{here} are in use and {writing} are being written" if here + writing else ""
        l1 = PlaceForgotten("L1", len(dropped), sum(dropped.values()), here + writing, why)
        return [l1, *tiers], erased, reserved

    def close(self, drain_s: float = 0.0, end_s: float | None = None, *, process_ends: bool = False) -> None:
        """Wait up to `drain_s` for writes to L2, then close the tiers, which ends calls in flight, stop all threads and
        free the arena within `end_s` (None: the longest timeout of a tier). Idempotent; not for storage threads. A
        thread that is stuck in a tier, or an unfinished copy of a transport, keeps the arena mapped, since it may still
        write there. If the process ends right afterwards, the kernel frees memory that ends with it."""
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
            log.error("the arena stays mapped, because a call of a tier still runs after its deadline")

    @property
    def at_rest(self) -> bool:
        return not self.table.is_full and self.tiers.at_rest

    def status(self) -> dict[str, object]:
        return {"l1": self.table.status(), **self.tiers.status()}


def _forget(
    store: L2Store, before: PlaceForgotten, dropped: Mapping[PackedKey, int], wanted: Callable[[PackedKey], bool]
) -> PlaceForgotten:
    """Delete the wanted values of a tier, and count what is left of them; `before` is what an earlier round did."""
    if store.read_only:
        return replace(before, left=-1, why="the tier's values belong to other nodes, which delete these values")
    try:
        objects, nbytes = store.clear(dropped, wanted)
        left = store.remaining(dropped, wanted)
    except TierError as error:
        return replace(before, left=-1, why=error.fact)
    why = "the tier did not delete the values" if left else ""
    if not store.lists and not left:
        left, why = -1, "the tier cannot list its values: those that L1 did not hold stay until they expire"
    return PlaceForgotten(store.name, before.objects + objects, before.nbytes + nbytes, left, why)


# Export of L1 to other nodes by tiers: objects, pinned and under an envelope that is sealed on demand, and records of
# namespaces. No tier is asked, so no read lease waits for another node.


class PeerExport(Node):
    """Lends of one storage, which outlives it. See `Node`."""

    def __init__(self, storage: StorageManager, identity: NodeIdentity) -> None:
        self.identity = identity
        self.arena_fd, self.arena_bytes = storage.table.arena_fd, storage.table.capacity
        self._table, self._records = storage.table, storage.records

    def holds(self, keys: Sequence[PackedKey]) -> Sequence[bool]:
        held: list[bool] = []
        for first in range(0, len(keys), AT_ONCE):
            held += self._table.which_present(keys[first : first + AT_ONCE])
        return [
            here or (is_record_key(key) and self._records.get(key[:16]) is not None)
            for key, here in zip(keys, held, strict=True)
        ]

    def lend(self, key: PackedKey) -> Loan | None:
        layout = self._records.layout_of(key[:16])
        record = self._records.encoded(key[:16]) if is_record_key(key) else None
        if record is not None:
            return _Lease(key, record[1], layout, contextlib.ExitStack())
        pins = self._table.pin_present([key])
        if not pins:
            return None
        release = contextlib.ExitStack()
        release.callback(self._table.release, pins)
        value = release.enter_context(self._table.bytes_of(pins[0]).toreadonly())
        return _Lease(key, value, layout, release)

    def models(self) -> Mapping[str, Collection[bytes]]:
        return self._records.models()


class _Lease(Loan):
    def __init__(self, key: PackedKey, value: memoryview, layout: bytes, release: contextlib.ExitStack) -> None:
        self.nbytes = HEADER_BYTES + value.nbytes
        self._key, self._value, self._layout = key, value, layout
        self._release = release

    def parts(self) -> Sequence[memoryview]:
        value = self._value
        return memoryview(seal(self._key, [value], object_bytes=value.nbytes, layout=self._layout)), value

    def close(self) -> None:
        self._release.close()
