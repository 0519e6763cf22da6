"""One server's storage over doubles, with the few steps that most tests take."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvframework.api.layout import GroupDesc, MemoryLayoutDesc
from kvframework.api.requests import PackedKey, Select
from kvframework.config.schema import WritePolicyName
from kvframework.storage.l1.entries import ALIGNMENT
from kvframework.storage.l1.eviction import Tenant
from kvframework.storage.l2.loading import LoadTask
from kvframework.storage.l2.sealed_tier import L2Store
from kvframework.storage.l2.tier_calls import Breaker
from kvframework.storage.l2.writer import AttachedTier
from kvframework.storage.manager import StorageManager
from kvframework.storage.namespaces import NamespaceRecords
from kvframework.storage.table import Table
from tests.core.storage.memory import OrderedLru, PlainMemory, content
from tests.core.storage.tier import MemoryTier
from tests.support.waiting import wait_until

SIZE = ALIGNMENT
MakeNode = Callable[..., "Node"]
DESC = MemoryLayoutDesc(16, (GroupDesc((1, 1, 16, SIZE // 16), "uint8"),))
OWNER = 1


class Node:
    """`tiers` [] means no L2. A tier's calls may take `timeout_s`; circuits heal within hundredths of a second."""

    def __init__(
        self,
        tiers: Sequence[MemoryTier] | None = None,
        *,
        units: int = 64,
        timeout_s: float = 5.0,
        write_queue: int = 256,
        high_watermark: float = 1.0,
        low_watermark: float = 0.9,
        write_policy: WritePolicyName = "write_through",
        promote: bool = True,
        loads: int = 2,
        writes: int = 1,
        ghosts: int = 64,
        tenants: Sequence[Tenant] = (),
        clock: Callable[[], float] | None = None,
    ) -> None:
        self.tiers = [MemoryTier()] if tiers is None else list(tiers)
        self.memory = PlainMemory(units * ALIGNMENT)
        self.policy = OrderedLru()
        records = NamespaceRecords()
        self.stores = [
            L2Store(
                tier,
                timeout_s=timeout_s,
                breaker=Breaker(threshold=3, backoff_s=0.01, max_backoff_s=0.05),
                layout_of=records.layout_of,
            )
            for tier in self.tiers
        ]
        attached = [
            AttachedTier(store, write_policy, write_queue, promote, loads=loads, writes=writes) for store in self.stores
        ]
        options = {} if clock is None else {"clock": clock}
        table = Table(
            self.memory,
            self.policy,
            records=records,
            high_watermark=high_watermark,
            low_watermark=low_watermark,
            ghosts=ghosts,
            tenants=tenants,
            **options,
        )
        self.manager = StorageManager(table, attached)

    @property
    def table(self) -> Table:
        return self.manager.table

    @property
    def tier(self) -> MemoryTier:
        return self.tiers[0]

    @property
    def store_counters(self) -> dict[str, int]:
        return dict(self.stores[0].counters)

    def l1(self, name: str) -> object:
        status = self.manager.status()["l1"]
        assert isinstance(status, dict)
        return status[name]

    def present(self, keys: Sequence[PackedKey]) -> int:
        return sum(self.table.which_present(keys))

    def write(self, keys: Sequence[PackedKey], *, owner: int = OWNER) -> int:
        """STORE of the right bytes; the number of objects published."""
        result = self.table.reserve([(key, SIZE) for key in keys], owner=owner)
        if result.lease is None:
            return 0
        for index, offset in result.placed:
            self.table.arena[offset : offset + SIZE] = content(keys[index], SIZE)
        return len(self.table.commit(result.lease.id, owner=owner))

    def read(self, keys: Sequence[PackedKey], *, owner: int = OWNER) -> bool:
        """RETRIEVE: whether all are here; asserts that their bytes are right."""
        lease = self.table.pin(keys, owner=owner)
        if lease is None:
            return False
        found = [bytes(self.table.arena[x.offset : x.offset + x.length]) for x in lease.objects]
        held = self.table.unpin(lease.id, owner=owner).held
        assert not held or found == [content(key, SIZE) for key in keys]
        return held

    def load(self, keys: Sequence[PackedKey], *, select: Select | None = None, timeout: float = 10.0) -> LoadTask:
        """A prefetch, waited for."""
        done: list[None] = []
        task = self.manager.tiers.submit_prefetch_task(keys, DESC, select=select, on_done=lambda: done.append(None))
        assert task is not None
        wait_until(lambda: task.done, timeout, "the end of the load")
        assert len(done) == 1
        return task

    def load_in_background(
        self, keys: Sequence[PackedKey], on_done: Callable[[], None] = lambda: None, *, ahead: bool = False
    ) -> LoadTask:
        task = self.manager.tiers.submit_prefetch_task(keys, DESC, on_done=on_done, ahead=ahead)
        assert task is not None
        return task

    def forget(self) -> None:
        """Empties L1, once the writers hold no pin on it."""
        wait_until(lambda: self.manager.clear().in_use == 0, what="an empty L1")

    def wait_stalled(self) -> None:
        wait_until(lambda: self.tier.stalled, what="a stalled call")

    def assert_idle(self) -> None:
        """Nothing is pinned, reserved or on its way."""
        wait_until(lambda: self.manager.status()["prefetch"] == {"in_flight": 0, "refused": 0}, what="no load")
        wait_until(lambda: not self.l1("pins"), what="no pin")
        status = self.manager.status()["l1"]
        assert isinstance(status, dict)
        assert (status["write_leases"], status["pin_leases"], status["quarantined_bytes"]) == (0, 0, 0)
        assert status["used_bytes"] == status["objects"] * SIZE


def prefix(available: Sequence[bool]) -> range:
    """Selects up to the first gap, as full attention does."""
    hit = next((index for index, yes in enumerate(available) if not yes), len(available))
    return range(hit)
