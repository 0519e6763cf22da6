"""All L2 tiers in their order: reports events of L1 to each tier's writer, and gives prefetch the stores.

Events come from the serving thread and the storage threads; of the methods only `clear`, `learn` and `drain` block.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from kvframework.api.keys import PackedKey
from kvframework.api.listener import Accessed
from kvframework.bounded_close import call_within
from kvframework.config import L2Keys
from kvframework.errors import TierError
from kvframework.record_ring import NO_RECORDS, RecordRing
from kvframework.storage.l2.full_tier import Watermarks
from kvframework.storage.l2.sealed_tier import L1, L2Store
from kvframework.storage.l2.steps import run
from kvframework.storage.l2.writer import TierWriter, WriteNothing, WritePolicy, WriteThrough
from kvframework.storage.namespaces import RECORD_BYTES, NamespaceRecords, decode_record, record_key

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class AttachedTier:
    """One `[[l2]]`: a store and its write and read settings. `promote` means that it also receives values found in a
    later tier. `loads` and `writes` bound the batches that are loaded and written at once; `shares` are the least and
    the most of its capacity that each tenant has, see `Shares`."""

    store: L2Store
    policy: WritePolicy = field(default_factory=WriteThrough)
    write_queue: int = 1024
    promote: bool = True
    loads: int = 2
    writes: int = 1
    shares: tuple[Sequence[float], Sequence[float]] = ((0.0,), (1.0,))


class Tiers:
    """The tiers; see the module. Closes the stores."""

    def __init__(
        self,
        l1: L1,
        attached: Sequence[AttachedTier],
        records: NamespaceRecords,
        clock: Callable[[], float] = time.monotonic,
        ring: RecordRing = NO_RECORDS,
    ) -> None:
        self.attached = tuple(attached)
        self.stores = tuple(tier.store for tier in attached)
        for store in self.stores:
            store.on_damaged = l1.damaged
            store.on_sealed = l1.sealed
        for tier, store in enumerate(self.stores, 1) if ring.wanted else ():
            if not store.read_only:  # others announce what is theirs
                store.on_seen = partial(_accessed, ring, tier)
        self.writers = [
            TierWriter(
                l1,
                tier.store,
                records,
                policy=WriteNothing() if tier.store.read_only else tier.policy,
                queue=tier.write_queue,
                promote=tier.promote,
                writers=tier.writes,
                clock=clock,
            )
            for tier in attached
        ]
        self._watching_uses = [writer for writer in self.writers if writer.watches_uses]
        self._watching_l1 = [writer for writer in self.writers if writer.watches_removals]

    def configure(self, tables: Sequence[L2Keys]) -> None:
        """Change what each tier's keys say and its objects allow, see `kvframework.running_config`."""
        for writer, keys in zip(self.writers, tables, strict=True):
            writer.configure(queue=keys.write_queue, promote=keys.promote)
            writer.store.configure(
                timeout_s=keys.timeout_s, watermarks=Watermarks(keys.high_watermark, keys.low_watermark)
            )

    @property
    def watches_uses(self) -> bool:
        """Whether `used` has an effect."""
        return bool(self._watching_uses)

    def lacked(self, key: PackedKey) -> bool:
        """Return whether every tier answered a moment ago that it lacks the object, see `Absences`. Calls no tier."""
        return all(store.lacked([key])[0] for store in self.stores)

    def trouble(self, since: float) -> str:
        """Return which tier has failed to answer a read since then, and how; "" for none."""
        for store in self.stores:
            at, what = store.read_trouble
            if at >= since:
                return f"{store.name}: {what}"
        return ""

    def committed(self, keys: Sequence[PackedKey]) -> None:
        for writer in self.writers:
            writer.committed(keys)

    def used(self, keys: Sequence[PackedKey]) -> None:
        for writer in self._watching_uses:
            writer.used(keys)

    def loaded(self, keys: Sequence[PackedKey], source: L2Store) -> None:
        """Report objects loaded from `source`: a use there, and a promotion to the tiers before it."""
        for writer in self.writers:
            if writer.store is source:
                writer.used(keys)
                return
            writer.promoted(keys)

    def leaving(self, keys: Sequence[PackedKey]) -> set[PackedKey]:
        """Return those of `keys` that L1 must keep until they are written."""
        return {key for writer in self._watching_l1 for key in writer.leaving(keys)}

    def removed(self, key: PackedKey) -> None:
        for writer in self._watching_l1:
            writer.removed(key)

    def clear(self, dropped: Mapping[PackedKey, int], wanted: Callable[[PackedKey], bool]) -> tuple[int, int]:
        """Clear every tier, see `L2Store.clear`: (values deleted, their bytes). Blocking; raises `TierError`, after all
        were asked, if one failed."""
        failures: list[TierError] = []
        values = nbytes = 0
        for store in self.stores:
            try:
                found = store.clear(dropped, wanted)
            except TierError as error:
                failures.append(error)
            else:
                values, nbytes = values + found[0], nbytes + found[1]
        if failures:
            raise TierError(
                "; ".join(f"{error.where}: {error.fact}" for error in failures),
                hint="L1 and the other tiers are cleared: clear again when this one works",
            )
        return values, nbytes

    def learn(self, records: NamespaceRecords) -> None:
        """Add the records of the namespaces that are in tiers which can list their values. Blocking; raises
        `TierError`."""
        for store in self.stores:
            for namespace in store.listed_namespaces():
                if records.get(namespace) is None:
                    value = bytearray(RECORD_BYTES)
                    (there,) = run(store.get_steps([record_key(namespace)], [memoryview(value)]))
                    record = decode_record(bytes(value)) if there else None
                    if record is not None:
                        records.add(namespace, record, learned=True)

    def status(self) -> list[dict[str, object]]:
        return [
            {**tier.store.status(), **writer.status(), "loads": tier.loads, "writes": tier.writes}
            for tier, writer in zip(self.attached, self.writers, strict=True)
        ]

    def drain(self, timeout_s: float) -> None:
        """Wait for pending writes, up to `timeout_s`."""
        deadline = time.monotonic() + timeout_s
        for writer in self.writers:
            if not writer.drain(max(deadline - time.monotonic(), 0.0)):
                log.warning("%d objects were not written to %s", writer.pending, writer.store.name)

    def stop(self) -> None:
        """Stop writing after the calls in flight. Does not wait."""
        for writer in self.writers:
            writer.stop()

    def close(self, timeout_s: float) -> None:
        """Close the tiers, which ends their calls in flight; wait for that up to `timeout_s`."""
        late = call_within(timeout_s, {f"tier {n}, {store.name}": store.close for n, store in enumerate(self.stores)})
        if late:
            log.error("closing %s takes too long", " and ".join(late))


def _accessed(ring: RecordRing, tier: int, keys: Sequence[PackedKey], found: Sequence[bool] | bool) -> None:
    ring.put(Accessed(tier, keys, found))
