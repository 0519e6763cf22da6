"""Owns the engine-driven path: PREPARE_STORE / COMMIT_STORE / ABORT and PREPARE_RETRIEVE / COMMIT_RETRIEVE.

Runs on the serving thread. The bytes never pass here: the client writes and reads the arena itself.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvframework.api import ArenaRange, CacheKey, ClientInfo, Handler, StoreOutcome
from kvframework.errors import TransportMismatch
from kvframework.service.contexts import Contexts, RegisteredContext, own_context
from kvframework.service.keys import KeyGrid, KeyResolver, check_key
from kvframework.storage.l1.leases import PinLease, StoredObject
from kvframework.storage.l1.objects import Reservation
from kvframework.storage.manager import StorageManager
from kvframework.wire import messages as m
from kvframework.wire.table import REQUESTS


class EngineDrivenTransfers:
    """Leases of arena ranges, owned by the client session that asked."""

    def __init__(
        self,
        contexts: Contexts,
        storage: StorageManager,
        resolver: KeyResolver,
        *,
        chunk_size: int,
        store_lease_s: float,
        retrieve_lease_s: float,
        store_share: float,
    ) -> None:
        self._contexts = contexts
        self._storage = storage
        self._resolver = resolver
        self._chunk_size = chunk_size
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
            # It could only commit what it has not written.
            raise TransportMismatch("this client does not map the arena", available="STORE_CPU_CHUNKS")
        grid = self._grid(client, payload)
        wanted = grid.stored(payload.first_chunks)
        sized = grid.sized()
        result = self._storage.reserve(
            [sized[index] for index in wanted],
            owner=client.session_id,
            request_id=payload.key.request_id,
            lease_s=self._store_lease_s,
            share=self._share_of(client),
        )
        outcome = outcome_of(result)
        if result.lease is None:
            return m.StorePlan("", (), outcome)
        return m.StorePlan(result.lease.id, placed_ranges(grid, wanted, result), outcome, self._store_lease_s)

    def _share_of(self, client: ClientInfo) -> float:
        """A client that is alone may fill L1; one of several leaves the others something, even if it stands still."""
        alone = all(context.session_id == client.session_id for context in self._contexts.values())
        return 1.0 if alone else self._store_share

    def _commit_store(self, client: ClientInfo, payload: m.LeaseRef, _buffers: object) -> m.Committed:
        promised = self._storage.lease_size(payload.lease, owner=client.session_id)
        published = self._storage.commit(payload.lease, owner=client.session_id)
        return m.Committed(StoreOutcome(stored=published, dropped=promised - published))

    def _abort(self, client: ClientInfo, payload: m.LeaseRef, _buffers: object) -> m.Aborted:
        return m.Aborted(self._storage.abort(payload.lease, owner=client.session_id))

    def _prepare_retrieve(self, client: ClientInfo, payload: m.Prepare, _buffers: object) -> m.RetrievePlan:
        grid = self._grid(client, payload)
        lease = pin_whole(
            self._storage, grid, client.session_id, request_id=payload.key.request_id, lease_s=self._retrieve_lease_s
        )
        self._storage.count(retrieves=1, retrieve_misses=lease is None)
        if lease is None:
            return m.RetrievePlan(False, reason="not all objects are in L1")
        return m.RetrievePlan(True, lease.id, pinned_ranges(grid, lease.objects), self._retrieve_lease_s)

    def _commit_retrieve(self, client: ClientInfo, payload: m.LeaseRef, _buffers: object) -> m.RetrieveCommitted:
        return m.RetrieveCommitted(self._storage.unpin(payload.lease, owner=client.session_id).held)

    def _grid(self, client: ClientInfo, payload: m.Prepare) -> KeyGrid:
        context = own_context(self._contexts, payload.instance_id, client)
        if context.memory is not None:
            raise TransportMismatch(
                f"instance {context.instance_id} uses {context.transport}, which the server drives",
                available="STORE and RETRIEVE",
            )
        return grid_of(context, payload.key, self._resolver, self._chunk_size)


def grid_of(context: RegisteredContext, key: CacheKey, resolver: KeyResolver, chunk_size: int) -> KeyGrid:
    """The objects of one rank that `key` names, after checking it against the registration."""
    check_key(key)
    context.check(key)
    return resolver.resolve(key, context.get_layout_desc(chunk_size))


def placed_ranges(grid: KeyGrid, wanted: Sequence[int], result: Reservation) -> tuple[ArenaRange, ...]:
    """Where each object that is to be written lies (`grid` of one rank); `wanted` are the indices that were asked
    for."""
    groups = grid.desc.groups
    count = len(groups)
    return tuple(
        ArenaRange(wanted[at] // count, wanted[at] % count, offset, groups[wanted[at] % count].nbytes)
        for at, offset in result.placed
    )


def pin_whole(
    storage: StorageManager, grid: KeyGrid, owner: int, *, request_id: str, lease_s: float | None
) -> PinLease | None:
    """Pins what a hit of the whole key uses, None if any of it is missing."""
    with storage.lock:
        objects = grid.whole(storage.row)
        if objects is None:
            return None
        return storage.pin_objects(objects, owner=owner, request_id=request_id, lease_s=lease_s)


def pinned_ranges(grid: KeyGrid, objects: Sequence[StoredObject]) -> tuple[ArenaRange, ...]:
    """Where each of the `objects` lies that `pin_whole` pinned (`grid` of one rank)."""
    count = len(grid.desc.groups)
    return tuple(
        ArenaRange(index // count, index % count, stored.offset, stored.length)
        for index, stored in zip(grid.needed(grid.chunks), objects, strict=True)
    )


def outcome_of(result: Reservation, stored: int = 0) -> StoreOutcome:
    return StoreOutcome(stored, result.present, result.in_flight, result.dropped)
