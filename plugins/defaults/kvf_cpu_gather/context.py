"""The engine half of `cpu_gather`: the choice of the path.

Over shared memory a transfer runs in the engine's own thread, as long as the server answers at once; a transfer that
has to wait, and every one over the wire, continues in a thread of this instance. A failure of the server is a miss in
the future's outcome, and one line in the log.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TypeVar, cast

import torch

from kvf_cpu_gather.engine_memory import Moves, RegisteredMemory, gather_blocks
from kvf_cpu_gather.kernel import CopyKernel
from kvf_cpu_gather.transfer_steps import Ended, Steps, TaskRunner, load_from_arena, store_in_arena
from kvf_cpu_gather.wire_path import WirePath
from kvframework.api.futures import Future
from kvframework.api.layout import CANONICAL, OPAQUE, LayerTensors, Layout
from kvframework.api.process import LogLimit
from kvframework.api.transport import (
    EngineDrivenLink,
    LoadOutcome,
    Registration,
    StoreOutcome,
    Transfer,
    TransferContext,
    error_code,
)
from kvframework.errors import BadLayout, Cancelled, KVFrameworkError, NotRegistered

O = TypeVar("O", StoreOutcome, LoadOutcome)  # noqa: E741

_log = logging.getLogger(__name__)


class CpuGather(TransferContext):
    """See `TransferContext`. Futures are returned resolved, unless the server is slow or bytes go over the wire; then
    they hold the tensors. Otherwise only the registration, the tensors' addresses, and over the wire some staging
    memory are kept between calls. `path` "auto": the arena where it is mapped, else the wire."""

    def __init__(self, link: EngineDrivenLink, path: str = "auto", kernel: CopyKernel | None = None) -> None:
        self._link = link
        self._kernel = kernel
        self._path = path
        self._wire = WirePath(link)
        self._registered: RegisteredMemory | None = None
        # A server that is down must not fill the engine's log.
        self._limit = LogLimit(1)
        self._tasks = TaskRunner()

    def on_registered(self, registration: Registration, layout: Layout) -> None:
        """Raise `BadLayout` if objects are neither canonical nor opaque blocks."""
        forms = {group.form for group in registration.desc.groups}
        if not all(form == CANONICAL or form.startswith(OPAQUE) for form in forms):
            raise BadLayout(
                f"the objects have the form {', '.join(sorted(forms))}",
                available=f"{CANONICAL}, {OPAQUE}...",
                where="cpu_gather",
            )
        self._registered = RegisteredMemory(registration, layout, self._kernel)
        if self._path != "wire":
            self._link.map_ahead()

    def store(self, transfer: Transfer) -> Future[StoreOutcome]:
        """Copy the objects that the server lacks. Raises `BadBlockIds` or `BadLayout`."""

        def steps(moves: Moves, ready: torch.Event | None, mapped: bool) -> Steps[StoreOutcome]:
            if mapped:
                return store_in_arena(self._link, transfer, moves, ready)
            return self._wire.store(transfer, moves, ready)

        failed = partial(_none_stored, transfer.objects)  # holds no tensors
        return self._started(steps, partial(self._ended, "stored", transfer.request_id, failed), transfer)

    def load(self, transfer: Transfer, skip_tokens: int) -> Future[LoadOutcome]:
        """Copy into the blocks. Raises `BadBlockIds` or `BadLayout`."""

        def steps(moves: Moves, ready: torch.Event | None, mapped: bool) -> Steps[LoadOutcome]:
            if mapped:
                return load_from_arena(self._link, transfer, moves, ready, skip_tokens)
            return self._wire.load(transfer, moves, ready, skip_tokens)

        return self._started(steps, partial(self._ended, "loaded", transfer.request_id, LoadOutcome.failed), transfer)

    def gather_block(self, kv_caches: Mapping[str, LayerTensors], blocks: Sequence[int]) -> list[bytes]:
        if self._registered is None:
            raise NotRegistered("no instance is registered with this transport", where="cpu_gather")
        registration = self._registered.registration
        with torch.inference_mode():
            return gather_blocks(registration, self._registered.views(kv_caches), blocks, self._kernel)

    def close(self) -> None:
        """Wait for a copy that has begun; transfers that wait for the server are cancelled."""
        self._tasks.close()
        self._registered = None
        self._wire.close()

    def _started(
        self, steps: Callable[[Moves, torch.Event | None, bool], Steps[O]], ended: Ended[O], transfer: Transfer
    ) -> Future[O]:
        """Start a transfer and return its future; after any failure at its start, the engine goes on without the
        cache."""
        if self._registered is None:
            raise NotRegistered("no instance is registered with this transport", where="cpu_gather")
        moves = Moves(transfer, self._registered.of(transfer.kv_caches))
        try:
            mapped = self._uses_arena()
            ready = cast("torch.Event | None", transfer.event) or moves.memory.mark()
            return self._tasks.start(steps(moves, ready, mapped), ended, transfer.kv_caches, here=mapped)
        except Exception as error:  # noqa: BLE001 - see above
            return Future.resolved(ended(None, error))

    def _ended(
        self,
        verb: str,
        request_id: str,
        failed: Callable[[BaseException], O],
        outcome: O | None,
        error: BaseException | None,
    ) -> O:
        """Return a transfer's outcome, and log why it moved nothing. Runs at its end, so it holds no tensors."""
        if outcome is None:
            assert error is not None
            outcome = failed(error)
            # An exception that ends the process, such as Ctrl-C, is raised again after this.
            is_silent = isinstance(error, Cancelled) or not isinstance(error, Exception)
            why = "" if is_silent else str(error) or repr(error)
        else:
            why = outcome.error if isinstance(outcome, StoreOutcome) else outcome.reason
        if why:
            foreign = None if isinstance(error, KVFrameworkError) else error
            if self._limit.passes((verb, outcome.error)):
                _log.warning("the KV of request %r was not %s: %s", request_id, verb, why, exc_info=foreign)
        return outcome

    def _uses_arena(self) -> bool:
        """Return whether bytes move in the arena, or over the wire."""
        mapped = self._path != "wire" and self._link.maps_arena
        if not mapped and self._path == "arena":
            raise _ArenaNotMapped(
                "the server's arena is not mapped in this process",
                hint='connect over ipc:// as the server\'s user, or leave path = "auto"',
            )
        return mapped


def _none_stored(objects: int, error: BaseException) -> StoreOutcome:
    return StoreOutcome(dropped=objects, error=error_code(error))


class _ArenaNotMapped(KVFrameworkError, code="kvf_cpu_gather.no_arena"):
    """Engine and server do not share memory.

    What to do: use `ipc://` as the server's user, or `path = "wire"`."""
