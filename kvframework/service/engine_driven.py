"""The engine-driven path: PREPARE_STORE / COMMIT_STORE / ABORT and PREPARE_RETRIEVE / COMMIT_RETRIEVE. Runs on the
serving thread, which never copies the bytes: the client writes and reads the arena itself."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from msgspec.structs import replace

from kvframework.api.hasher import DIGEST_BYTES, TOKEN_BYTES
from kvframework.api.requests import CacheKey, ClientInfo, Handler
from kvframework.api.transport import StoreOutcome
from kvframework.config.schema import ServerConfig
from kvframework.errors import LeaseUnknown, RequestError, TransportMismatch
from kvframework.service.contexts import Contexts, RegisteredContext
from kvframework.service.keys import KeyGrid
from kvframework.service.records import RequestLog, Transfer, Transfers
from kvframework.storage.l1.entries import StoredObject
from kvframework.storage.l1.leases import NO_PROMPT, PromptPart
from kvframework.storage.manager import StorageManager
from kvframework.wire import messages as m
from kvframework.wire.protocol import REQUESTS
from kvframework.wire.transfer_blocks import pack_indices, pack_offsets

# Loads that a LOOKUP prepares for the instances that it names, so that they begin with the copy.
#
# A grant is a pin lease of the session that registered the instance, as PREPARE_RETRIEVE gives it: only that session
# can load by it. It counts for the session that looked up, so that no client uses up what another one has; once a load
# has used it, the two are one engine, and what both pin counts for the one that looks up. The end of the ticket does
# not end it, since the server does not know whether its load is under way: the client that looked up gives back the
# grants that no load uses. Runs on the serving thread.

# Grants that have not ended, of all sessions and for the LOOKUPs of one: it needs leases and pins for tickets, too.
MAX_OPEN, MAX_OF_ASKER = 4096, 512


class Granted(NamedTuple):
    """A grant: the sessions of the instance, `owner`, and of the client that looked up, `asked_by`; its end, of the
    clock. The record of its transfer is that of the LOOKUP; `prompt` tells where in it the objects are."""

    owner: int
    asked_by: int
    until: float
    prompt: PromptPart
    transfer: Transfer


class Grants:
    def __init__(self, contexts: Contexts, storage: StorageManager, requests: RequestLog) -> None:
        self._contexts = contexts
        self._storage = storage
        self._requests = requests
        self._clock = storage.clock
        self._open: dict[str, Granted] = {}
        self._of_asker: Counter[int] = Counter()

    def grant(
        self,
        client: ClientInfo,
        key: CacheKey,
        grid: KeyGrid,
        hit: int,
        objects: list[StoredObject],
        instances: Sequence[int],
        *,
        lease_s: float,
    ) -> tuple[m.Grant, ...]:
        """Pin, for `lease_s` seconds, what each of `instances` loads for a hit of `hit` chunks, whose `objects` are
        those of all ranks. Left out are instances that cannot load it in the arena, and those beyond a bound."""
        grants: list[m.Grant] = []
        left, until, asker = m.MAX_GRANTED, self._clock() + lease_s, client.session_id
        rate = self._requests.tenants.rate(key.cache_salt)
        self._forget_lapsed()
        for instance_id in dict.fromkeys(instances):
            context = self._contexts.get(instance_id)
            if context is None or not _loads(context, key, grid):
                continue
            own, positions = objects_of(context.ranks, grid, hit, objects)
            owner = context.session_id
            left -= len(own)
            if left < 0 or len(self._open) >= MAX_OPEN or self._of_asker[asker] >= MAX_OF_ASKER:
                break
            if self._storage.table.over_share(asker):
                break  # its tickets may lapse; a load that was granted may not
            offsets = pack_offsets([stored.offset for stored in own])
            try:
                lease = self._storage.table.pin_objects(
                    own, owner=owner, request_id=key.request_id, lease_s=lease_s, use=None, asked_by=asker
                ).id
            except RequestError:
                break  # it holds too many; its load may say so
            nbytes = sum([stored.length for stored in own])
            if rate is not None:
                rate.copied(nbytes)
            kept = _truncated(key, grid, hit) if self._requests.ring.wants_contents else None
            record = replace(
                self._requests.begun("RETRIEVE", client, key, "engine"),
                outcome="hit",
                asked_tokens=hit * grid.desc.chunk_tokens,
                objects=len(own),
                nbytes=nbytes,
            )
            transfer = Transfer(record, kept, grid.desc.chunk_tokens)
            prompt = _prompt(key, grid, hit, context.ranks, positions) if key.retain else NO_PROMPT
            self._open[lease] = Granted(owner, asker, until, prompt, transfer)
            self._of_asker[asker] += 1
            grants.append(m.Grant(instance_id, lease, offsets, pack_indices(positions)))
        return tuple(grants)

    def find(self, client: ClientInfo, lease: str) -> Granted | None:
        """Return the grant that a load of an instance of this client uses; None for another lease."""
        granted = self._open.get(lease)
        return granted if granted is not None and granted.owner == client.session_id else None

    def take(self, client: ClientInfo, lease: str, granted: Granted, took_s: float) -> None:
        """A load by this grant ends, of which the server hears only now: it took its client so long."""
        self._forget(lease, granted)
        if granted.asked_by != granted.owner:
            self._storage.table.work_for(granted.owner, granted.asked_by)
        record = granted.transfer.record
        granted.transfer.record = replace(
            record,
            monotonic=max(self._clock() - took_s, record.monotonic),
            client=client.name,
            pid=client.pid,
            session_id=client.session_id,
        )

    def give_back(self, client: ClientInfo, lease: str) -> bool:
        """End a grant that no load uses, of this client's LOOKUP or instance; return whether it is one."""
        granted = self._open.get(lease)
        if granted is None or client.session_id not in (granted.asked_by, granted.owner):
            return False
        self._forget(lease, granted)
        try:
            self._storage.table.unpin(lease, owner=granted.owner)
        except LeaseUnknown:
            return False  # the session of its instance has ended
        return True

    def end_session(self, session_id: int) -> None:
        """Forget the grants for a client that has ended; its leases have. Those for others stay, and no load by them
        makes its session a part of this client's engine."""
        for lease, granted in list(self._open.items()):
            if granted.owner == session_id:
                self._forget(lease, granted)
            elif granted.asked_by == session_id:
                self._open[lease] = granted._replace(asked_by=granted.owner)
                self._of_asker[granted.owner] += 1
        del self._of_asker[session_id]

    def _forget_lapsed(self) -> None:
        now = self._clock()
        while self._open:
            lease, granted = next(iter(self._open.items()))
            if now < granted.until:
                return
            self._forget(lease, granted)

    def _forget(self, lease: str, granted: Granted) -> None:
        del self._open[lease]
        self._of_asker[granted.asked_by] -= 1
        if not self._of_asker[granted.asked_by]:
            del self._of_asker[granted.asked_by]


def _loads(context: RegisteredContext, key: CacheKey, grid: KeyGrid) -> bool:
    """Whether an instance loads what the key names, for known ranks in it, with a copy of its engine's."""
    return (
        context.memory is None
        and context.namespace == key.namespace
        and (context.rank is not None or context.world_size == 1)
        and all(rank in grid.ranks for rank in context.ranks)
    )


def objects_of(
    ranks: Sequence[int], grid: KeyGrid, hit: int, objects: list[StoredObject]
) -> tuple[list[StoredObject], Sequence[int]]:
    """Return those of `objects` that are of `ranks`, and their positions in a key of these ranks: () for all of it."""
    if [*ranks] == [*grid.ranks]:
        return list(objects), grid.needed(hit) if grid.has_windows else ()
    rows, groups = len(grid.prefixes), len(grid.desc.groups)
    own = [grid.ranks.index(rank) * groups + group for rank in ranks for group in range(groups)]
    if not grid.has_windows:
        return [objects[chunk * rows + row] for chunk in range(hit) for row in own], ()
    at = {row: index for index, row in enumerate(own)}
    needed = zip(grid.needed(hit), objects, strict=True)
    found = {index // rows * len(own) + at[index % rows]: stored for index, stored in needed if index % rows in at}
    positions = sorted(found)
    return [found[position] for position in positions], positions


def _prompt(key: CacheKey, grid: KeyGrid, hit: int, ranks: Sequence[int], positions: Sequence[int]) -> PromptPart:
    rows, tokens = len(ranks) * len(grid.desc.groups), grid.desc.chunk_tokens
    first = key.start // tokens
    return PromptPart([first + index // rows for index in positions or range(hit * rows)], tokens, key.retain)


def _truncated(key: CacheKey, grid: KeyGrid, hit: int) -> CacheKey:
    end = key.start + hit * grid.desc.chunk_tokens
    return replace(
        key,
        end=end,
        tokens=key.tokens[: end * TOKEN_BYTES],
        digests=key.digests[: end // grid.desc.chunk_tokens * DIGEST_BYTES],
    )


@dataclass(eq=False)
class EngineDrivenTransfers:
    """Leases of arena ranges, owned by the client session that requested them."""

    transfers: Transfers
    grants: Grants
    # Of the next lease: its lifetime, and the share of its client. Replaced from any thread.
    config: ServerConfig

    def handlers(self) -> list[Handler]:  # type: ignore[type-arg]
        return [
            Handler(REQUESTS["PREPARE_STORE"], self._prepare_store),
            Handler(REQUESTS["PREPARE_STORE_KEYS"], self._prepare_store),
            Handler(REQUESTS["COMMIT_STORE"], self._commit_store),
            Handler(REQUESTS["ABORT"], self._abort),
            Handler(REQUESTS["PREPARE_RETRIEVE"], self._prepare_retrieve),
            Handler(REQUESTS["COMMIT_RETRIEVE"], self._commit_retrieve),
        ]

    def _prepare_store(self, client: ClientInfo, payload: m.Prepare | m.PrepareKeys, _buffers: object) -> m.StorePlan:
        key, groups = payload.key, payload.groups if isinstance(payload, m.PrepareKeys) else ()
        if not client.local:
            # Such a client could only commit bytes that it has not written.
            available = "a client on the server's node" if groups else "STORE_CPU_CHUNKS"
            raise TransportMismatch("this client has not mapped the arena", available=available)
        grid = self.transfers.engine_driven(client, payload.instance_id, key, groups)
        wanted = grid.stored(payload.first_chunks if isinstance(payload, m.Prepare) else ())
        begun = self.transfers.begun("STORE", client, key, "engine")
        owner, lease_s, share = client.session_id, self.config.store_lease_s, self._share_of(client)
        plan = self.transfers.reserve(begun, key, grid, wanted, owner=owner, lease_s=lease_s, share=share)
        self.transfers.keep(plan)
        return m.StorePlan(plan.lease, plan.ranges, plan.outcome, lease_s if plan.lease else 0.0)

    def _share_of(self, client: ClientInfo) -> float:
        """Return the share of L1 that the client may reserve: all of it for a sole client, otherwise `store_share`."""
        alone = all(context.session_id == client.session_id for context in self.transfers.contexts.values())
        return 1.0 if alone else self.config.store_share

    def _commit_store(self, client: ClientInfo, payload: m.Commit, _buffers: object) -> m.Committed:
        promised = self.transfers.table.lease_size(payload.lease, owner=client.session_id)
        self.transfers.check(self.transfers.under(payload.lease), payload.content)
        published = len(self.transfers.table.commit(payload.lease, owner=client.session_id))
        self.transfers.end_lease(payload.lease, payload.content, ok=published > 0)
        lapsed = promised - published
        return m.Committed(StoreOutcome(stored=published, dropped=lapsed, error=LeaseUnknown.code if lapsed else ""))

    def _abort(self, client: ClientInfo, payload: m.LeaseRef, _buffers: object) -> m.Aborted:
        freed = self.transfers.table.abort(payload.lease, owner=client.session_id)
        self.transfers.end_lease(payload.lease, ok=False)
        return m.Aborted(freed)

    def _prepare_retrieve(self, client: ClientInfo, payload: m.Prepare, _buffers: object) -> m.RetrievePlan:
        begun = self.transfers.begun("RETRIEVE", client, payload.key, "engine" if client.local else "wire")
        grid = self.transfers.engine_driven(client, payload.instance_id, payload.key)
        lease_s = self.config.retrieve_lease_s
        plan = self.transfers.pin(begun, payload.key, grid, owner=client.session_id, lease_s=lease_s)
        if not plan.lease:
            return m.RetrievePlan(False, reason=plan.reason)
        self.transfers.keep(plan)
        return m.RetrievePlan(True, plan.lease, plan.ranges, lease_s)

    def _commit_retrieve(self, client: ClientInfo, payload: m.Commit, _buffers: object) -> m.RetrieveCommitted:
        lease, owner = payload.lease, client.session_id
        granted = self.grants.find(client, lease)
        transfer = granted.transfer if granted else self.transfers.under(lease)
        self.transfers.check(transfer, payload.content)
        if granted is not None:
            self.grants.take(client, lease, granted, payload.took_s)
            self.transfers.table.count(retrieves=1)
        held, prompt = True, granted.prompt if granted else NO_PROMPT
        try:
            self.transfers.table.unpin(lease, owner=owner, use="retrieve" if granted else None, prompt=prompt)
        except LeaseUnknown:
            if granted is None and not self.transfers.lapsed(lease, owner):
                raise
            held = False
        if granted is None:
            self.transfers.end_lease(lease, payload.content, ok=held)
        else:
            self.transfers.end(transfer, payload.content, ok=held)
        return m.RetrieveCommitted(held)
