"""Owns the engine half of `cpu_gather`: checks, and the choice of the way.

Over shared memory a transfer runs in the engine's own thread, as long as the server answers at once; what has to wait,
and all over the wire, goes on in a thread of this instance. A failure of the server is a miss: the future resolves
False, one line is logged, and the server's status will show it. Wrong arguments raise.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from kvf_cpu_gather.arena_path import retrieve_from_arena, store_in_arena
from kvf_cpu_gather.engine_memory import RegisteredMemory
from kvf_cpu_gather.kernel import CopyKernel
from kvf_cpu_gather.options import Path
from kvf_cpu_gather.outcomes import InDoubt
from kvf_cpu_gather.steps import Courses, Ended, Steps
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
    LostKind,
    MessagingFuture,
    Registration,
    StoreOutcome,
    TransferContext,
    check_skip,
)
from kvframework.errors import BadLayout, BadRange, Cancelled, KVFrameworkError, NotRegistered

_log = logging.getLogger(__name__)


class CpuGather(TransferContext):
    """See `TransferContext`. Futures come back resolved, unless the server is slow or bytes go over the wire; then they
    hold the tensors. Else between calls only the registration is kept, where the tensors lay, and over the wire some
    staging memory. `path` "auto": the arena where it is mapped, else the wire."""

    def __init__(self, link: EngineLink, path: Path = "auto", kernel: CopyKernel | None = None) -> None:
        self._link = link
        self._kernel = kernel
        self._path = path
        self._wire = WirePath(link)
        self._registered: RegisteredMemory | None = None
        self._quiet = ThrottledLog(_log)
        self._courses = Courses()

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
        """Copies what the server lacks. Raises `BadBlockIds`, `BadRange` or `BadLayout`."""
        transfer = self._checked(key, kv_caches, block_ids, blocks_in_chunk, storing=True)

        def ended(outcome: StoreOutcome | None, error: BaseException | None) -> tuple[bool, StoreOutcome]:
            if outcome is not None:
                return outcome.ok, outcome
            dropped = StoreOutcome(dropped=transfer.chunks * transfer.groups)
            if isinstance(error, InDoubt):
                dropped, error = error.outcome, error.error
            self._failed("stores", f"the KV of request {request_id!r} was not stored", error, transfer)
            return False, dropped

        def steps(arena: memoryview | None, ready: torch.Event | None) -> Steps[StoreOutcome]:
            if arena is None:
                return self._wire.store(transfer, key, instance_id, ready)
            return store_in_arena(self._link, arena, transfer, key, instance_id, ready)

        return self._started(steps, ended, transfer, kv_caches, event)

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
        """Copies into the blocks. Raises `BadBlockIds`, `BadRange` or `BadLayout`."""
        transfer = self._checked(key, kv_caches, block_ids, blocks_in_chunk, storing=False)
        if not 0 <= skip_first_n_tokens <= key.end - key.start:
            raise BadRange(
                f"skip_first_n_tokens is {skip_first_n_tokens}", available=f"0 to {key.end - key.start} tokens"
            )
        check_skip(transfer.layout, skip_first_n_tokens)

        def ended(held: bool | None, error: BaseException | None) -> tuple[bool, None]:
            what = f"the KV of request {request_id!r} was not loaded"
            if error is not None:
                self._failed("loads", what, error, transfer)
            elif not held:
                self._quiet.warning("lost", f"{what}: the cache does not hold all of it, or the pin on it lapsed")
            return bool(held), None

        def steps(arena: memoryview | None, ready: torch.Event | None) -> Steps[bool]:
            if arena is None:
                return self._wire.retrieve(transfer, key, instance_id, ready, skip_first_n_tokens)
            return retrieve_from_arena(self._link, arena, transfer, key, instance_id, ready, skip_first_n_tokens)

        return self._started(steps, ended, transfer, kv_caches, event)

    def gather_block(self, kv_caches: Mapping[str, LayerTensors], blocks: Sequence[int]) -> list[bytes]:
        if self._registered is None:
            raise NotRegistered("no instance is registered with this transport", where="cpu_gather")
        registration = self._registered.registration
        with torch.inference_mode():
            views = self._registered.layout.block_views(registration.layout, kv_caches)
            return gather_blocks(registration, views, blocks, self._kernel)

    def close(self) -> None:
        """Waits for a copy that has begun; transfers that wait for the server are cancelled."""
        self._courses.close()
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

    def _started(
        self,
        steps: Callable[[memoryview | None, torch.Event | None], Steps[Any]],
        ended: Ended,
        transfer: Transfer,
        kv_caches: Mapping[str, LayerTensors],
        event: torch.Event | None,
    ) -> MessagingFuture[bool]:
        """The transfer under way; whatever fails at its start, the engine goes on without the cache."""
        try:
            arena = self._arena()
            ready = event or transfer.memory.mark()
            return self._courses.start(steps(arena, ready), ended, kv_caches, here=arena is not None)
        except Exception as error:  # noqa: BLE001 - see above
            return MessagingFuture.resolved(*ended(None, error))

    def _failed(self, kind: LostKind, what: str, error: BaseException | None, transfer: Transfer) -> None:
        # What ends the process, Ctrl-C among it, is raised where it came from.
        if not isinstance(error, Exception) or isinstance(error, Cancelled):
            return
        nbytes = transfer.chunks * transfer.desc.nbytes
        self._link.lost(kind, error, nbytes)
        if isinstance(error, KVFrameworkError):
            self._quiet.warning(f"{kind} {error.code}", f"{what}: {error}")
        else:
            self._quiet.warning(kind, f"{what}: {error}", error=error)

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
