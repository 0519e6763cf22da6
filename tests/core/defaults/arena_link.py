"""A double of the server for transport tests: an `EngineLink` over plain memory that records what it is asked."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kvframework.api.futures import Future, Promise
from kvframework.api.keys import CacheKey
from kvframework.api.layout import MemoryLayoutDesc
from kvframework.api.transport import ArenaRange, EngineLink, LoadOutcome, LoadPlan, StoreOutcome, StorePlan, Transfer
from kvframework.errors import Cancelled, DeadlineExceeded, KVFrameworkError


class ArenaLink(EngineLink):
    """Holds objects by chunk digest and layer group. `failing` maps a method to the error it fails with; calls
    of `slow` methods are answered by what is in `pending`."""

    def __init__(self, desc: MemoryLayoutDesc, capacity: int = 1 << 20) -> None:
        self.desc = desc
        self.mapped: memoryview | None = memoryview(bytearray(b"\xee" * capacity))
        self.objects: dict[tuple[bytes, int], ArenaRange] = {}
        self.calls: list[str] = []
        self.failing: dict[str, KVFrameworkError] = {}
        self.slow: set[str] = set()
        self.pending: list[Callable[[], None]] = []
        self.held = True
        self.written: list[ArenaRange] = []
        self._open: dict[str, dict[tuple[bytes, int], ArenaRange]] = {}
        self._end = 64
        self._leases = 0

    @property
    def maps_arena(self) -> bool:
        return self.mapped is not None

    def prepare_store(self, transfer: Transfer) -> Future[StorePlan]:
        return self._answered("prepare_store", self._prepare_store, transfer, planned=True)

    def _prepare_store(self, transfer: Transfer) -> StorePlan:
        assert self.mapped is not None
        new, present = {}, 0
        for chunk, digest, group in self._wanted(transfer.key):
            if chunk < transfer.first_chunks[group]:
                continue
            if (digest, group) in self.objects:
                present += 1
                continue
            length = self.desc.groups[group].nbytes
            new[digest, group] = ArenaRange(chunk, group, self._end, length)
            self._end += -(-length // 64) * 64 + 64
        lease, others = self._lease(new) if new else "", StoreOutcome(present=present)

        def failed(error) -> StoreOutcome:
            self._abort_store(lease)
            if isinstance(error, DeadlineExceeded):
                return others + StoreOutcome(unknown=len(new), error=error.code)
            return others + StoreOutcome(dropped=len(new), error=error.code)

        return StorePlan(
            self.mapped,
            tuple(new.values()),
            others,
            commit=lambda: self._answered("commit_store", lambda: others + self._commit_store(lease), failed=failed),
            abort=lambda: self._abort_store(lease),
        )

    def _commit_store(self, lease: str) -> StoreOutcome:
        new = self._open.pop(lease)
        self.objects.update(new)
        self.written.extend(new.values())
        return StoreOutcome(stored=len(new))

    def _abort_store(self, lease: str) -> None:
        self.calls.append("abort_store")
        self._open.pop(lease, None)

    def prepare_load(self, transfer: Transfer) -> Future[LoadPlan]:
        return self._answered("prepare_load", self._prepare_load, transfer, planned=True)

    def _prepare_load(self, transfer: Transfer) -> LoadPlan:
        wanted = list(self._wanted(transfer.key))
        ranges, lease = {}, ""
        if all((digest, group) in self.objects for _, digest, group in wanted):
            ranges = {
                (digest, group): ArenaRange(chunk, group, place.offset, place.length)
                for chunk, digest, group in wanted
                for place in [self.objects[digest, group]]
            }
            lease = self._lease(ranges)

        def abort() -> None:
            self.calls.append("abort_load")
            self._open.pop(lease, None)

        return LoadPlan(
            self.mapped if self.mapped is not None else memoryview(b""),
            tuple(ranges.values()),
            reason="" if ranges else "missing",
            commit=lambda: self._answered("commit_load", self._commit_load, lease, failed=LoadOutcome.failed),
            abort=abort,
            receive=lambda _positions: pytest.fail("nothing goes over the wire here"),
        )

    def _commit_load(self, lease: str) -> LoadOutcome:
        del self._open[lease]
        return LoadOutcome(self.held, "" if self.held else "the pins lapsed")

    def gather_block(self, registration, blocks, event):
        raise AssertionError("an engine-driven transport gathers by itself")

    def store(self, transfer, *, event=b"", stream_hook=None):
        raise AssertionError("an engine-driven transport asks for no server-driven copy")

    def load(self, transfer, skip_tokens, *, event=b"", stream_hook=None):
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

    def _answered(self, name: str, answer, *arguments, failed=None, planned: bool = False) -> Future:
        """Resolved, or pending until the test calls what `pending` has. `failed` says what it has after an error;
        `planned`: what comes after a cancel is given back."""
        future = Promise(lambda: future.set_exception(Cancelled("cancelled")) and None) if planned else Promise()

        def resolve() -> None:
            try:
                if name in self.failing:
                    raise self.failing[name]
                result = answer(*arguments)
            except KVFrameworkError as error:
                if failed is None:
                    future.set_exception(error)
                else:
                    future.set_result(failed(error))
                return
            if not future.set_result(result):
                result.abort()

        self.calls.append(name)
        if name in self.slow:
            self.pending.append(resolve)
        else:
            resolve()
        return future
