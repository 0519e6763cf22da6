"""A checked transfer, and the calls of the transports that move it, engine-driven and server-driven. Engine side."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import pairwise
from operator import attrgetter, index
from typing import SupportsIndex, TypeVar

from kvframework.api.futures import Future, Promise, StreamHook
from kvframework.api.hasher import Buffer
from kvframework.api.keys import CacheKey, ChunkContent
from kvframework.api.layout import LayerTensors, check_skip
from kvframework.api.plugin import Message
from kvframework.api.transport import (
    ArenaRange,
    BlockIds,
    EngineLink,
    GroupBlocks,
    LoadGrant,
    LoadOutcome,
    LoadPlan,
    Registration,
    StoreOutcome,
    StorePlan,
    Transfer,
    error_code,
)
from kvframework.client.arena_mapping import MappedArena
from kvframework.client.hashing import content_name, granted_ranges
from kvframework.client.session import ServerSession, as_response, mapped, only
from kvframework.errors import BadBlockIds, BadRange, DeadlineExceeded, KVFrameworkError, ProtocolError, ServerGone
from kvframework.logs.limit import LogLimit
from kvframework.messaging.client.link import Answer
from kvframework.wire import messages as m
from kvframework.wire.protocol import SINCE_0_3
from kvframework.wire.transfer_blocks import checked_blocks, pack_block_ids, pack_indices, unpack_indices

log = logging.getLogger(__name__)
log.addFilter(LogLimit())

R = TypeVar("R")
_offset = attrgetter("offset")
# The least time, in seconds, that a grant has left for its copy: with less the pins are asked for again.
SPARE_S = 5.0
# The same where the engine copies in pieces, and takes its time.
PIECES_S = 15.0
_NO_ARENA = memoryview(b"")
_HELD = LoadOutcome(True)
_PINS_LOST = LoadOutcome(False, "the pins on the objects expired while the engine read them")


def checked_tokens(registration: Registration, request_id: str, start: int, end: int) -> tuple[int, int]:
    """Return the ends of tokens `[start, end)` as ints. Raises `BadRange` unless they are whole chunks."""
    chunk = registration.desc.chunk_tokens
    first, last = _as_int(start, "start"), _as_int(end, "end")
    if not 0 <= first < last or first % chunk or last % chunk:
        raise BadRange(
            f"the range is tokens {first} to {last}",
            where=f"request {request_id!r}",
            available=f"whole chunks of {chunk} tokens",
        )
    return first, last


def checked_start(request_id: str, start: int, chunk_tokens: int) -> int:
    """Return the start of a lookup as an int. Raises `BadRange` unless it is a chunk's first token."""
    first = _as_int(start, "start")
    if first < 0 or first % chunk_tokens:
        where, available = f"request {request_id!r}", f"multiples of {chunk_tokens} tokens"
        hint = "round down to a chunk, and skip tokens that the engine has by skip_first_n_tokens"
        raise BadRange(f"start is {first}", where=where, available=available, hint=hint)
    return first


def checked_skip(registration: Registration, tokens: int, skip_tokens: int) -> int:
    """Return `skip_tokens` as an int. Raises `BadRange` unless a load of `tokens` tokens can skip as many."""
    skipped = _as_int(skip_tokens, "skip_first_n_tokens")
    if not 0 <= skipped <= tokens:
        raise BadRange(f"skip_first_n_tokens is {skipped}", available=f"0 to {tokens} tokens")
    check_skip(registration.layout, skipped)
    return skipped


def checked_transfer(
    registration: Registration,
    key: CacheKey,
    kv_caches: Mapping[str, LayerTensors],
    block_ids: BlockIds,
    event: object | None,
    content: ChunkContent | None = None,
    *,
    storing: bool,
    moved: Registration | None = None,
    grant: LoadGrant | None = None,
    in_pieces: bool = False,
) -> Transfer:
    """Return the transfer of the key's tokens, which are whole chunks. `moved` is the registration of the transport,
    whose layer groups are those of `registration`, perhaps several times over. Raises `BadBlockIds`."""
    chunk = registration.desc.chunk_tokens
    try:
        blocks = checked_blocks(
            registration.layout, chunk, key.end - key.start, block_ids, storing=storing, bounded=False
        )
    except BadBlockIds as error:
        of = f"request {key.request_id!r}, tokens {key.start} to {key.end}"
        error.where = f"{of}, {error.where}" if error.where else of
        raise
    moved = moved or registration
    if (copies := len(moved.layout.groups) // len(blocks)) > 1:
        block_ids, blocks = [*block_ids] * copies, blocks * copies
    return Transfer(key, moved, kv_caches, block_ids, blocks, event, content, grant, in_pieces)


def bare_transfer(registration: Registration, key: CacheKey) -> Transfer:
    """Return the transfer of a client without blocks, which writes and reads whole objects by itself."""
    chunk = registration.desc.chunk_tokens
    blocks = tuple(GroupBlocks((), group.object_blocks(chunk), 0, -1) for group in registration.layout.groups)
    return Transfer(key, registration, {}, (), blocks)


def check_ranges(transfer: Transfer, ranges: Sequence[ArenaRange], arena_bytes: int | None) -> None:
    """Raise `ProtocolError` for an invalid range: of no object of the transfer, of another size, of an object that has
    one already, outside of the arena or over another range (`arena_bytes` None: the bytes come over the wire)."""
    chunks, sizes = transfer.chunks, [group.nbytes for group in transfer.registration.desc.groups]
    for place in ranges:
        if not (0 <= place.group < len(sizes) and 0 <= place.chunk < chunks):
            raise ProtocolError(f"the answer names {place}", available=f"{chunks} chunks of {len(sizes)} layer groups")
        if place.length != sizes[place.group]:
            raise ProtocolError(f"the answer names {place}", available=f"objects of {sizes[place.group]} bytes")
        if arena_bytes is not None and not 0 <= place.offset <= arena_bytes - place.length:
            raise ProtocolError(f"the answer names {place}", available=f"ranges within the arena's {arena_bytes} bytes")
    if len({(place.chunk, place.group) for place in ranges}) < len(ranges):
        raise ProtocolError("the answer names an object twice", available="one range for each object")
    if arena_bytes is not None:
        for before, after in pairwise(sorted(ranges, key=_offset)):
            if after.offset < before.offset + before.length:
                raise ProtocolError(f"the answer names {before} and {after}", available="ranges that do not overlap")


def check_held(transfer: Transfer, ranges: Sequence[ArenaRange], others: StoreOutcome) -> None:
    """Raise `ProtocolError` unless the `ranges` to write and the `others` are together what the engine holds."""
    firsts = transfer.first_chunks
    for place in ranges:
        if place.chunk < firsts[place.group]:
            raise ProtocolError(f"the server asked for {place}, which the engine does not hold")
    counts = (others.stored, others.present, others.in_flight, others.dropped, others.unknown)
    held = sum(transfer.chunks - first for first in firsts)
    if min(counts) < 0 or len(ranges) + sum(counts) != held:
        raise ProtocolError(
            f"the server asked for {len(ranges)} objects, and said of the rest of the STORE: {others}",
            available=f"{held} objects in all",
        )


def check_complete(transfer: Transfer, ranges: Sequence[ArenaRange]) -> None:
    """Raise `ProtocolError` for a missing chunk: any of full attention, all in a window, the last of a state."""
    given = {(place.chunk, place.group) for place in ranges}
    for group, first in enumerate(transfer.first_chunks):
        missing = [chunk for chunk in range(first, transfer.chunks) if (chunk, group) not in given]
        if missing:
            raise ProtocolError(f"the answer names no object for chunks {missing} of layer group {group}")


def _as_int(number: SupportsIndex, name: str) -> int:
    """The number of an engine, which may be one of another library's integers."""
    try:
        return int(index(number))
    except TypeError:
        raise BadRange(f"{name} is {number!r}", available="integers") from None


class KVClient(ServerSession, EngineLink):
    """A client session. Thread-safe. Starts connecting at once, and reconnects by itself whenever the server has ended.

    `endpoint` None: $KVFRAMEWORK_ENDPOINT, then the default private endpoint of this user. `deadline_scale` makes
    deadlines longer or shorter, 0.1 to 100; None: $KVFRAMEWORK_DEADLINE_SCALE, else 1. `deadlines` is the resulting
    table. After a lookup's deadline, lookups fail at once until the server answers a PING; other calls do so once the
    server was silent for as long as they wait. `curve` are the key files for a tcp:// endpoint; None: those of
    $KVFRAMEWORK_CURVE_SECRET (this client's secret key) and $KVFRAMEWORK_CURVE_SERVER (the server's public key), if
    set. `requests` are specs of plugins' requests, which `request` then accepts beside the core's. Raises
    `EndpointError`, `ConfigFieldError` and `CurveKeyError`."""

    # Engine-driven transports: objects are prepared, copied by the engine, and committed, see `EngineDrivenLink`. A
    # grant of the server that comes too late for its caller is released.

    def prepare_store(self, transfer: Transfer) -> Future[StorePlan]:
        left_out = transfer.first_chunks
        payload = m.Prepare(transfer.key, transfer.registration.instance_id, left_out if any(left_out) else ())

        def check(reply: m.StorePlan, arena_bytes: int) -> None:
            check_ranges(transfer, reply.ranges, arena_bytes)
            check_held(transfer, reply.ranges, reply.outcome)

        return self._prepared("PREPARE_STORE", payload, check, transfer.content)

    def prepare_store_keys(
        self, payload: m.PrepareKeys, check: Callable[[Sequence[ArenaRange]], None]
    ) -> Future[StorePlan]:
        """Reserve places for keys by group; `check` raises for wrong ranges. Neither this nor `commit` waits."""
        return self._prepared("PREPARE_STORE_KEYS", payload, lambda reply, _: check(reply.ranges), waits=False)

    def _prepared(
        self,
        name: str,
        payload: Message,
        check: Callable[[m.StorePlan, int], None],
        content: ChunkContent | None = None,
        *,
        waits: bool = True,
    ) -> Future[StorePlan]:
        arena = self._arena
        if arena is None:
            # A miss like any other: an engine whose connection ends just now asks for nothing wrong.
            return Future.failed(ServerGone("the server's arena is not mapped in this process"))
        on_late = only(m.StorePlan, lambda late: self._abort(late.lease))
        sent = self._begin(name, payload, on_late=on_late, waits=waits)

        def plan_of(answer: Answer) -> StorePlan:
            reply = as_response(answer.payload, m.StorePlan)
            try:
                self._check_same(arena)
                check(reply, arena.view.nbytes)
            except KVFrameworkError:
                self._abort(reply.lease)
                raise
            commit = m.Commit(reply.lease, content)
            return StorePlan(
                arena.view,
                reply.ranges,
                reply.outcome,
                commit=partial(self._commit_store, commit, len(reply.ranges), reply.outcome, waits),
                abort=partial(self._abort, reply.lease),
            )

        return mapped(sent, plan_of, release=StorePlan.abort)

    def prepare_load(self, transfer: Transfer) -> Future[LoadPlan]:
        arena, grant = self._arena, transfer.grant
        if grant is not None:
            if arena is not None and self._is_good(grant, transfer, arena):
                return self._granted(transfer, grant, arena)
            self.free_soon(grant.lease)
        payload = m.Prepare(transfer.key, transfer.registration.instance_id)
        began = time.monotonic()
        late = only(m.RetrievePlan, lambda reply: self._unpin(reply.lease))
        sent = self._begin("PREPARE_RETRIEVE", payload, on_late=late)

        def plan_of(answer: Answer) -> LoadPlan:
            reply = as_response(answer.payload, m.RetrievePlan)
            try:
                self._check_same(arena)
                commit = m.Commit(reply.lease, transfer.content)
                until = began + reply.lease_s
                return self._load_plan(transfer, reply, arena, partial(self._loaded, commit, arena, began, until))
            except KVFrameworkError:
                self._unpin(reply.lease)
                raise

        return mapped(sent, plan_of, release=LoadPlan.abort)

    def _load_plan(
        self,
        transfer: Transfer,
        reply: m.RetrievePlan,
        arena: MappedArena | None,
        commit: Callable[[], Future[LoadOutcome]],
    ) -> LoadPlan:
        if reply.hit:
            check_ranges(transfer, reply.ranges, arena.view.nbytes if arena is not None else None)
            check_complete(transfer, reply.ranges)
        return LoadPlan(
            arena.view if arena is not None else _NO_ARENA,
            reply.ranges if reply.hit else (),
            reason=reply.reason,
            commit=commit,
            abort=partial(self._unpin, reply.lease),
            receive=partial(self._receive_chunks, reply),
        )

    def _is_good(self, grant: LoadGrant, transfer: Transfer, arena: MappedArena) -> bool:
        """Whether a grant is for this transfer, of this session and registration, and lasts long enough for a copy."""
        return (
            grant.boot_id == self._connection.boot_id
            # Of that very server: before there is another one, this is no more.
            and self._arena is arena
            and max(arena.since, transfer.registration.since) < grant.began
            and time.monotonic() < grant.until - (PIECES_S if transfer.in_pieces else SPARE_S)
            and grant.content == content_name(transfer.key.digests, transfer.key.cache_salt)
            and (grant.instance_id, grant.start, grant.end)
            == (transfer.registration.instance_id, transfer.key.start, transfer.key.end)
        )

    def _granted(self, transfer: Transfer, grant: LoadGrant, arena: MappedArena) -> Future[LoadPlan]:
        """Return the plan of a load that a lookup has prepared. No request is sent."""
        started = time.monotonic()

        def commit() -> Future[LoadOutcome]:
            took_s = time.monotonic() - started
            return self._loaded(m.Commit(grant.lease, transfer.content, took_s), arena, grant.began, grant.until)

        try:
            reply = m.RetrievePlan(True, grant.lease, granted_ranges(transfer, grant))
            return Future.resolved(self._load_plan(transfer, reply, arena, commit))
        except KVFrameworkError as error:
            self._unpin(grant.lease)
            return Future.failed(error.with_traceback(None))

    def missing_chunks(self, transfer: Transfer) -> Future[list[int]]:
        sent = self._begin("STORE_CPU_CHUNKS", m.StoreCpuChunks(transfer.key, transfer.registration.instance_id))

        def missing(answer: Answer) -> list[int]:
            found = unpack_indices(as_response(answer.payload, m.ChunksStored).missing, where="missing")
            if found and max(found) >= transfer.objects:
                raise ProtocolError(f"the server lacks object {max(found)}", available=f"{transfer.objects} objects")
            return found

        return mapped(sent, missing)

    def store_chunks(
        self, transfer: Transfer, objects: Sequence[int], buffers: Sequence[Buffer]
    ) -> Future[StoreOutcome]:
        instance_id = transfer.registration.instance_id
        payload = m.StoreCpuChunks(transfer.key, instance_id, pack_indices(objects), transfer.content)
        sent = self._bulk("STORE_CPU_CHUNKS", payload, buffers, sum(memoryview(buffer).nbytes for buffer in buffers))
        return mapped(sent, lambda answer: as_response(answer.payload, m.ChunksStored).outcome)

    def _bulk(self, name: str, payload: Message, buffers: Sequence[Buffer], nbytes: int) -> Future[Answer]:
        return self._connection.begin(name, payload, buffers, timeout=self.deadlines.of_bulk(nbytes), bulk=True)

    def _check_same(self, arena: MappedArena | None) -> None:
        """Raise `ServerGone` unless `arena` is still mapped: ranges mean nothing in another server's memory."""
        if self._arena is not arena:
            raise ServerGone("the server restarted during the request")

    def _commit_store(self, commit: m.Commit, objects: int, others: StoreOutcome, waits: bool) -> Future[StoreOutcome]:
        def failed(error: BaseException) -> StoreOutcome:
            # After the COMMIT: nothing stays reserved, whatever its outcome.
            self._abort(commit.lease)
            if isinstance(error, DeadlineExceeded):
                return others + StoreOutcome(unknown=objects, error=error.code)
            return others + StoreOutcome(dropped=objects, error=error_code(error))

        # Urgent: a doubt about the server must not leave the range reserved until this process ends.
        sent = self._begin("COMMIT_STORE", commit, urgent=True, waits=waits)
        return mapped(sent, lambda answer: others + as_response(answer.payload, m.Committed).outcome, failed=failed)

    def _abort(self, lease: str) -> None:
        if lease:
            self.send("ABORT", m.LeaseRef(lease))

    def _loaded(self, commit: m.Commit, arena: MappedArena | None, began: float, until: float) -> Future[LoadOutcome]:
        """End a load whose pins were asked for at `began`, and last until that time, of the monotonic clock, if neither
        the end of this session nor an END_SESSION ends them sooner."""
        # Where it is known that they held, the answer is of no use.
        if self.has(SINCE_0_3) and arena is not None and self._arena is arena:
            held = time.monotonic() < until and arena.is_served and self._connection.released_nothing_since(began)
            if held and self._connection.post("COMMIT_RETRIEVE", commit):
                return Future.resolved(_HELD)
        sent = self._begin("COMMIT_RETRIEVE", commit, urgent=True)
        return mapped(
            sent,
            lambda answer: _HELD if as_response(answer.payload, m.RetrieveCommitted).held else _PINS_LOST,
            failed=LoadOutcome.failed,
        )

    def _unpin(self, lease: str) -> None:
        if lease:
            self.send("COMMIT_RETRIEVE", m.Commit(lease))

    def _receive_chunks(self, reply: m.RetrievePlan, positions: Sequence[int]) -> Future[Sequence[memoryview]]:
        payload = m.RetrieveCpuChunks(reply.lease, pack_indices(positions))
        lengths = [reply.ranges[at].length for at in positions]
        sent = self._bulk("RETRIEVE_CPU_CHUNKS", payload, (), sum(lengths))

        def received(answer: Answer) -> Sequence[memoryview]:
            if not as_response(answer.payload, m.ChunksSent).held:
                return ()
            if [buffer.nbytes for buffer in answer.buffers] != lengths:
                raise ProtocolError("the server sent buffers of wrong sizes")
            return answer.buffers

        return mapped(sent, received)

    # Server-driven transports: STORE and RETRIEVE carry block ids, and the server moves the bytes, see
    # `ServerDrivenLink`. A future of a transfer resolves only once the server no longer touches the engine's blocks.

    def store(
        self, transfer: Transfer, *, event: bytes = b"", stream_hook: StreamHook | None = None
    ) -> Future[StoreOutcome]:
        def outcome_of(reply: m.TransferReply) -> StoreOutcome:
            return reply.outcome if reply.ok or not reply.outcome.ok else StoreOutcome(dropped=transfer.objects)

        return self._server_driven("STORE", transfer, 0, event, stream_hook, outcome_of, transfer.failed)

    def load(
        self, transfer: Transfer, skip_tokens: int, *, event: bytes = b"", stream_hook: StreamHook | None = None
    ) -> Future[LoadOutcome]:
        def outcome_of(reply: m.TransferReply) -> LoadOutcome:
            return LoadOutcome(reply.ok, reply.reason)

        return self._server_driven(
            "RETRIEVE", transfer, skip_tokens, event, stream_hook, outcome_of, LoadOutcome.failed
        )

    def gather_block(self, registration: Registration, blocks: Sequence[int], event: bytes) -> list[bytes]:
        payload = m.GatherBlock(registration.instance_id, pack_block_ids([[block] for block in blocks]), event)
        # Urgent, since a reconnect asks this too.
        return list(self.request("GATHER_BLOCK", payload, m.GatheredBlock, urgent=True).groups)

    def _server_driven(
        self,
        name: str,
        transfer: Transfer,
        skip_tokens: int,
        event: bytes,
        stream_hook: StreamHook | None,
        outcome_of: Callable[[m.TransferReply], R],
        failed: Callable[[BaseException], R],
    ) -> Future[R]:
        packed, instance_id = pack_block_ids(transfer.block_ids), transfer.registration.instance_id
        payload = m.TransferRequest(transfer.key, instance_id, packed, event, skip_tokens, transfer.content)
        silence_s = self.deadlines.store_s if name == "STORE" else self.deadlines.load_s
        sent = self._connection.begin(name, payload, timeout=self.deadlines.of(name), silence_s=silence_s)
        future: Promise[R] = Promise(sent.cancel, stream_hook=stream_hook)

        def answered(reply: Future[Answer]) -> None:
            if (error := reply.exception()) is not None:
                log.warning("%s of request %s failed: %s", name, transfer.request_id, error)
                result = failed(error)
            else:
                try:
                    result = outcome_of(as_response(reply.result(0).payload, m.TransferReply))
                except KVFrameworkError as failure:
                    result = failed(failure)
            if isinstance(error, DeadlineExceeded):
                self._when_untouched(sent, lambda: future.set_result(result))
                # Last, since it may raise an error of the device's driver.
                future.expire_holds()
            else:
                future.set_result(result)

        sent.add_done_callback(answered)
        return future

    def _when_untouched(self, sent: Future[Answer], then: Callable[[], object]) -> None:
        """After a deadline the server may still touch the blocks: cancel the request, and call `then` once the server
        no longer touches them, or has ended. Runs in the connection's I/O thread."""

        def answered(cancel: Future[Answer]) -> None:
            if isinstance(cancel.exception(), DeadlineExceeded):
                self._when_untouched(sent, then)
            else:
                then()

        self._connection.cancel(sent).add_done_callback(answered)
