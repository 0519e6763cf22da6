"""Owns the server-driven path: STORE and RETRIEVE, where a transport's server half copies between engine memory and
arena.

Started on the serving thread; ends in whichever thread the transport resolves its future. Cancel has two phases: the
request's future (and so the answer to CANCEL) is resolved only once the transport touches the blocks no more, and a
cancelled STORE is never committed.
"""

from __future__ import annotations

import array
import logging
import sys
import threading
from collections.abc import Callable

from kvframework.api import ArenaRange, ClientInfo, CopyJob, Handler, Message, MessagingFuture, StoreOutcome
from kvframework.engine.contexts import Contexts, RegisteredContext, own_context
from kvframework.engine.resolve import KeyGrid, KeyResolver
from kvframework.engine.transfers import grid_of, outcome_of, placed_ranges
from kvframework.errors import BadBlockIds, BadRange, TransportMismatch
from kvframework.storage.manager import StorageManager
from kvframework.storage.objects import INTERNAL_OWNER
from kvframework.wire import messages as m
from kvframework.wire.table import REQUESTS

log = logging.getLogger(__name__)


class ServerDrivenTransfers:
    """Leases here belong to the server itself: they end with the copy, not with the client."""

    def __init__(self, contexts: Contexts, storage: StorageManager, resolver: KeyResolver, *, chunk_size: int) -> None:
        self._contexts = contexts
        self._storage = storage
        self._resolver = resolver
        self._chunk_size = chunk_size

    def handlers(self) -> list[Handler]:  # type: ignore[type-arg]
        return [Handler(REQUESTS["STORE"], self._store), Handler(REQUESTS["RETRIEVE"], self._retrieve)]

    def _store(
        self, client: ClientInfo, payload: m.TransferRequest, _buffers: object
    ) -> m.TransferReply | MessagingFuture[Message]:
        context, grid, block_ids = self._checked(client, payload)
        result = self._storage.reserve(
            grid.sized(), owner=INTERNAL_OWNER, request_id=payload.key.request_id, lease_s=None
        )
        if result.lease is None:
            outcome = outcome_of(result)
            return m.TransferReply(outcome.ok, outcome)
        lease_id = result.lease.id
        missing = StoreOutcome(0, result.present, result.in_flight, result.dropped + len(result.placed))

        def finish(ok: bool) -> m.TransferReply:
            if not ok:
                self._storage.abort(lease_id, owner=INTERNAL_OWNER)
                return m.TransferReply(False, missing, "cancelled or failed")
            outcome = outcome_of(result, self._storage.commit(lease_id, owner=INTERNAL_OWNER))
            return m.TransferReply(outcome.ok, outcome)

        job = self._job(context, payload, placed_ranges(grid, result), block_ids, is_store=True)
        return _run(context, job, finish)

    def _retrieve(
        self, client: ClientInfo, payload: m.TransferRequest, _buffers: object
    ) -> m.TransferReply | MessagingFuture[Message]:
        context, grid, block_ids = self._checked(client, payload)
        if not 0 <= payload.skip_first_n_tokens < payload.key.end - payload.key.start:
            raise BadRange(
                f"skip_first_n_tokens is {payload.skip_first_n_tokens}", available="0 up to the key's number of tokens"
            )
        wanted = grid.needed(grid.chunks)
        keys = [grid.flat[index] for index in wanted]
        lease = self._storage.pin(keys, owner=INTERNAL_OWNER, request_id=payload.key.request_id, lease_s=None)
        if lease is None:
            return m.TransferReply(False, reason="not all objects are in L1")

        def finish(ok: bool) -> m.TransferReply:
            self._storage.unpin(lease.id, owner=INTERNAL_OWNER)
            return m.TransferReply(ok, reason="" if ok else "cancelled or failed")

        groups = len(grid.desc.groups)
        ranges = tuple(
            ArenaRange(index // groups, index % groups, stored.offset, stored.length)
            for index, stored in zip(wanted, lease.objects, strict=True)
        )
        job = self._job(context, payload, ranges, block_ids, is_store=False)
        return _run(context, job, finish)

    def _checked(
        self, client: ClientInfo, payload: m.TransferRequest
    ) -> tuple[RegisteredContext, KeyGrid, list[list[int]]]:
        context = own_context(self._contexts, payload.instance_id, client)
        if context.memory is None:
            raise TransportMismatch(
                f"instance {context.instance_id} uses {context.transport}, which the engine drives",
                available="PREPARE_STORE, COMMIT_STORE, PREPARE_RETRIEVE, COMMIT_RETRIEVE",
            )
        grid = grid_of(context, payload.key, self._resolver, self._chunk_size)
        expected = [count * grid.chunks for count in context.blocks_in_chunk(self._chunk_size)]
        return context, grid, unpack_block_ids(payload.block_ids, expected, context.layout.num_blocks)

    def _job(
        self,
        context: RegisteredContext,
        payload: m.TransferRequest,
        ranges: tuple[ArenaRange, ...],
        block_ids: list[list[int]],
        *,
        is_store: bool,
    ) -> CopyJob:
        return CopyJob(
            is_store=is_store,
            arena=self._storage.arena,
            ranges=ranges,
            block_ids=block_ids,
            blocks_in_chunk=context.blocks_in_chunk(self._chunk_size),
            event=payload.event,
            skip_tokens=payload.skip_first_n_tokens,
        )


def unpack_block_ids(packed: tuple[bytes, ...], expected: list[int], num_blocks: int) -> list[list[int]]:
    """Block ids per layer group from packed little-endian u32. Raises `BadBlockIds` for another number of groups or
    ids, or an id out of range."""
    if len(packed) != len(expected):
        raise BadBlockIds(f"block ids of {len(packed)} layer groups", available=f"{len(expected)} as registered")
    result = []
    for group, (frame, count) in enumerate(zip(packed, expected, strict=True)):
        where = f"block_ids[{group}]"
        if len(frame) != count * 4:
            raise BadBlockIds(f"{len(frame)} bytes", where=where, available=f"{count} packed u32 for the key's tokens")
        ids = array.array("I", frame)
        if sys.byteorder == "big":
            ids.byteswap()
        if count and max(ids) >= num_blocks:
            raise BadBlockIds(f"block id {max(ids)}", where=where, available=f"0 to {num_blocks - 1} as registered")
        result.append(ids.tolist())
    return result


def _run(
    context: RegisteredContext, job: CopyJob, finish: Callable[[bool], m.TransferReply]
) -> MessagingFuture[Message]:
    """Starts the copy. Cancelling the returned future asks the transport to stop; `finish` decides, once, what is
    kept."""
    decided = threading.Lock()
    ended = False

    def cancel() -> None:
        with decided:
            if not ended:
                job.cancelled.set()

    def done(copy: MessagingFuture[bool]) -> None:
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
            log.exception("instance %d: a copy could not be finished", context.instance_id)
            reply.set_exception(failure)

    reply: MessagingFuture[Message] = MessagingFuture(cancel)
    if context.memory is None:
        raise TransportMismatch(f"instance {context.instance_id} has no server half")
    try:
        copy = context.memory.copy(job)
    except Exception as error:  # noqa: BLE001 - a plugin's; it becomes the copy's failure
        copy = MessagingFuture.failed(error)
    copy.add_done_callback(done)
    return reply
