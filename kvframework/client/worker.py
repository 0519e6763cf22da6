"""The worker side of an engine integration: one instance's registration, its stores and its retrieves in flight.

Called from the engine's thread, which waits for the server `engine_s` at most (see `wire/protocol.py`), except in
`register_kv_caches` and `close`; a transfer whose answers take longer continues without it. A transport may copy in the
calling thread, as `cpu_gather` does in shared memory."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from kvframework import errors
from kvframework.api.futures import Future
from kvframework.api.installing import warn_of_missing_kernels
from kvframework.api.keys import CacheKey
from kvframework.api.layout import EngineView, LayerTensors
from kvframework.api.transport import (
    BlockIds,
    LoadGrant,
    LoadOutcome,
    LostKind,
    Registration,
    StoreOutcome,
    Transfer,
    error_code,
)
from kvframework.client.hashing import RequestHashes
from kvframework.client.instance import Instance, InstanceIdentity
from kvframework.client.kv_client import KVClient, checked_skip, checked_tokens, checked_transfer
from kvframework.client.scheduler import SchedulerAdapter
from kvframework.logs.limit import LogLimit

log = logging.getLogger(__name__)
log.addFilter(LogLimit())

O = TypeVar("O", StoreOutcome, LoadOutcome)  # noqa: E741
Filled = Sequence[Sequence[int]]


@dataclass(eq=False)
class WorkerAdapter(InstanceIdentity):
    """One instance (one rank), by its names. For one thread, except the futures, which resolve in any."""

    client: KVClient

    def __post_init__(self) -> None:
        warn_of_missing_kernels()
        # The transfers under way, a list per request id: chunked prefill submits several. With the blocks that a load
        # fills per layer group, so that a failed one can be named to the engine: copies, since engines use their lists
        # again. What a load does not touch may belong to other requests long since.
        self._stores: dict[str, list[tuple[Future[StoreOutcome], Filled]]] = {}
        self._loads: dict[str, list[tuple[Future[LoadOutcome], Filled]]] = {}
        self._instance: Instance | None = None
        self._failed_blocks: list[set[int]] = []

    def register_kv_caches(
        self, kv_caches: Mapping[str, LayerTensors], *, block_size: int, view: EngineView | None = None
    ) -> Registration:
        """Declare the engine's tensors (layer name to tensors, in layer order) and register the instance, see
        `Instance`, for the errors. Blocking. After a restart of the server the instance registers again by itself."""
        if self._instance is not None:
            raise errors.RequestError(
                f"instance {self.instance_id} is already registered",
                hint="call close() before you free the old tensors, then register the new ones",
            )
        self._instance = Instance(self.client, self, kv_caches, block_size=block_size, view=view)
        registration = self._instance.registered.own
        log.info(
            "instance %d is registered at %s: chunks of %d tokens, %.1f KiB each, namespace %s",
            self.instance_id,
            self.client.endpoint,
            registration.desc.chunk_tokens,
            registration.desc.nbytes / 1024,
            registration.namespace.hex(),
        )
        return registration

    @property
    def registration(self) -> Registration | None:
        """The current registration; None before `register_kv_caches` and after `close`. Never blocks."""
        return self._instance.registered.own if self._instance else None

    def scheduler(self) -> SchedulerAdapter:
        """Return the lookups for all ranks of this model. Raises `NotRegistered` before a registration."""
        registered = self._registered()
        return SchedulerAdapter(
            self.client,
            model_name=self.model_name,
            namespace=registered.namespace,
            chunk_tokens=registered.desc.chunk_tokens,
            world_size=registered.world_size,
            instances=(self.instance_id,),
        )

    def key(self, request: RequestHashes, start: int, end: int) -> CacheKey:
        """Return this rank's cache key for tokens `[start, end)`. Raises `BadRange` unless both are chunk multiples."""
        return self._key(self._registered(), request, start, end)

    def _key(self, of: Registration, request: RequestHashes, start: int, end: int) -> CacheKey:
        return request.key(self.model_name, of.namespace, start, end, of.world_size, of.rank)

    def submit_store(
        self,
        request: RequestHashes,
        start: int,
        end: int,
        block_ids: BlockIds,
        kv_caches: Mapping[str, LayerTensors] | None = None,
        event: object | None = None,
    ) -> Future[StoreOutcome]:
        """Store tokens `[start, end)` held in `block_ids` (a list per layer group). `kv_caches` replaces the registered
        tensors for engines without stable memory. The store is dropped at once while no server is connected, or the
        server is silent for longer than a store waits. Until the future is resolved the blocks must not change; its
        `cancel()` ends the store, at once unless a copy runs. Raises `BadRange` and `BadBlockIds` before anything is
        sent, and `BadLayout` for tensors that differ from the registered ones."""
        instance = self._instance
        if instance is None:
            objects = (end - start) // request.chunk_tokens * len(block_ids)
            dropped = StoreOutcome(dropped=objects, error=errors.NotRegistered.code)
            return _keep(self._stores, request, Future.resolved(dropped))
        transfer = self._transfer(instance, request, start, end, block_ids, kv_caches, event, storing=True)
        store = partial(instance.transfer.store, transfer)
        return _keep(self._stores, request, self._started("stores", instance, transfer, store, transfer.failed))

    def submit_retrieve(
        self,
        request: RequestHashes,
        start: int,
        end: int,
        block_ids: BlockIds,
        kv_caches: Mapping[str, LayerTensors] | None = None,
        event: object | None = None,
        skip_first_n_tokens: int = 0,
        *,
        in_pieces: bool = False,
    ) -> Future[LoadOutcome]:
        """Load tokens `[start + skip_first_n_tokens, end)` into `block_ids`, which cover `[start, end)`. Unless the
        outcome is `ok` they must be computed. A load of the whole hit of the request's last lookup needs no request to
        the server if the lookup returned a grant. `in_pieces`: a copy in this thread continues only in calls of the
        future's `advance`; `close` and the end of the connection cancel it. Raises as `submit_store` does."""
        instance = self._instance
        if instance is None:
            failed = LoadOutcome.failed(self._not_registered())
            return _keep(self._loads, request, Future.resolved(failed), [tuple(ids) for ids in block_ids])
        grant = request.grants.take(self.instance_id, start, end)
        future: Future[LoadOutcome] | None = None
        try:
            transfer = self._transfer(
                instance, request, start, end, block_ids, kv_caches, event, grant, storing=False, in_pieces=in_pieces
            )
            skipped = checked_skip(transfer.registration, transfer.tokens, skip_first_n_tokens)
            if skipped < transfer.tokens:
                load = partial(instance.transfer.load, transfer, skipped)
                future = self._started("loads", instance, transfer, load, LoadOutcome.failed)
        finally:
            if grant is not None and future is None:
                self.client.free_soon(grant.lease)
        if future is None:
            future = Future.resolved(LoadOutcome(True))  # there is nothing to load
        if in_pieces:
            # Else it would keep the session, which has nothing for it any more, until this thread goes on with it.
            self.client.cancel_when_down(future)
        # Of shards all have the same blocks.
        filled = [each.ids[each.first :] for each in transfer.blocks[: len(block_ids)]]
        return _keep(self._loads, request, future, filled)

    def batched_submit_store(
        self,
        requests: Sequence[RequestHashes],
        ranges: Sequence[tuple[int, int]],
        block_ids: Sequence[BlockIds],
        event: object | None = None,
    ) -> list[Future[StoreOutcome]]:
        """Submit a store for each request, in order, as `submit_store` does. Raises `RequestError` for lists of unequal
        length, and the errors of `submit_store` for the first item; an error of a later item fails its future."""
        _check_lengths(requests, ranges, block_ids)
        futures: list[Future[StoreOutcome]] = []
        for request, (start, end), blocks in zip(requests, ranges, block_ids, strict=True):
            try:
                futures.append(self.submit_store(request, start, end, blocks, None, event))
            except Exception as error:
                # Behind the first an exception would lose the futures of what is under way.
                if not futures:
                    raise
                self._refused("stores", request, error)
                dropped = StoreOutcome(dropped=1, error=error_code(error))  # how many objects it has is not known
                futures.append(_keep(self._stores, request, Future.resolved(dropped)))
        return futures

    def batched_submit_retrieve(
        self,
        requests: Sequence[RequestHashes],
        ranges: Sequence[tuple[int, int]],
        block_ids: Sequence[BlockIds],
        event: object | None = None,
        skip_first_n_tokens: Sequence[int] | None = None,
        *,
        in_pieces: bool = False,
    ) -> list[Future[LoadOutcome]]:
        """Submit a load for each request, in order, as `submit_retrieve` does. Raises as `batched_submit_store`."""
        skips = [0] * len(requests) if skip_first_n_tokens is None else skip_first_n_tokens
        _check_lengths(requests, ranges, block_ids, skips)
        futures: list[Future[LoadOutcome]] = []
        for request, (start, end), blocks, skip in zip(requests, ranges, block_ids, skips, strict=True):
            try:
                futures.append(
                    self.submit_retrieve(request, start, end, blocks, None, event, skip, in_pieces=in_pieces)
                )
            except Exception as error:
                if not futures:
                    raise
                self._refused("loads", request, error)
                failed = Future.resolved(LoadOutcome.failed(error))
                futures.append(_keep(self._loads, request, failed, [tuple(ids) for ids in blocks]))
        return futures

    def get_finished(self) -> tuple[set[str], set[str]]:
        """Return the request ids whose stores, and those whose retrieves, have all ended since the last call; a request
        that submits more comes again. `take_failed_blocks` has the failed loads. Never blocks."""
        stored = {rid for rid, entries in self._stores.items() if all(f.query() for f, _ in entries)}
        for request_id in stored:
            del self._stores[request_id]
        retrieved = {rid for rid, entries in self._loads.items() if all(f.query() for f, _ in entries)}
        for request_id in retrieved:
            for future, filled in self._loads.pop(request_id):
                outcome: object = future.result(0) if future.exception() is None else None
                if not (isinstance(outcome, LoadOutcome) and outcome.ok):
                    self._failed_blocks += [set() for _ in filled[len(self._failed_blocks) :]]
                    for failed, ids in zip(self._failed_blocks, filled, strict=False):
                        failed.update(ids)
        return stored, retrieved

    def take_failed_blocks(self) -> list[set[int]]:
        """Return the block ids, per layer group, of loads that failed since the last call: the engine must compute
        them. Filled by `get_finished`, so call that before."""
        failed, self._failed_blocks = self._failed_blocks, []
        return failed

    def close(self) -> None:
        """Unregister (if a server is connected) and drop the tensors: the engine may then free them and register
        others, as after a sleep. Waits for running copies. Idempotent; does not close the client."""
        instance, self._instance = self._instance, None
        if instance is not None:
            instance.close()

    def _registered(self) -> Registration:
        if self._instance is None:
            raise self._not_registered()
        return self._instance.registered.own

    def _not_registered(self) -> errors.NotRegistered:
        return errors.NotRegistered(f"instance {self.instance_id} is not registered", hint="register_kv_caches")

    def _refused(self, kind: LostKind, request: RequestHashes, error: Exception) -> None:
        log.warning("%s of request %r failed: %s", kind, request.request_id, error)
        self.client.lost(kind, error_code(error))

    def _transfer(
        self,
        instance: Instance,
        request: RequestHashes,
        start: int,
        end: int,
        block_ids: BlockIds,
        kv_caches: Mapping[str, LayerTensors] | None,
        event: object | None,
        grant: LoadGrant | None = None,
        *,
        storing: bool,
        in_pieces: bool = False,
    ) -> Transfer:
        # Once: another thread may register again meanwhile.
        registered = instance.registered
        start, end = checked_tokens(registered.own, request.request_id, start, end)
        return checked_transfer(
            registered.own,
            self._key(registered.own, request, start, end),
            instance.kv_caches if kv_caches is None else kv_caches,
            block_ids,
            event,
            # One rank's report is enough.
            request.content(start, end) if self.rank == 0 and self.client.wants_tokens(request.cache_salt) else None,
            storing=storing,
            moved=registered.moved,
            in_pieces=in_pieces,
            grant=grant,
        )

    def _started(
        self,
        kind: LostKind,
        instance: Instance,
        transfer: Transfer,
        start: Callable[[], Future[O]],
        failed: Callable[[BaseException], O],
    ) -> Future[O]:
        """Start a transfer and return its future. After a transport's failure the engine goes on without the cache."""
        if not self.client.reachable("PREPARE_STORE" if kind == "stores" else "PREPARE_RETRIEVE"):
            self.client.lost(kind, errors.ServerGone.code, transfer.nbytes)
            if transfer.grant is not None:
                self.client.free_soon(transfer.grant.lease)
            return Future.resolved(failed(errors.ServerGone("the server does not answer")))
        try:
            future = start()
            if not isinstance(future, Future):
                raise TypeError(f"the transport returned {future!r}, expected a future")
        except (errors.BadLayout, errors.BadBlockIds):
            raise  # the engine's tensors differ from those that it registered
        except Exception as error:
            known = isinstance(error, errors.KVFrameworkError)
            log.warning(
                "%s of request %r failed: %s", kind, transfer.request_id, error, exc_info=None if known else error
            )
            future = Future.resolved(failed(error))
        future.add_done_callback(partial(self._look_at, kind, instance, transfer.nbytes))
        return future

    def _look_at(
        self, kind: LostKind, instance: Instance, nbytes: int, future: Future[StoreOutcome] | Future[LoadOutcome]
    ) -> None:
        """Count a loss, and register again if the server lost this instance's memory."""
        code = _code_of(future)
        if code and code != errors.Cancelled.code:
            self.client.lost(kind, code, nbytes)
        if code == errors.NotRegistered.code:
            instance.recover()


def _keep(
    under_way: dict[str, list[tuple[Future[O], Filled]]], request: RequestHashes, future: Future[O], filled: Filled = ()
) -> Future[O]:
    under_way.setdefault(request.request_id, []).append((future, filled))
    return future


def _check_lengths(*lists: Sequence[object]) -> None:
    lengths = [len(each) for each in lists]
    if len({*lengths}) > 1:
        raise errors.RequestError(f"the lists of the batch have {lengths} items", available="lists of equal length")


def _code_of(future: Future[StoreOutcome] | Future[LoadOutcome]) -> str:
    """The code of a transfer's error, "" without one. Any other result than an outcome is an error of the transport."""
    error = future.exception()
    if error is not None:
        return error_code(error)
    outcome: object = future.result(0)
    return outcome.error if isinstance(outcome, (StoreOutcome, LoadOutcome)) else "error"
