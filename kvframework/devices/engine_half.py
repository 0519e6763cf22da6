"""Owns the engine half of every device transport: lending the engine's memory, recording events, sending requests.

Called from the engine's thread; nothing here waits for the device or the server, except `gather_block` at registration.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from kvframework.api import (
    BlockIds,
    CacheKey,
    EngineDriver,
    EngineLink,
    KVLayout,
    LayerTensors,
    Layout,
    MessagingFuture,
    Registration,
    StoreOutcome,
    TransferContext,
    check_skip,
    touched_blocks,
)
from kvframework.devices.handles import Views, lend
from kvframework.errors import BadBlockIds, BadRange, DeviceError, NotRegistered, TransportMismatch
from kvframework.logs.limit import LogLimit

if TYPE_CHECKING:
    import torch

log = logging.getLogger(__name__)
log.addFilter(LogLimit())


class DeviceTransfer(TransferContext):
    """See `TransferContext`. Owns `driver` and closes it. The engine's tensors stay where they were at registration.

    `faults` counts the submits that the engine's half of the driver failed.
    """

    def __init__(self, link: EngineLink, driver: EngineDriver[Any]) -> None:
        self._link = link
        self._driver = driver
        self._layout: Layout | None = None
        self._declared: KVLayout | None = None
        self._registration: Registration | None = None
        self._caches: Mapping[str, LayerTensors] | None = None
        self._places: list[tuple[int, tuple[int, ...]]] = []
        self._device = ""
        self._events = _EventPool(driver)
        self.faults = 0

    def declared(self, layout: Layout, declared: KVLayout) -> None:
        self._layout, self._declared = layout, declared

    def memory_handles(self, kv_caches: Mapping[str, LayerTensors]) -> tuple[bytes, ...]:
        """Raises `DeviceError` for memory that cannot be lent, `BadLayout` for memory on several devices."""
        if self._layout is None or self._declared is None:
            raise NotRegistered("the tensors are not declared", where="memory_handles")
        views = self._layout.block_views(self._declared, kv_caches)
        self._device, handles = lend(views, self._declared, self._driver.export)
        self._caches, self._places = kv_caches, _places(views)
        return handles

    def register(self, registration: Registration, layout: Layout) -> None:
        self._registration = registration

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
        """Records an event behind the engine's work and asks for the copy; False at once if the driver cannot record
        it. Raises `BadBlockIds` or `BadRange`."""
        self._check(key, kv_caches, block_ids, blocks_in_chunk, storing=True)
        return self._submit("STORE", key, instance_id, block_ids, event, 0)

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
        """Likewise. Once the future is resolved the device has written the blocks: any stream may read them."""
        registration = self._check(key, kv_caches, block_ids, blocks_in_chunk, storing=False)
        tokens = key.end - key.start
        if not 0 <= skip_first_n_tokens <= tokens:
            raise BadRange(f"skip_first_n_tokens is {skip_first_n_tokens}", available=f"0 to {tokens} tokens")
        check_skip(registration.layout, skip_first_n_tokens)
        if skip_first_n_tokens == tokens:
            return MessagingFuture.resolved(True)
        return self._submit("RETRIEVE", key, instance_id, block_ids, event, skip_first_n_tokens)

    def gather_block(self, kv_caches: Mapping[str, LayerTensors], blocks: Sequence[int]) -> list[bytes]:
        registration = self._registered()
        with self._events.recorded(self._device, None) as handle:
            return self._link.gather_block(registration.instance_id, blocks, handle)

    def close(self) -> None:
        self._registration = None
        self._events.close()
        self._driver.close()

    def _submit(
        self, kind: str, key: CacheKey, instance_id: int, block_ids: BlockIds, event: object, skip_tokens: int
    ) -> MessagingFuture[bool]:
        # Recorded before the request leaves: the copier must never see an event that was not.
        try:
            lent = self._events.take(self._device, event)
        except DeviceError as error:
            # The engine goes on without its cache.
            self.faults += 1
            log.error("instance %d: no event could be recorded, which is a miss: %s", instance_id, error)
            chunks = (key.end - key.start) // self._registered().desc.chunk_tokens
            dropped = StoreOutcome(dropped=chunks * len(block_ids)) if kind == "STORE" else None
            return MessagingFuture.resolved(False, dropped)
        try:
            future = self._link.submit(kind, key, instance_id, block_ids, lent.handle, skip_tokens)
        except BaseException:
            self._events.give_back(lent)
            raise
        future.hold = self._driver.hold
        future.add_done_callback(lambda _: self._events.give_back(lent))
        return future

    def _registered(self) -> Registration:
        if self._registration is None:
            raise NotRegistered("no instance is registered with this transport")
        return self._registration

    def _check(
        self,
        key: CacheKey,
        kv_caches: Mapping[str, LayerTensors],
        block_ids: BlockIds,
        blocks_in_chunk: Sequence[int],
        *,
        storing: bool,
    ) -> Registration:
        registration = self._registered()
        layout, chunk = registration.layout, registration.desc.chunk_tokens
        chunks, rest = divmod(key.end - key.start, chunk)
        if rest or chunks < 1 or key.start < 0 or key.start % chunk:
            raise BadRange(f"tokens {key.start} to {key.end}", available=f"whole chunks of {chunk} tokens")
        expected = [chunk // group.block_size for group in layout.groups]
        if list(blocks_in_chunk) != expected:
            raise BadBlockIds(f"blocks_in_chunk is {list(blocks_in_chunk)}", available=f"{expected}")
        if len(block_ids) != len(expected):
            raise BadBlockIds(f"{len(block_ids)} lists of block ids", available=f"{len(expected)}, one per layer group")
        for index, (group, ids) in enumerate(zip(layout.groups, block_ids, strict=True)):
            where = f"layer group {index}"
            if len(ids) != expected[index] * chunks:
                raise BadBlockIds(
                    f"{len(ids)} block ids", where=where, available=f"{expected[index] * chunks} for these tokens"
                )
            touched = touched_blocks(group, chunk, ids, storing=storing)
            used = touched.ids[touched.first :]
            if used and not (min(used) >= 0 and max(used) < layout.blocks_of(index)):
                wrong = min(used) if min(used) < 0 else max(used)
                raise BadBlockIds(f"block id {wrong}", where=where, available=f"0 to {layout.blocks_of(index) - 1}")
        if kv_caches is not self._caches:
            self._check_same(kv_caches)
        return registration

    def _check_same(self, kv_caches: Mapping[str, LayerTensors]) -> None:
        assert self._layout is not None
        assert self._declared is not None
        if _places(self._layout.block_views(self._declared, kv_caches)) != self._places:
            raise TransportMismatch(
                "these are not the tensors that were registered",
                where="kv_caches",
                available="memory that stays where it is",
                hint="register again, or use cpu_gather",
            )


class _Lent:
    """An event that a request under way refers to."""

    __slots__ = ("event", "handle")

    def __init__(self, event: object, handle: bytes) -> None:
        self.event = event
        self.handle = handle


class _EventPool:
    """Interprocess events, each used again only once the request that named it is done. Thread-safe."""

    def __init__(self, driver: EngineDriver[Any]) -> None:
        self._driver = driver
        self._lock = threading.Lock()
        self._spare: list[_Lent] = []
        self._closed = False

    def take(self, device: str, ready: object) -> _Lent:
        """An event that is recorded behind `ready`, see `EngineDriver.record`."""
        with self._lock:
            lent = self._spare.pop() if self._spare else None
        if lent is None:
            return self._new(device, ready)
        try:
            self._driver.record(lent.event, ready)
        except BaseException:
            # Kept, since the copier has it open: another one might get the same handle.
            self.give_back(lent, failed=True)
            raise
        return lent

    def _new(self, device: str, ready: object) -> _Lent:
        event = self._driver.create_event(device)
        try:
            lent = _Lent(event, self._driver.export_event(event))
            self._driver.record(event, ready)
        except BaseException:
            self._destroy(event)
            raise
        return lent

    def give_back(self, lent: _Lent, *, failed: bool = False) -> None:
        """What has failed is taken again after those that work."""
        with self._lock:
            if not self._closed:
                self._spare.insert(0 if failed else len(self._spare), lent)
                return
        self._destroy(lent.event)

    def close(self) -> None:
        with self._lock:
            self._closed = True
            spare, self._spare = self._spare, []
        for lent in spare:
            self._destroy(lent.event)

    def recorded(self, device: str, ready: object) -> _Recorded:
        return _Recorded(self, device, ready)

    def _destroy(self, event: object) -> None:
        try:
            self._driver.destroy_event(event)
        except DeviceError:
            return  # the driver is closed already: its events went with it


class _Recorded:
    """An event for the time of a `with`."""

    def __init__(self, pool: _EventPool, device: str, ready: object) -> None:
        self._pool = pool
        self._lent = pool.take(device, ready)

    def __enter__(self) -> bytes:
        return self._lent.handle

    def __exit__(self, *_exc: object) -> None:
        self._pool.give_back(self._lent)


def _places(views: Views) -> list[tuple[int, tuple[int, ...]]]:
    return [(view.data_ptr(), tuple(view.stride())) for group in views for plane in group for view in plane]
