"""The engine-driven path: PREPARE_STORE / COMMIT_STORE / ABORT and PREPARE_RETRIEVE / COMMIT_RETRIEVE.

Runs on the serving thread, which never copies the bytes: the client writes and reads the arena itself.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvframework.api.requests import CacheKey, ClientInfo, Handler
from kvframework.api.transport import ArenaRange, StoreOutcome
from kvframework.errors import LeaseUnknown, TransportMismatch
from kvframework.service.accounts.finished import Subject
from kvframework.service.accounts.transfers import TransferAccounts, added_tokens, store_outcome
from kvframework.service.checked_keys import InstanceKeys
from kvframework.service.contexts import Contexts
from kvframework.service.keys import KeyGrid
from kvframework.service.prompt_parts import found_part, prompt_part
from kvframework.service.transfer_paths.contents import Contents
from kvframework.service.transfer_paths.grants import Grants
from kvframework.storage.l1.entries import StoredObject
from kvframework.storage.l1.leases import PinLease
from kvframework.storage.l1.objects import Reservation
from kvframework.storage.manager import StorageManager
from kvframework.wire import messages as m
from kvframework.wire.table import REQUESTS


class EngineDrivenTransfers:
    """Leases of arena ranges, owned by the client session that requested them."""

    def __init__(
        self,
        contexts: Contexts,
        storage: StorageManager,
        keys: InstanceKeys,
        *,
        store_lease_s: float,
        retrieve_lease_s: float,
        store_share: float,
        accounts: TransferAccounts,
        contents: Contents,
        grants: Grants,
    ) -> None:
        self._contexts = contexts
        self._storage = storage
        self._keys = keys
        self._accounts = accounts
        self._contents = contents
        self._grants = grants
        self.configure(store_lease_s=store_lease_s, retrieve_lease_s=retrieve_lease_s, store_share=store_share)

    def configure(self, *, store_lease_s: float, retrieve_lease_s: float, store_share: float) -> None:
        """Change the leases' lifetimes and the share of a client, from the next lease on. From any thread."""
        self._store_lease_s = store_lease_s
        self._retrieve_lease_s = retrieve_lease_s
        self._store_share = store_share

    def handlers(self) -> list[Handler]:  # type: ignore[type-arg]
        return [
            Handler(REQUESTS["PREPARE_STORE"], self._prepare_store),
            Handler(REQUESTS["COMMIT_STORE"], self._commit_store),
            Handler(REQUESTS["ABORT"], self._abort),
            Handler(REQUESTS["PREPARE_RETRIEVE"], self._prepare_retrieve),
            Handler(REQUESTS["COMMIT_RETRIEVE"], self._commit_retrieve),
        ]

    def _prepare_store(self, client: ClientInfo, payload: m.Prepare, _buffers: object) -> m.StorePlan:
        if not client.local:
            # Such a client could only commit bytes that it has not written.
            raise TransportMismatch("this client does not map the arena", available="STORE_CPU_CHUNKS")
        subject = self._accounts.begun(client, payload.key, "engine")
        grid = self._keys.engine_driven(client, payload.instance_id, payload.key)
        wanted = grid.stored(payload.first_chunks)
        sized = grid.sized()
        result = self._storage.reserve(
            [sized[index] for index in wanted],
            owner=client.session_id,
            request_id=payload.key.request_id,
            lease_s=self._store_lease_s,
            share=self._share_of(client),
            client=client.session_id,
            prompt=prompt_part(payload.key, grid, wanted),
        )
        outcome = outcome_of(result)
        if result.lease is None:
            self._accounts.finished("STORE", subject, store_outcome(result), added_tokens=0)
            return m.StorePlan("", (), outcome)
        ranges = placed_ranges(grid, wanted, result)
        added = added_tokens((place.chunk for place in ranges), grid)
        self._begin("STORE", result.lease.id, subject, store_outcome(result), ranges, added)
        self._contents.prepared(client.session_id, result.lease.id, payload.key, grid.desc.chunk_tokens)
        return m.StorePlan(result.lease.id, ranges, outcome, self._store_lease_s)

    def _share_of(self, client: ClientInfo) -> float:
        """Return the share of L1 that the client may reserve: all of it for a sole client; otherwise `store_share`, so
        that a stalled writer cannot starve others."""
        alone = all(context.session_id == client.session_id for context in self._contexts.values())
        return 1.0 if alone else self._store_share

    def _commit_store(self, client: ClientInfo, payload: m.Commit, _buffers: object) -> m.Committed:
        promised = self._storage.lease_size(payload.lease, owner=client.session_id)
        self._contents.check(payload.lease, payload.content)
        published = self._storage.commit(payload.lease, owner=client.session_id)
        self._accounts.ended(payload.lease, ok=published > 0)
        self._contents.ended(payload.lease, payload.content, ok=published > 0)
        lapsed = promised - published
        return m.Committed(StoreOutcome(stored=published, dropped=lapsed, error=LeaseUnknown.code if lapsed else ""))

    def _abort(self, client: ClientInfo, payload: m.LeaseRef, _buffers: object) -> m.Aborted:
        freed = self._storage.abort(payload.lease, owner=client.session_id)
        self._accounts.ended(payload.lease, ok=False)
        self._contents.ended(payload.lease)
        return m.Aborted(freed)

    def _prepare_retrieve(self, client: ClientInfo, payload: m.Prepare, _buffers: object) -> m.RetrievePlan:
        subject = self._accounts.begun(client, payload.key, "engine" if client.local else "wire")
        grid = self._keys.engine_driven(client, payload.instance_id, payload.key)
        lease_s = self._retrieve_lease_s  # may change meanwhile, and the client relies on what it is told
        lease = pin_whole(self._storage, payload.key, grid, client.session_id, lease_s=lease_s)
        self._storage.count(retrieves=1, retrieve_misses=lease is None)
        if lease is None:
            return m.RetrievePlan(False, reason=self._accounts.missed(subject, payload.key, grid))
        ranges = pinned_ranges(grid, lease.objects)
        self._begin("RETRIEVE", lease.id, subject, "hit", ranges)
        self._contents.prepared(client.session_id, lease.id, payload.key, grid.desc.chunk_tokens)
        return m.RetrievePlan(True, lease.id, ranges, lease_s)

    def _commit_retrieve(self, client: ClientInfo, payload: m.Commit, _buffers: object) -> m.RetrieveCommitted:
        lease, owner = payload.lease, client.session_id
        self._contents.check(lease, payload.content)
        granted = self._grants.take(client, lease)
        if granted is None:
            held = self._storage.unpin(lease, owner=owner).held
            self._accounts.ended(lease, ok=held)
        else:
            held = self._storage.unpin(lease, owner=owner, use="retrieve", prompt=granted.prompt).held
            self._storage.count(retrieves=1)
            self._accounts.granted(
                client, granted.subject, payload.took_s, objects=granted.objects, nbytes=granted.nbytes, ok=held
            )
        self._contents.ended(lease, payload.content, ok=held)
        return m.RetrieveCommitted(held)

    def _begin(
        self, request: str, lease: str, subject: Subject, outcome: str, ranges: Sequence[ArenaRange], added: int = -1
    ) -> None:
        nbytes = sum(place.length for place in ranges)
        self._accounts.under_way(request, lease, subject, outcome, len(ranges), nbytes, added)


def placed_ranges(grid: KeyGrid, wanted: Sequence[int], result: Reservation) -> tuple[ArenaRange, ...]:
    """Return the range of each object to write; `wanted` are the requested indices. A row counts as a layer group."""
    groups = grid.row_groups
    count = len(groups)
    return tuple(
        ArenaRange(wanted[at] // count, wanted[at] % count, offset, groups[wanted[at] % count].nbytes)
        for at, offset in result.placed
    )


def pin_whole(
    storage: StorageManager,
    key: CacheKey,
    grid: KeyGrid,
    owner: int,
    *,
    lease_s: float | None,
    asked_by: int | None = None,
) -> PinLease | None:
    """Pin the objects that a hit of the whole key uses; None if any of them is missing, or the share of L1 of the
    session that asks is pinned."""
    found = found_part(key, grid, grid.chunks)
    return storage.pin_found(
        grid.whole, owner=owner, request_id=key.request_id, lease_s=lease_s, prompt=found, asked_by=asked_by
    )


def pinned_ranges(grid: KeyGrid, objects: Sequence[StoredObject]) -> tuple[ArenaRange, ...]:
    """Return the range of each of the `objects` that `pin_whole` pinned. A row counts as a layer group."""
    count = len(grid.row_groups)
    return tuple(
        ArenaRange(index // count, index % count, stored.offset, stored.length)
        for index, stored in zip(grid.needed(grid.chunks), objects, strict=True)
    )


def outcome_of(result: Reservation, stored: int = 0) -> StoreOutcome:
    return StoreOutcome(stored, result.present, result.in_flight, result.dropped)
