"""Owns the engine half of `cpu_gather`: checks, and the choice of the way. Runs in the engine's own thread, blocking.

A failure of the server is a miss: the future resolves False and one line is logged. Wrong arguments raise.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

import torch

from kvf_cpu_gather.arena_path import retrieve_from_arena, store_in_arena
from kvf_cpu_gather.engine_memory import RegisteredMemory
from kvf_cpu_gather.kernel import CopyKernel
from kvf_cpu_gather.options import Path
from kvf_cpu_gather.throttle import ThrottledLog
from kvf_cpu_gather.transfer import Transfer, gather_blocks
from kvf_cpu_gather.wire_path import WirePath
from kvframework.api import (
    CANONICAL,
    OPAQUE,
    BlockIds,
    CacheKey,
    EngineLink,
    LayerTensors,
    Layout,
    MessagingFuture,
    Registration,
    StoreOutcome,
    TransferContext,
    check_skip,
)
from kvframework.errors import BadLayout, BadRange, KVFrameworkError, NotRegistered

_log = logging.getLogger(__name__)


class CpuGather(TransferContext):
    """See `TransferContext`. Futures come back resolved; between calls only the registration is kept, where the
    tensors lay, and over the wire some staging memory. `path` "auto": the arena where it is mapped, else the wire."""

    def __init__(self, link: EngineLink, path: Path = "auto", kernel: CopyKernel | None = None) -> None:
        self._link = link
        self._kernel = kernel
        self._path = path
        self._wire = WirePath(link)
        self._registered: RegisteredMemory | None = None
        self._quiet = ThrottledLog(_log)

    def memory_handles(self, kv_caches: Mapping[str, LayerTensors]) -> tuple[bytes, ...]:
        return ()

    def register(self, registration: Registration, layout: Layout) -> None:
        """Raises `BadLayout` if objects are neither canonical nor opaque blocks."""
        forms = {group.form for group in registration.desc.groups}
        if not all(form == CANONICAL or form.startswith(OPAQUE) for form in forms):
            raise BadLayout(
                f"objects of form {', '.join(sorted(forms))}", available=f"{CANONICAL}, {OPAQUE}...", where="cpu_gather"
            )
        self._registered = RegisteredMemory(registration, layout, self._kernel)

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
        transfer = self._checked(key, kv_caches, block_ids, blocks_in_chunk, storing=True)
        dropped = StoreOutcome(dropped=transfer.chunks * transfer.groups)
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
        transfer = self._checked(key, kv_caches, block_ids, blocks_in_chunk, storing=False)
        if not 0 <= skip_first_n_tokens <= key.end - key.start:
            raise BadRange(
                f"skip_first_n_tokens is {skip_first_n_tokens}", available=f"0 to {key.end - key.start} tokens"
            )
        check_skip(transfer.layout, skip_first_n_tokens)
        try:
            held = self._retrieve(transfer, key, instance_id, event, skip_first_n_tokens)
        except KVFrameworkError as error:
            self._quiet.warning(f"load {error.code}", f"the KV of request {request_id!r} was not loaded: {error}")
            return MessagingFuture.resolved(False)
        except Exception as error:  # noqa: BLE001 - whatever fails, the engine computes the tokens
            self._quiet.warning("load", f"the KV of request {request_id!r} was not loaded: {error}", error=error)
            return MessagingFuture.resolved(False)
        if not held:
            why = "it was evicted, or its pin lapsed"
            self._quiet.warning("lost", f"the KV of request {request_id!r} was not loaded: {why}")
        return MessagingFuture.resolved(held)

    def gather_block(self, kv_caches: Mapping[str, LayerTensors], blocks: Sequence[int]) -> list[bytes]:
        if self._registered is None:
            raise NotRegistered("no instance is registered with this transport", where="cpu_gather")
        registration = self._registered.registration
        with torch.inference_mode():
            views = self._registered.layout.block_views(registration.layout, kv_caches)
            return gather_blocks(registration, views, blocks, self._kernel)

    def close(self) -> None:
        self._registered = None
        self._wire.close()

    def _checked(
        self,
        key: CacheKey,
        kv_caches: Mapping[str, LayerTensors],
        block_ids: BlockIds,
        blocks_in_chunk: Sequence[int],
        *,
        storing: bool,
    ) -> Transfer:
        if self._registered is None:
            raise NotRegistered("no instance is registered with this transport", where="cpu_gather")
        with torch.inference_mode():
            memory = self._registered.of(kv_caches)
            return Transfer(self._registered.registration, key, memory, block_ids, blocks_in_chunk, storing=storing)

    def _store(self, transfer: Transfer, key: CacheKey, instance_id: int, event: torch.Event | None) -> StoreOutcome:
        arena = self._arena()
        if arena is None:
            return self._wire.store(transfer, key, instance_id, event)
        return store_in_arena(self._link, arena, transfer, key, instance_id, event)

    def _retrieve(
        self, transfer: Transfer, key: CacheKey, instance_id: int, event: torch.Event | None, skip_tokens: int
    ) -> bool:
        arena = self._arena()
        if arena is None:
            return self._wire.retrieve(transfer, key, instance_id, event, skip_tokens)
        return retrieve_from_arena(self._link, arena, transfer, key, instance_id, event, skip_tokens)

    def _arena(self) -> memoryview | None:
        """The arena if bytes are to be moved there, None if over the wire."""
        arena = self._link.arena() if self._path != "wire" else None
        if arena is None and self._path == "arena":
            raise _ArenaNotMapped(
                "the server's arena is not mapped in this process",
                hint='connect over ipc:// as the server\'s user, or leave path = "auto"',
            )
        return arena


class _ArenaNotMapped(KVFrameworkError):
    """Engine and server do not share memory.

    What to do: use `ipc://` as the server's user, or `path = "wire"`."""

    code = "kvf_cpu_gather.no_arena"
