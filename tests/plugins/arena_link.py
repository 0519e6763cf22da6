"""A double of the server for transport tests: an `EngineLink` over plain memory that records what it is asked."""

from __future__ import annotations

from collections.abc import Callable

from kvframework.api import (
    ArenaRange,
    CacheKey,
    EngineLink,
    MemoryLayoutDesc,
    MessagingFuture,
    RetrievePlan,
    StoreOutcome,
    StorePlan,
)
from kvframework.errors import KVFrameworkError


class ArenaLink(EngineLink):
    """Holds objects by chunk digest and layer group. `failing` maps a method to the error it fails with; calls
    of `slow` methods are answered by what is in `pending`. `losses` is what the transport says that it lost."""

    def __init__(self, desc: MemoryLayoutDesc, capacity: int = 1 << 20) -> None:
        self.desc = desc
        self.mapped: memoryview | None = memoryview(bytearray(b"\xee" * capacity))
        self.objects: dict[tuple[bytes, int], ArenaRange] = {}
        self.calls: list[str] = []
        self.failing: dict[str, KVFrameworkError] = {}
        self.slow: set[str] = set()
        self.pending: list[Callable[[], None]] = []
        self.losses: list[tuple[str, str, int]] = []
        self.held = True
        self.written: list[ArenaRange] = []
        self._open: dict[str, dict[tuple[bytes, int], ArenaRange]] = {}
        self._end = 64
        self._leases = 0

    def arena(self) -> memoryview | None:
        return self.mapped

    def prepare_store(self, key: CacheKey, instance_id: int, first_chunks=()) -> MessagingFuture[StorePlan]:
        return self._answered("prepare_store", self._prepare_store, key, first_chunks)

    def _prepare_store(self, key: CacheKey, first_chunks) -> StorePlan:
        new, present = {}, 0
        for chunk, digest, group in self._wanted(key):
            if first_chunks and chunk < first_chunks[group]:
                continue
            if (digest, group) in self.objects:
                present += 1
                continue
            length = self.desc.groups[group].nbytes
            new[digest, group] = ArenaRange(chunk, group, self._end, length)
            self._end += -(-length // 64) * 64 + 64
        if not new:
            return StorePlan("", (), StoreOutcome(present=present))
        return StorePlan(self._lease(new), tuple(new.values()), StoreOutcome(present=present))

    def commit_store(self, lease: str) -> MessagingFuture[StoreOutcome]:
        return self._answered("commit_store", self._commit_store, lease)

    def _commit_store(self, lease: str) -> StoreOutcome:
        new = self._open.pop(lease)
        self.objects.update(new)
        self.written.extend(new.values())
        return StoreOutcome(stored=len(new))

    def abort_store(self, lease: str) -> None:
        self._called("abort_store")
        del self._open[lease]

    def prepare_retrieve(self, key: CacheKey, instance_id: int) -> MessagingFuture[RetrievePlan]:
        return self._answered("prepare_retrieve", self._prepare_retrieve, key)

    def _prepare_retrieve(self, key: CacheKey) -> RetrievePlan:
        wanted = list(self._wanted(key))
        if any((digest, group) not in self.objects for _, digest, group in wanted):
            return RetrievePlan(hit=False, reason="missing")
        ranges = {
            (digest, group): ArenaRange(chunk, group, place.offset, place.length)
            for chunk, digest, group in wanted
            for place in [self.objects[digest, group]]
        }
        return RetrievePlan(True, self._lease(ranges), tuple(ranges.values()))

    def commit_retrieve(self, lease: str) -> MessagingFuture[bool]:
        return self._answered("commit_retrieve", self._commit_retrieve, lease)

    def _commit_retrieve(self, lease: str) -> bool:
        del self._open[lease]
        return self.held

    def gather_block(self, instance_id, blocks, event):
        raise AssertionError("an engine-driven transport gathers by itself")

    def submit(self, kind, key, instance_id, block_ids, event, skip_first_n_tokens):
        raise AssertionError("an engine-driven transport asks for no server-driven copy")

    @property
    def open_leases(self) -> int:
        return len(self._open)

    def object_bytes(self, digest: bytes, group: int = 0) -> bytes:
        place = self.objects[digest, group]
        assert self.mapped is not None
        return bytes(self.mapped[place.offset : place.offset + place.length])

    def _wanted(self, key: CacheKey):
        first = key.start // self.desc.chunk_tokens
        for chunk in range((key.end - key.start) // self.desc.chunk_tokens):
            digest = key.digests[(first + chunk) * 32 : (first + chunk + 1) * 32]
            for group in range(len(self.desc.groups)):
                yield chunk, digest, group

    def _lease(self, ranges) -> str:
        self._leases += 1
        self._open[str(self._leases)] = ranges
        return str(self._leases)

    def _answered(self, name: str, answer, *arguments) -> MessagingFuture:
        """Resolved, or pending until the test calls what `pending` has."""
        future = MessagingFuture()

        def resolve() -> None:
            try:
                if name in self.failing:
                    raise self.failing[name]
                future.set_result(answer(*arguments))
            except KVFrameworkError as error:
                future.set_exception(error)

        self.calls.append(name)
        if name in self.slow:
            self.pending.append(resolve)
        else:
            resolve()
        return future

    def lost(self, kind, error, nbytes=0):
        self.losses.append((kind, getattr(error, "code", ""), nbytes))

    def _called(self, name: str) -> None:
        self.calls.append(name)
        if name in self.failing:
            raise self.failing[name]
