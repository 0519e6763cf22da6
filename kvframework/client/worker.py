"""Owns the worker side of an engine integration: one instance's registration, its stores and its retrieves in flight.

Called from the engine's thread, which waits for the server `engine_s` at most (see `wire/client_deadlines.py`), except
in `register_kv_caches` and `close`; a transfer whose answers take longer goes on without it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

from kvframework.api import (
    BlockIds,
    CacheKey,
    EngineView,
    LayerTensors,
    LostKind,
    MessagingFuture,
    Registration,
    StoreOutcome,
    TransferContext,
    touched_blocks,
)
from kvframework.client.connection import KVClient
from kvframework.client.hashing import RequestHashes
from kvframework.client.registration import Instance, InstanceIdentity
from kvframework.errors import NotRegistered, RequestError, ServerGone

if TYPE_CHECKING:
    import torch

    # What `submit_store` and `submit_retrieve` of a transport have in common, and those of the adapter.
    TransportSubmit = Callable[
        [str, CacheKey, int, Mapping[str, LayerTensors], BlockIds, torch.Event | None, Sequence[int]],
        MessagingFuture[bool],
    ]
    AdapterSubmit = Callable[[RequestHashes, int, int, BlockIds, None, torch.Event | None], MessagingFuture[bool]]

StoreEntry = MessagingFuture[bool]
# A retrieve and the blocks it fills, so that a failed load can be named to the engine.
RetrieveEntry = tuple[MessagingFuture[bool], BlockIds]


class WorkerAdapter:
    """One instance (one rank). For one thread, except `get_finished`'s futures, which resolve anywhere.

    `store_futures` and `retrieve_futures` hold what is under way, a list per request id: chunked prefill submits
    several.
    """

    def __init__(
        self,
        client: KVClient,
        *,
        instance_id: int,
        model_name: str,
        world_size: int = 1,
        rank: int = 0,
        transport: str = "auto",
        transport_options: Mapping[str, object] | None = None,
        layout: str = "paged",
        layout_options: Mapping[str, object] | None = None,
        revision: str = "",
        quantization: str = "",
        packing: str = "",
    ) -> None:
        self.identity = InstanceIdentity(
            instance_id=instance_id,
            model_name=model_name,
            world_size=world_size,
            rank=rank,
            revision=revision,
            quantization=quantization,
            packing=packing,
            layout=layout,
            layout_options=layout_options or {},
            transport=transport,
            transport_options=transport_options or {},
        )
        self.store_futures: dict[str, list[StoreEntry]] = {}
        self.retrieve_futures: dict[str, list[RetrieveEntry]] = {}
        self._client = client
        self._instance: Instance | None = None
        self._failed_blocks: list[set[int]] = []

    def register_kv_caches(
        self, kv_caches: Mapping[str, LayerTensors], *, block_size: int, view: EngineView | None = None
    ) -> Registration:
        """Declares the engine's tensors (layer name to tensors, in layer order) and registers the instance, see
        `Instance`. After a restart of the server the instance registers again by itself."""
        if self._instance is not None:
            raise RequestError(
                f"instance {self.identity.instance_id} is already registered, perhaps with other tensors",
                hint="close() the adapter before the old tensors are freed, then register the new ones",
            )
        self._instance = Instance(self._client, self.identity, kv_caches, block_size=block_size, view=view)
        return self._instance.registration

    @property
    def registration(self) -> Registration | None:
        """The current one; None before `register_kv_caches` and after `close`."""
        return self._instance.registration if self._instance else None

    @property
    def blocks_in_chunk(self) -> list[int]:
        """Blocks of each layer group in one chunk."""
        registration = self._registered()
        return [registration.desc.chunk_tokens // group.block_size for group in registration.layout.groups]

    def key(self, request: RequestHashes, start: int, end: int) -> CacheKey:
        """The cache key of this rank for tokens `[start, end)`, both multiples of the chunk."""
        identity = self.identity
        return CacheKey(
            model_name=identity.model_name,
            world_size=identity.world_size,
            worker_id=identity.rank,
            namespace=self._registered().namespace,
            start=start,
            end=end,
            request_id=request.request_id,
            digests=request.digests(end),
            cache_salt=request.cache_salt,
        )

    def submit_store(
        self,
        request: RequestHashes,
        start: int,
        end: int,
        block_ids: BlockIds,
        kv_caches: Mapping[str, LayerTensors] | None = None,
        event: torch.Event | None = None,
    ) -> MessagingFuture[bool]:
        """Stores tokens `[start, end)` held in `block_ids` (a list per layer group). `kv_caches` replaces the
        registered tensors for engines without stable memory. False at once while the server is away, or silent for
        longer than a store waits. Until the future is resolved the blocks are read: they must stay as they are.
        `cancel()` on it ends that, at once unless a copy is under way. `future.detail` is a `StoreOutcome` in any case.
        Raises `BadRange` and `BadBlockIds` before anything is done."""
        future = self._submit(
            "stores", lambda transfer: transfer.submit_store, request, start, end, block_ids, kv_caches, event
        )
        self.store_futures.setdefault(request.request_id, []).append(future)
        return future

    def submit_retrieve(
        self,
        request: RequestHashes,
        start: int,
        end: int,
        block_ids: BlockIds,
        kv_caches: Mapping[str, LayerTensors] | None = None,
        event: torch.Event | None = None,
        skip_first_n_tokens: int = 0,
    ) -> MessagingFuture[bool]:
        """Loads tokens `[start + skip_first_n_tokens, end)` into `block_ids`, which cover `[start, end)`. False:
        compute them."""
        future = self._submit(
            "loads",
            lambda transfer: partial(transfer.submit_retrieve, skip_first_n_tokens=skip_first_n_tokens),
            request,
            start,
            end,
            block_ids,
            kv_caches,
            event,
        )
        self.retrieve_futures.setdefault(request.request_id, []).append((future, block_ids))
        return future

    def get_finished(self) -> tuple[set[str], set[str]]:
        """Request ids whose stores, and whose retrieves, have all ended since the last call. Never blocks.

        Failed loads are told by `take_failed_blocks`.
        """
        stored = {rid for rid, futures in self.store_futures.items() if all(f.query() for f in futures)}
        for request_id in stored:
            del self.store_futures[request_id]
        retrieved = {rid for rid, entries in self.retrieve_futures.items() if all(f.query() for f, _ in entries)}
        for request_id in retrieved:
            for future, block_ids in self.retrieve_futures.pop(request_id):
                if not _succeeded(future):
                    self._note_failed(block_ids)
        return stored, retrieved

    def take_failed_blocks(self) -> list[set[int]]:
        """Block ids, per layer group, of loads that failed since the last call: the engine must compute them. Filled by
        `get_finished`, so call that before."""
        failed, self._failed_blocks = self._failed_blocks, []
        return failed

    def close(self) -> None:
        """Unregisters (if the server is there) and lets the tensors go: they may be freed, and others be registered, as
        an engine does that sleeps. Waits for copies that are under way. Idempotent; does not close the client."""
        instance, self._instance = self._instance, None
        if instance is not None:
            instance.close()

    def _registered(self) -> Registration:
        if self._instance is None:
            raise NotRegistered(f"instance {self.identity.instance_id} is not registered", hint="register_kv_caches")
        return self._instance.registration

    def _submit(
        self,
        kind: LostKind,
        chosen: Callable[[TransferContext], TransportSubmit],
        request: RequestHashes,
        start: int,
        end: int,
        block_ids: BlockIds,
        kv_caches: Mapping[str, LayerTensors] | None,
        event: torch.Event | None,
    ) -> MessagingFuture[bool]:
        instance = self._instance
        storing = kind == "stores"
        if instance is None or not self._client.reachable("PREPARE_STORE" if storing else "PREPARE_RETRIEVE"):
            if instance is not None:
                desc = instance.registration.desc
                nbytes = (end - start) // desc.chunk_tokens * desc.nbytes
                self._client.lost(kind, ServerGone("the server does not answer"), nbytes)
            dropped = StoreOutcome(dropped=(end - start) // request.chunk_tokens * len(block_ids))
            return MessagingFuture.resolved(False, dropped if storing else None)
        future = chosen(instance.transfer)(
            request.request_id,
            self.key(request, start, end),
            self.identity.instance_id,
            instance.kv_caches if kv_caches is None else kv_caches,
            block_ids,
            event,
            self.blocks_in_chunk,
        )
        return instance.watch(future)

    def _note_failed(self, block_ids: BlockIds) -> None:
        if not self._failed_blocks:
            self._failed_blocks = [set() for _ in block_ids]
        registration = self.registration
        for index, (failed, ids) in enumerate(zip(self._failed_blocks, block_ids, strict=True)):
            used = ids
            if registration is not None:
                # What a load does not touch may have been given to others long ago.
                group = registration.layout.groups[index]
                touched = touched_blocks(group, registration.desc.chunk_tokens, ids, storing=False)
                used = touched.ids[touched.first :]
            failed.update(used)


def _succeeded(future: MessagingFuture[bool]) -> bool:
    return future.exception() is None and future.result(0)
