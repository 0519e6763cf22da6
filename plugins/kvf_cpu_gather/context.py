"""Owns the engine half of `cpu_gather`: prepare, copy, commit. Runs in the engine's own thread, blocking.

A failure of the server is a miss: the future resolves False and one line is logged. Wrong arguments raise.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence

import torch

from kvf_cpu_gather.copying import wait_for_devices
from kvf_cpu_gather.throttle import ThrottledLog
from kvf_cpu_gather.transfer import Transfer
from kvframework.api import (
    ArenaRange,
    BlockIds,
    CacheKey,
    EngineLink,
    LayerTensors,
    Layout,
    MessagingFuture,
    Registration,
    StoreOutcome,
    TransferContext,
)
from kvframework.errors import BadLayout, BadRange, KVFrameworkError, NotRegistered

_log = logging.getLogger(__name__)


class CpuGather(TransferContext):
    """See `TransferContext`. Futures come back resolved; nothing is kept between calls but the registration."""

    def __init__(self, link: EngineLink) -> None:
        self._link = link
        self._registered: tuple[Registration, Layout] | None = None
        self._quiet = ThrottledLog(_log)

    def memory_handles(self, kv_caches: Mapping[str, LayerTensors]) -> tuple[bytes, ...]:
        return ()

    def register(self, registration: Registration, layout: Layout) -> None:
        """Raises `BadLayout` if objects are not in canonical form."""
        forms = {group.form for group in registration.desc.groups}
        if forms != {"canonical"}:
            raise BadLayout(f"objects of form {', '.join(sorted(forms))}", available="canonical", where="cpu_gather")
        self._registered = registration, layout

    def submit_store(
        self,
        request_id: str,
        key: CacheKey,
        instance_id: int,
        kv_caches: Mapping[str, LayerTensors],
        block_ids: BlockIds,
        event: torch.Event | None,
        blocks_in_chunk: Sequence[int],
    ) -> MessagingFuture[bool]:
        """Copies what the server lacks, synchronously. Raises `BadBlockIds`, `BadRange` or `BadLayout`."""
        transfer = self._checked(key, kv_caches, block_ids, blocks_in_chunk)
        dropped = StoreOutcome(dropped=transfer.chunks * len(transfer.views))
        try:
            outcome = self._store(transfer, key, instance_id, event)
        except KVFrameworkError as error:
            self._quiet.warning(f"store {error.code}", f"the KV of request {request_id!r} was not stored: {error}")
            return MessagingFuture.resolved(False, dropped)
        except Exception as error:  # noqa: BLE001 - whatever fails, the engine goes on without the cache
            self._quiet.warning("store", f"the KV of request {request_id!r} was not stored: {error}", error=error)
            return MessagingFuture.resolved(False, dropped)
        return MessagingFuture.resolved(outcome.ok, outcome)

    def submit_retrieve(
        self,
        request_id: str,
        key: CacheKey,
        instance_id: int,
        kv_caches: Mapping[str, LayerTensors],
        block_ids: BlockIds,
        event: torch.Event | None,
        blocks_in_chunk: Sequence[int],
        skip_first_n_tokens: int = 0,
    ) -> MessagingFuture[bool]:
        """Copies into the blocks, synchronously. Raises `BadBlockIds`, `BadRange` or `BadLayout`."""
        transfer = self._checked(key, kv_caches, block_ids, blocks_in_chunk)
        if not 0 <= skip_first_n_tokens <= key.end - key.start:
            raise BadRange(
                f"skip_first_n_tokens is {skip_first_n_tokens}", available=f"0 to {key.end - key.start} tokens"
            )
        try:
            held = self._retrieve(transfer, key, instance_id, event, skip_first_n_tokens)
        except KVFrameworkError as error:
            self._quiet.warning(f"load {error.code}", f"the KV of request {request_id!r} was not loaded: {error}")
            return MessagingFuture.resolved(False)
        except Exception as error:  # noqa: BLE001 - whatever fails, the engine computes the tokens
            self._quiet.warning("load", f"the KV of request {request_id!r} was not loaded: {error}", error=error)
            return MessagingFuture.resolved(False)
        return MessagingFuture.resolved(held)

    def close(self) -> None:
        self._registered = None

    def _checked(
        self,
        key: CacheKey,
        kv_caches: Mapping[str, LayerTensors],
        block_ids: BlockIds,
        blocks_in_chunk: Sequence[int],
    ) -> Transfer:
        if self._registered is None:
            raise NotRegistered("no instance is registered with this transport", where="cpu_gather")
        with torch.inference_mode():
            return Transfer(*self._registered, key, kv_caches, block_ids, blocks_in_chunk)

    def _store(self, transfer: Transfer, key: CacheKey, instance_id: int, event: torch.Event | None) -> StoreOutcome:
        arena = self._mapped()
        plan = self._link.prepare_store(key, instance_id)
        if not plan.lease:
            return plan.outcome

        def gather(place: ArenaRange, target: torch.Tensor) -> None:
            transfer.selections[place.group].gather(place.chunk, transfer.views[place.group], target)

        try:
            if event is not None:
                event.synchronize()
            with torch.inference_mode():
                transfer.each_range(arena, plan.ranges, gather)
            return _sum(plan.outcome, self._link.commit_store(plan.lease))
        except BaseException:
            self._end_quietly(self._link.abort_store, plan.lease)
            raise

    def _retrieve(
        self, transfer: Transfer, key: CacheKey, instance_id: int, event: torch.Event | None, skip_tokens: int
    ) -> bool:
        arena = self._mapped()
        plan = self._link.prepare_retrieve(key, instance_id)
        if not plan.hit:
            return False

        def scatter(place: ArenaRange, source: torch.Tensor) -> None:
            skip = skip_tokens - place.chunk * transfer.desc.chunk_tokens
            if skip < transfer.desc.chunk_tokens:
                skip_slots = max(0, skip) // transfer.compress_ratios[place.group]
                transfer.selections[place.group].scatter(place.chunk, transfer.views[place.group], source, skip_slots)

        try:
            transfer.check_complete(plan.ranges)
            if event is not None:
                event.synchronize()
            with torch.inference_mode():
                transfer.each_range(arena, plan.ranges, scatter)
                wait_for_devices(transfer.views)
        except BaseException:
            self._end_quietly(self._link.commit_retrieve, plan.lease)
            raise
        return self._link.commit_retrieve(plan.lease)

    def _mapped(self) -> memoryview:
        arena = self._link.arena()
        if arena is None:
            raise _ArenaNotMapped(
                "the server's arena is not mapped in this process",
                hint="connect over ipc:// as the server's user; cpu_gather moves no bytes over the wire",
            )
        return arena

    @staticmethod
    def _end_quietly(end: Callable[[str], object], lease: str) -> None:
        """Gives a lease back after a failure; if that fails too, it ends with the lease's time or this client."""
        try:
            end(lease)
        except KVFrameworkError as error:
            _log.debug("the lease was not given back: %s", error)


class _ArenaNotMapped(KVFrameworkError):
    """Engine and server do not share memory."""

    code = "kvf_cpu_gather.no_arena"


def _sum(planned: StoreOutcome, committed: StoreOutcome) -> StoreOutcome:
    """What became of all objects of a store: those outside the lease, and those of the lease."""
    return StoreOutcome(
        stored=planned.stored + committed.stored,
        present=planned.present + committed.present,
        in_flight=planned.in_flight + committed.in_flight,
        dropped=planned.dropped + committed.dropped,
    )
