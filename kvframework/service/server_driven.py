"""The server-driven path: STORE and RETRIEVE, where a transport's server half copies between engine memory and arena.

A copy starts on the serving thread and ends in the thread in which the transport resolves its future. Cancel has two
phases: the request's future (and so the answer to CANCEL) is resolved only once the transport no longer touches the
blocks, and a cancelled STORE is never committed."""

from __future__ import annotations

import logging
import secrets
import threading
from collections.abc import Callable, Sequence

from msgspec.structs import replace

from kvframework.api.futures import Future, Promise
from kvframework.api.keys import ObjectKey
from kvframework.api.layout import GroupDesc, check_skip
from kvframework.api.requests import ClientInfo, Handler, Message
from kvframework.api.transport import ArenaRange, CopyJob, GroupBlocks
from kvframework.errors import BadBlockIds, BadRange, NotRegistered, StorageError, TransportMismatch
from kvframework.service.contexts import RegisteredContext, own_context
from kvframework.service.keys import KeyGrid
from kvframework.service.records import Plan, Transfers
from kvframework.storage.l1.leases import INTERNAL_OWNER
from kvframework.wire import messages as m
from kvframework.wire.protocol import REQUESTS
from kvframework.wire.transfer_blocks import INDEX_BYTES, check_bound, checked_blocks, unpack_indices

log = logging.getLogger(__name__)


def _unpack(packed: Sequence[bytes], expected: Sequence[int]) -> list[list[int]]:
    """Return the u32 block ids of each layer group. Raises `BadBlockIds` for a wrong number of groups or ids."""
    if len(packed) != len(expected):
        raise BadBlockIds(f"found block ids of {len(packed)} layer groups", available=f"{len(expected)} as registered")
    result = []
    for group, (frame, count) in enumerate(zip(packed, expected, strict=True)):
        if len(frame) != count * INDEX_BYTES:
            raise BadBlockIds(
                f"the block ids have {len(frame)} bytes", where=f"block_ids[{group}]", available=f"{count} packed u32"
            )
        result.append(unpack_indices(frame, where=f"block_ids[{group}]"))
    return result


_CANARY_SALT = b"kvf/canary/1\0\0\0\0"


class ServerDrivenTransfers:
    """Transfers whose leases belong to the server itself: they end with the copy, not with the client."""

    def __init__(self, transfers: Transfers) -> None:
        self._table = transfers.table
        self._transfers = transfers

    def handlers(self) -> list[Handler]:  # type: ignore[type-arg]
        return [
            Handler(REQUESTS["STORE"], self._store),
            Handler(REQUESTS["RETRIEVE"], self._retrieve),
            Handler(REQUESTS["GATHER_BLOCK"], self._gather_block),
        ]

    def _store(
        self, client: ClientInfo, payload: m.TransferRequest, _buffers: object
    ) -> m.TransferReply | Future[Message]:
        begun = self._transfers.begun("STORE", client, payload.key, "server")
        context, grid, blocks = self._checked(client, payload, storing=True)
        wanted = grid.stored([each.first // each.per_object for each in blocks])
        plan = self._transfers.reserve(begun, payload.key, grid, wanted, owner=INTERNAL_OWNER, lease_s=None)
        if not plan.lease:
            return m.TransferReply(plan.outcome.ok, plan.outcome)

        def finish(ok: bool) -> m.TransferReply:
            if ok:
                outcome = replace(plan.outcome, stored=len(self._table.commit(plan.lease, owner=INTERNAL_OWNER)))
            else:
                self._table.abort(plan.lease, owner=INTERNAL_OWNER)
                outcome = replace(plan.outcome, dropped=plan.outcome.dropped + len(plan.ranges))
            self._transfers.end(plan.transfer, payload.content, ok=ok)
            return m.TransferReply(ok and outcome.ok, outcome, "" if ok else "cancelled or failed")

        return _run(context, self._job(payload, plan, blocks, is_store=True), finish)

    def _retrieve(
        self, client: ClientInfo, payload: m.TransferRequest, _buffers: object
    ) -> m.TransferReply | Future[Message]:
        begun = self._transfers.begun("RETRIEVE", client, payload.key, "server")
        context, grid, blocks = self._checked(client, payload, storing=False)
        if not 0 <= payload.skip_first_n_tokens < payload.key.end - payload.key.start:
            raise BadRange(
                f"skip_first_n_tokens is {payload.skip_first_n_tokens}", available="0 to the key's number of tokens"
            )
        check_skip(context.layout, payload.skip_first_n_tokens)
        plan = self._transfers.pin(begun, payload.key, grid, owner=INTERNAL_OWNER, lease_s=None)
        if not plan.lease:
            return m.TransferReply(False, reason=plan.reason)

        def finish(ok: bool) -> m.TransferReply:
            self._table.unpin(plan.lease, owner=INTERNAL_OWNER)
            self._transfers.end(plan.transfer, payload.content, ok=ok)
            return m.TransferReply(ok, reason="" if ok else "cancelled or failed")

        return _run(context, self._job(payload, plan, blocks, is_store=False), finish)

    def _gather_block(self, client: ClientInfo, payload: m.GatherBlock, _buffers: object) -> Future[Message]:
        """Copy the block as a STORE would, as often as a chunk has blocks, to a place that is never committed."""
        context = self._server_driven(client, payload.instance_id)
        desc = context.get_layout_desc(self._transfers.chunk_size)
        counts = [group.object_blocks(desc.chunk_tokens) for group in context.layout.groups]
        blocks = [block for (block,) in _unpack(payload.block_ids, [1] * len(counts))]
        for group, block in enumerate(blocks):
            check_bound(context.layout, group, block)
        scratch = [
            (ObjectKey(context.namespace, _CANARY_SALT, 0, group, secrets.token_bytes(32)).pack(), each.nbytes)
            for group, each in enumerate(desc.groups)
        ]
        result = self._table.reserve(scratch, owner=INTERNAL_OWNER, lease_s=None, use="retrieve")
        if result.lease is None or result.dropped:
            if result.lease is not None:
                self._table.abort(result.lease.id, owner=INTERNAL_OWNER)
            raise StorageError("L1 has no room for one chunk", hint="raise [l1] capacity")
        lease_id = result.lease.id
        ranges = tuple(ArenaRange(0, group, offset, desc.groups[group].nbytes) for group, offset in result.placed)
        job = CopyJob(
            is_store=True,
            arena=self._table.arena,
            ranges=ranges,
            blocks=[GroupBlocks([block] * count, count, 0, block) for block, count in zip(blocks, counts, strict=True)],
            event=payload.event,
        )

        def finish(ok: bool) -> Message:
            try:
                if not ok:
                    raise StorageError("the transport could not gather the block")
                return m.GatheredBlock(
                    tuple(
                        _first_block(job.arena, place, desc.groups[place.group], counts[place.group])
                        for place in ranges
                    )
                )
            finally:
                self._table.abort(lease_id, owner=INTERNAL_OWNER)

        return _run(context, job, finish)

    def _server_driven(self, client: ClientInfo, instance_id: int) -> RegisteredContext:
        context = own_context(self._transfers.contexts, instance_id, client)
        if context.memory is None:
            raise TransportMismatch(
                f"the engine of instance {context.instance_id} copies itself, with {context.transport}",
                available="PREPARE_STORE, COMMIT_STORE, PREPARE_RETRIEVE, COMMIT_RETRIEVE",
            )
        lost = context.memory.failure()
        if lost is not None:
            raise NotRegistered(
                f"the memory of instance {context.instance_id} is no longer open: {lost.fact}", hint="register it again"
            )
        return context

    def _checked(
        self, client: ClientInfo, payload: m.TransferRequest, *, storing: bool
    ) -> tuple[RegisteredContext, KeyGrid, Sequence[GroupBlocks]]:
        context = self._server_driven(client, payload.instance_id)
        grid = self._transfers.grid(context, payload.key)
        self._transfers.check_key(payload.key, grid.desc.chunk_tokens, payload.content)
        chunk = grid.desc.chunk_tokens
        ids = _unpack(payload.block_ids, [chunk // group.block_size * grid.chunks for group in context.layout.groups])
        blocks = checked_blocks(context.layout, chunk, chunk * grid.chunks, ids, storing=storing, bounded=True)
        return context, grid, blocks

    def _job(self, payload: m.TransferRequest, plan: Plan, blocks: Sequence[GroupBlocks], *, is_store: bool) -> CopyJob:
        return CopyJob(
            is_store=is_store,
            arena=self._table.arena,
            ranges=plan.ranges,
            blocks=blocks,
            event=payload.event,
            skip_tokens=payload.skip_first_n_tokens,
        )


def _first_block(arena: memoryview, place: ArenaRange, desc: GroupDesc, blocks: int) -> bytes:
    """Return the first block of a canonical object: the first slots of each plane and layer."""
    planes, layers = desc.shape[:2]
    row = place.length // (planes * layers)
    starts = range(place.offset, place.offset + place.length, row)
    return b"".join(arena[start : start + row // blocks] for start in starts)


def _run(context: RegisteredContext, job: CopyJob, finish: Callable[[bool], Message]) -> Future[Message]:
    """Start the copy. Cancelling the future asks the transport to stop; `finish` decides, once, what to keep."""
    decided = threading.Lock()
    ended = False

    def cancel() -> None:
        with decided:
            if ended:
                return
            job.cancelled.set()
        # Outside the lock: a transport may answer at once.
        job.cancel()

    def done(copy: Future[bool]) -> None:
        nonlocal ended
        with decided:
            ended = True
            ok = copy.exception() is None and copy.result(0) and not job.cancelled.is_set()
        error = copy.exception()
        if error is not None:
            log.warning("instance %d: a copy failed: %s", context.instance_id, error)
        try:
            reply.set_result(finish(ok))
        except Exception as failure:
            log.exception("instance %d: finishing a copy failed", context.instance_id)
            reply.set_exception(failure)

    reply: Promise[Message] = Promise(cancel)
    if context.memory is None:
        raise TransportMismatch(f"instance {context.instance_id} has no server part")
    try:
        copy = context.memory.copy(job)
    except Exception as error:  # noqa: BLE001 - an error of the plugin becomes the copy's failure
        copy = Future.failed(error)
    copy.add_done_callback(done)
    return reply
