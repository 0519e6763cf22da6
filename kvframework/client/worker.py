"""Owns the worker side of an engine integration: one instance's registration, its stores and its retrieves in flight.

Called from the engine's thread. No call waits longer than the client's control timeout, except registration.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from kvframework.api import (
    BlockIds,
    CacheKey,
    KVLayout,
    LayerTensors,
    Layout,
    MessagingFuture,
    Registration,
    TransferContext,
)
from kvframework.client.connection import SETUP_TIMEOUT_S, KVClient
from kvframework.client.hashing import RequestHashes
from kvframework.client.registration import InstanceIdentity, create_layout, create_transport, namespace_of
from kvframework.errors import KVFrameworkError, NotRegistered, RequestError, TransportMismatch
from kvframework.wire import messages as m

if TYPE_CHECKING:
    import torch

log = logging.getLogger(__name__)

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
        self.registration: Registration | None = None
        self.store_futures: dict[str, list[StoreEntry]] = {}
        self.retrieve_futures: dict[str, list[RetrieveEntry]] = {}
        self._client = client
        self._layout: Layout | None = None
        self._declared: KVLayout | None = None
        self._transport_name = ""
        self._transfer: TransferContext | None = None
        self._kv_caches: Mapping[str, LayerTensors] = {}
        self._failed_blocks: list[set[int]] = []

    def register_kv_caches(self, kv_caches: Mapping[str, LayerTensors], *, block_size: int) -> Registration:
        """Declares the engine's tensors (layer name to tensors, in layer order) and registers the instance.

        The tensors are borrowed until `close`. Waits for the server. Raises a typed error that says what to change, or
        `ServerGone`. After a restart of the server the instance registers again by itself.
        """
        if self.registration is not None:
            raise RequestError(f"instance {self.identity.instance_id} is registered", hint="close the adapter first")
        self._layout = create_layout(self._client, self.identity)
        self._declared = self._layout.describe(kv_caches, block_size=block_size)
        self._kv_caches = kv_caches
        self._transport_name, self._transfer = create_transport(self._client, self.identity)
        self._register(urgent=False)
        self._client.when_up(self._register_again)
        if self.registration is None:
            raise NotRegistered("the registration was lost")
        return self.registration

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
        registered tensors for engines without stable memory. False at once while the server is away."""
        transfer = self._transfer
        if transfer is None or not self._client.usable:
            return self._track_store(request, MessagingFuture.resolved(False))
        key = self.key(request, start, end)
        future = transfer.submit_store(
            request.request_id,
            key,
            self.identity.instance_id,
            self._kv_caches if kv_caches is None else kv_caches,
            block_ids,
            event,
            self.blocks_in_chunk,
        )
        return self._track_store(request, future)

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
        transfer = self._transfer
        if transfer is None or not self._client.usable:
            return self._track_retrieve(request, MessagingFuture.resolved(False), block_ids)
        key = self.key(request, start, end)
        future = transfer.submit_retrieve(
            request.request_id,
            key,
            self.identity.instance_id,
            self._kv_caches if kv_caches is None else kv_caches,
            block_ids,
            event,
            self.blocks_in_chunk,
            skip_first_n_tokens,
        )
        return self._track_retrieve(request, future, block_ids)

    def batched_submit_store(
        self,
        requests: Sequence[RequestHashes],
        ranges: Sequence[tuple[int, int]],
        block_ids: Sequence[BlockIds],
        event: torch.Event | None = None,
    ) -> list[MessagingFuture[bool]]:
        """`submit_store` for each. Raises `RequestError` before the first if the lists differ in length."""
        _same_length(requests, ranges, block_ids)
        return [
            self.submit_store(request, start, end, blocks, event=event)
            for request, (start, end), blocks in zip(requests, ranges, block_ids, strict=True)
        ]

    def batched_submit_retrieve(
        self,
        requests: Sequence[RequestHashes],
        ranges: Sequence[tuple[int, int]],
        block_ids: Sequence[BlockIds],
        event: torch.Event | None = None,
    ) -> list[MessagingFuture[bool]]:
        """`submit_retrieve` for each. Raises `RequestError` before the first if the lists differ in length."""
        _same_length(requests, ranges, block_ids)
        return [
            self.submit_retrieve(request, start, end, blocks, event=event)
            for request, (start, end), blocks in zip(requests, ranges, block_ids, strict=True)
        ]

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
        """Block ids, per layer group, of loads that failed since the last call: the engine must compute them."""
        failed, self._failed_blocks = self._failed_blocks, []
        return failed

    def close(self) -> None:
        """Unregisters (if the server is there) and lets the tensors go. Idempotent; does not close the client."""
        if self._transfer is None:
            return
        self._client.forget(self._register_again)
        self._transfer.close()
        self._transfer = None
        if self.registration is not None and self._client.usable:
            try:
                payload = m.Unregister(self.identity.instance_id)
                self._client.request("UNREGISTER_KV_CACHE", payload, m.Empty, timeout=SETUP_TIMEOUT_S)
            except KVFrameworkError as error:
                log.warning("instance %d could not unregister: %s", self.identity.instance_id, error)
        self.registration = None
        self._kv_caches = {}

    def _registered(self) -> Registration:
        if self.registration is None:
            raise NotRegistered(
                f"instance {self.identity.instance_id} is not registered", hint="register_kv_caches first"
            )
        return self.registration

    def _register_again(self) -> None:
        self._register(urgent=True)
        log.info("instance %d registered again", self.identity.instance_id)

    def _register(self, *, urgent: bool) -> None:
        identity, layout, declared, transfer = self.identity, self._layout, self._declared, self._transfer
        if layout is None or declared is None or transfer is None:
            return
        if self._transport_name not in self._client.hello.transports:
            raise TransportMismatch(
                f"the server has no transport {self._transport_name!r} any more",
                available=", ".join(self._client.hello.transports),
            )
        payload = m.RegisterKvCache(
            instance_id=identity.instance_id,
            model_name=identity.model_name,
            world_size=identity.world_size,
            rank=identity.rank,
            namespace=namespace_of(self._client, identity, layout, declared),
            transport=self._transport_name,
            layout=declared,
            handles=transfer.memory_handles(self._kv_caches),
        )
        reply = self._client.request("REGISTER_KV_CACHE", payload, m.Registered, timeout=SETUP_TIMEOUT_S, urgent=urgent)
        registration = Registration(identity.instance_id, identity.rank, reply.namespace, declared, reply.desc)
        transfer.register(registration, layout)
        self.registration = registration

    def _track_store(self, request: RequestHashes, future: MessagingFuture[bool]) -> MessagingFuture[bool]:
        self.store_futures.setdefault(request.request_id, []).append(future)
        return future

    def _track_retrieve(
        self, request: RequestHashes, future: MessagingFuture[bool], block_ids: BlockIds
    ) -> MessagingFuture[bool]:
        self.retrieve_futures.setdefault(request.request_id, []).append((future, block_ids))
        return future

    def _note_failed(self, block_ids: BlockIds) -> None:
        if not self._failed_blocks:
            self._failed_blocks = [set() for _ in block_ids]
        for failed, ids in zip(self._failed_blocks, block_ids, strict=True):
            failed.update(ids)


def _succeeded(future: MessagingFuture[bool]) -> bool:
    return future.exception() is None and future.result(0)


def _same_length(*lists: Sequence[object]) -> None:
    if len({len(each) for each in lists}) > 1:
        raise RequestError(
            f"a batch of {' and '.join(str(len(each)) for each in lists)} requests, ranges and block ids",
            available="lists of equal length",
        )
