"""All L2 tiers in their order, with their writers, loads and threads."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from kvframework.api.keys import PackedKey
from kvframework.api.layout import MemoryLayoutDesc
from kvframework.api.requests import Select
from kvframework.bounded_calls import call_within
from kvframework.config.schema import L2Keys
from kvframework.errors import TierError
from kvframework.record_ring import NO_RECORDS, RecordRing
from kvframework.storage.l1.entries import NO_CLIENT
from kvframework.storage.l1.leases import NO_PROMPT, PromptPart
from kvframework.storage.l2.loading import Loader, LoadTask, Located
from kvframework.storage.l2.prefetch import Prefetcher, TierLoads
from kvframework.storage.l2.sealed_tier import L1, L2Store, Watermarks
from kvframework.storage.l2.writer import AttachedTier, TierWriter
from kvframework.storage.namespaces import NamespaceRecords

log = logging.getLogger(__name__)

# It blocks as long as the tier does, and runs to completion.
Work = Callable[[], object]
# A source of work for threads. Its `changed` is notified whenever there may be work, and when `closing` turns True.
Controller = TierWriter | TierLoads


def _drive(controller: Controller) -> None:
    while (work := _next(controller)) is not None:
        try:
            work()
        except Exception:
            log.exception("%s failed", controller.name)
        # Release the objects that it refers to while the thread waits.
        del work


def _next(controller: Controller) -> Work | None:
    """Wait for the controller's next unit of work; None once it is closing and has no more."""
    with controller.changed:
        while True:
            work = controller.poll()
            if work is not None or controller.closing:
                return work
            wait_s = controller.wait_s()
            controller.changed.wait(None if wait_s == math.inf else wait_s)


class Tiers:
    """The tiers, whose stores it closes. Events come from the serving thread and the storage threads; of the methods
    only `clear`, `learn`, `drain`, `join` and `close` block."""

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
                store.on_seen = partial(ring.accessed, tier)
        self.writers = [TierWriter(l1, tier, records, clock) for tier in attached]
        at_once = {tier.store: tier.loads for tier in attached}
        self._prefetcher = Prefetcher(Loader(l1, at_once, records, self.loaded, clock))
        self.writers_ended = self._prefetcher.writers_ended
        writing = [(writer, tier.writes) for writer, tier in zip(self.writers, attached, strict=True)]
        loading = [(queue, queue.at_once + 1) for queue in self._prefetcher.queues]
        # Each with the number of its threads.
        self.controllers: list[tuple[Controller, int]] = [*writing, *loading]
        self._threads: list[threading.Thread] = []
        self._watching_uses = [writer for writer in self.writers if writer.watches_uses]
        # Whether `used` has an effect.
        self.watches_uses = bool(self._watching_uses)
        self._watching_l1 = [writer for writer in self.writers if writer.watches_removals]

    def start(self) -> None:
        """Start the threads; each ends when its controller is closing and has no more work."""
        self._threads = [
            threading.Thread(target=_drive, args=(controller,), name=f"kvf-{controller.name}-{number}", daemon=True)
            for controller, count in self.controllers
            for number in range(count)
        ]
        for thread in self._threads:
            thread.start()

    def configure(self, tables: Sequence[L2Keys]) -> None:
        """Change what each tier's keys say and its objects allow, see `kvframework.running_config`."""
        for writer, keys in zip(self.writers, tables, strict=True):
            writer.configure(queue=keys.write_queue, promote=keys.promote)
            writer.store.timeout_s = keys.timeout_s
            writer.store.watermarks = Watermarks(keys.high_watermark, keys.low_watermark)

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

    def load_s(self) -> float | None:
        """Return the seconds in which the fastest tier loads a byte, as far as any is known."""
        known = [prices[0] for prices in (store.speed.price.prices for store in self.stores) if prices is not None]
        return min(known, default=None)

    def submit_prefetch_task(
        self,
        keys: Sequence[PackedKey],
        layout_desc: MemoryLayoutDesc,
        *,
        select: Select | None = None,
        on_done: Callable[[], None] = lambda: None,
        on_change: Callable[[], object] = lambda: None,
        located: Located | None = None,
        prompt: PromptPart = NO_PROMPT,
        client: int = NO_CLIENT,
        ahead: bool = False,
    ) -> LoadTask | None:
        """Load the objects of `keys` that L1 lacks from L2, in the background, keeping their order.

        Object sizes follow from `layout_desc` by each key's layer group. `select` picks, once the tiers have reported
        what they hold, the indices worth having (default: all). An object that no tier returns after all ends the load:
        batches that follow are not begun. `on_done` runs once in a storage thread while the chosen objects that were
        found are still pinned, even after a failure or a cancel; `on_change`, `located`, `prompt`, `client`, `ahead`:
        see `LoadTask`. Returns None if there is no tier, too much is in flight, or the tiers are closed."""
        by_group = {index.to_bytes(4, "little"): group.nbytes for index, group in enumerate(layout_desc.groups)}
        sizes = [by_group[key[36:40]] for key in keys]
        select = select or (lambda available: range(len(available)))
        task = LoadTask(keys, sizes, select, on_change, located, prompt, client, ahead)
        return task if self._prefetcher.submit(task, on_done) else None

    def submit_record_task(self, namespace: bytes, on_done: Callable[[], None]) -> bool:
        return self._prefetcher.submit_record(namespace, on_done)

    @property
    def at_rest(self) -> bool:
        return not (self._prefetcher.in_flight or any(writer.pending for writer in self.writers))

    @property
    def longest_call_s(self) -> float:
        return max((store.timeout_s for store in self.stores), default=0.0)

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
        """Clear every tier: (values deleted, their bytes). Blocking; raises `TierError` in the end if one failed."""
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
                hint="L1 and the other tiers are cleared; clear again when this tier works",
            )
        return values, nbytes

    def learn(self, records: NamespaceRecords) -> None:
        """Add the records of the namespaces in tiers that can list their values. Blocking; raises `TierError`."""
        for store in self.stores:
            for namespace in store.listed_namespaces():
                record = store.record(namespace) if records.get(namespace) is None else None
                if record is not None:
                    records.add(namespace, record, learned=True)

    def status(self) -> dict[str, object]:
        return {
            "l2": [
                {**tier.store.status(), **writer.status(), "loads": tier.loads, "writes": tier.writes}
                for tier, writer in zip(self.attached, self.writers, strict=True)
            ],
            "prefetch": {"in_flight": self._prefetcher.in_flight, "refused": self._prefetcher.refused},
        }

    def drain(self, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        for writer in self.writers:
            if not writer.drain(max(deadline - time.monotonic(), 0.0)):
                log.warning("%d objects were not written to %s", writer.pending, writer.store.name)

    def stop(self) -> None:
        """Stop writing and loading after the calls in flight. Does not wait."""
        for writer in self.writers:
            writer.stop()
        self._prefetcher.stop()

    def join(self, timeout_s: float) -> bool:
        """Wait for the threads to end; return False if one is still running after `timeout_s`."""
        deadline = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(deadline - time.monotonic(), 0.0))
        return not any(thread.is_alive() for thread in self._threads)

    def close(self, timeout_s: float) -> None:
        """Close the tiers, which ends their calls in flight; wait for that up to `timeout_s`."""
        late = call_within(timeout_s, {f"tier {n}, {store.name}": store.close for n, store in enumerate(self.stores)})
        if late:
            log.error("the server ends before it could close %s", " and ".join(late))
