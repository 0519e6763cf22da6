"""The two sides of every device transport, the engine's and the server's, above the vendor's driver."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from kvf_devices import messages
from kvf_devices.driver import EngineDriver
from kvf_devices.handles import export_memory, read_handles
from kvf_devices.messages import Start
from kvf_devices.supervisor import CopierSupervisor
from kvframework.api.futures import Future, StreamHook
from kvframework.api.layout import BlockViews, KVLayout, LayerTensors, Layout, MemoryLayoutDesc
from kvframework.api.process import LogLimit, NamedCall, chosen_log
from kvframework.api.requests import ClientInfo
from kvframework.api.transport import (
    LoadOutcome,
    Registration,
    ServerContext,
    ServerDrivenLink,
    ServerTransport,
    StoreOutcome,
    Transfer,
    TransferContext,
)
from kvframework.errors import BadLayout, DeviceError, NotRegistered, RequestError

O = TypeVar("O", StoreOutcome, LoadOutcome)  # noqa: E741

log = logging.getLogger(__name__)
log.addFilter(LogLimit())


class DeviceTransfer(TransferContext):
    """The engine's side of every device transport. Owns `driver` and closes it. The engine's tensors keep their
    addresses of the registration. Nothing here waits for the device or the server, except `gather_block` at
    registration.

    `faults` counts the submits at which the engine's side of the driver failed.
    """

    def __init__(self, link: ServerDrivenLink, driver: EngineDriver[Any]) -> None:
        self._link = link
        self._driver = driver
        self._layout: Layout | None = None
        self._declared: KVLayout | None = None
        self._registration: Registration | None = None
        self._caches: Mapping[str, LayerTensors] | None = None
        self._addresses: list[int] = []
        self._places: list[tuple[int, tuple[int, ...]]] = []
        self._device = ""
        self._events = _EventPool(driver)
        self.faults = 0

    def on_layout(self, layout: Layout, declared: KVLayout) -> None:
        self._layout, self._declared = layout, declared

    def memory_handles(self, kv_caches: Mapping[str, LayerTensors]) -> tuple[bytes, ...]:
        """Return the handles of the tensors. Raises `DeviceError` for memory that cannot be exported, `BadLayout` for
        memory on several devices."""
        if self._layout is None or self._declared is None:
            raise NotRegistered("the tensors are not registered", where="memory_handles")
        views = self._layout.block_views(self._declared, kv_caches)
        self._device, handles = export_memory(views, self._declared, self._driver.export)
        self._caches, self._addresses, self._places = kv_caches, _addresses(kv_caches), _places(views)
        return handles

    def on_registered(self, registration: Registration, layout: Layout) -> None:
        self._registration = registration

    def store(self, transfer: Transfer) -> Future[StoreOutcome]:
        """Record an event behind the engine's work and request the copy; the store is dropped at once if the driver
        cannot record the event. Raises `BadLayout` for other tensors."""
        return self._sent(transfer, self._link.store, transfer.failed)

    def load(self, transfer: Transfer, skip_tokens: int) -> Future[LoadOutcome]:
        """Load likewise. Once the future is resolved the device has written the blocks: any stream may read them."""

        def send(transfer: Transfer, *, event: bytes, stream_hook: StreamHook) -> Future[LoadOutcome]:
            return self._link.load(transfer, skip_tokens, event=event, stream_hook=stream_hook)

        return self._sent(transfer, send, LoadOutcome.failed)

    def gather_block(self, kv_caches: Mapping[str, LayerTensors], blocks: Sequence[int]) -> list[bytes]:
        registration = self._registered()
        event = self._events.take(self._device, None)
        try:
            return self._link.gather_block(registration, blocks, event[1])
        finally:
            self._events.give_back(event)

    def close(self) -> None:
        self._registration = None
        self._events.close()
        self._driver.close()

    def _sent(
        self, transfer: Transfer, send: Callable[..., Future[O]], failed: Callable[[BaseException], O]
    ) -> Future[O]:
        self._registered()
        caches = transfer.kv_caches
        # A tensor of the registered mapping may have been swapped: the server would copy the former one.
        if caches is not self._caches or _addresses(caches) != self._addresses:
            self._check_same(caches)
        # Recorded before the request is sent: the copier must never see an unrecorded event.
        try:
            event = self._events.take(self._device, transfer.event)
        except DeviceError as error:
            # The engine goes on without its cache.
            self.faults += 1
            number = transfer.registration.instance_id
            log.error("instance %d: no event could be recorded, so the request is a miss: %s", number, error)
            return Future.resolved(failed(error))
        try:
            future = send(transfer, event=event[1], stream_hook=self._driver.block_stream)
        except BaseException:
            self._events.give_back(event)
            raise
        future.add_done_callback(lambda _: self._events.give_back(event))
        return future

    def _registered(self) -> Registration:
        if self._registration is None:
            raise NotRegistered("no instance is registered with this transport")
        return self._registration

    def _check_same(self, kv_caches: Mapping[str, LayerTensors]) -> None:
        assert self._layout is not None
        assert self._declared is not None
        if _places(self._layout.block_views(self._declared, kv_caches)) != self._places:
            raise BadLayout(
                "the tensors differ from the registered tensors",
                where="kv_caches",
                available="memory at a fixed address",
                hint="register again, or use cpu_gather",
            )


class _EventPool:
    """Interprocess events with their handles; each is used again only once the request that named it has ended.
    Thread-safe."""

    def __init__(self, driver: EngineDriver[Any]) -> None:
        self._driver = driver
        self._lock = threading.Lock()
        self._spare: list[tuple[Any, bytes]] = []
        self._closed = False

    def take(self, device: str, behind: object) -> tuple[Any, bytes]:
        """Return an event recorded behind `behind`, see `EngineDriver.record`."""
        with self._lock:
            pooled = self._spare.pop() if self._spare else None
        if pooled is None:
            pooled = self._new(device)
        try:
            self._driver.record(pooled[0], behind)
        except BaseException:
            # Kept, since the copier may have it open: a new event might get the same handle.
            self.give_back(pooled, failed=True)
            raise
        return pooled

    def _new(self, device: str) -> tuple[Any, bytes]:
        event = self._driver.create_event(device)
        try:
            return event, self._driver.export_event(event)
        except BaseException:
            self._destroy(event)
            raise

    def give_back(self, pooled: tuple[Any, bytes], *, failed: bool = False) -> None:
        """Take an event back. Events that failed are reused after those that work."""
        with self._lock:
            if not self._closed:
                self._spare.insert(0 if failed else len(self._spare), pooled)
                return
        self._destroy(pooled[0])

    def close(self) -> None:
        with self._lock:
            self._closed = True
            spare, self._spare = self._spare, []
        for event, _ in spare:
            self._destroy(event)

    def _destroy(self, event: object) -> None:
        # A closed driver has ended its events.
        with contextlib.suppress(DeviceError):
            self._driver.destroy_event(event)


def _addresses(kv_caches: Mapping[str, LayerTensors]) -> list[int]:
    """Return where each tensor begins. At every submit: 0.3 us a tensor, where its views take 20 us."""
    return [
        tensor.data_ptr()
        for tensors in kv_caches.values()
        for tensor in ((tensors,) if hasattr(tensors, "data_ptr") else tensors)
    ]


def _places(views: BlockViews) -> list[tuple[int, tuple[int, ...]]]:
    return [(view.data_ptr(), tuple(view.stride())) for group in views for plane in group for view in plane]


MAX_DEVICES = 64
# A killed process ends at once, unless its driver holds it in the kernel.
CLOSE_S = 1.0


class DeviceServerTransport(ServerTransport):
    """The server's side of one vendor's devices, with one copier process per device, started with its first instance.
    `create` makes the driver there. Called from the serving thread; never blocks, except `close` at the end of the
    server."""

    def __init__(self, create: NamedCall, arena_fd: int, *, stall_s: float) -> None:
        self._create = create
        self._stall_s = stall_s
        self._arena_fd = arena_fd
        self._copiers: dict[str, CopierSupervisor] = {}

    def open(
        self, client: ClientInfo, layout: KVLayout, desc: MemoryLayoutDesc, handles: Sequence[bytes]
    ) -> ServerContext:
        memory = read_handles(handles, layout, desc)
        copier = self._copiers.get(memory.device)
        if copier is None:
            if len(self._copiers) >= MAX_DEVICES:
                self._forget_idle()
            if len(self._copiers) >= MAX_DEVICES:
                raise RequestError(f"instances use {MAX_DEVICES} devices, which is the most", where="handles")
            start = Start(self._create, memory.device, chosen_log(), messages.SLICE_BYTES)
            copier = CopierSupervisor(start, self._arena_fd, stall_s=self._stall_s)
            self._copiers[memory.device] = copier
        return copier.open(layout, desc, handles, client.liveness_fd())

    def status(self) -> dict[str, object]:
        return {"devices": [copier.status() for copier in list(self._copiers.values())]}

    def close(self) -> None:
        """End all copiers; waits for that, `CLOSE_S` seconds at most."""
        for copier in self._copiers.values():
            copier.stop()
        deadline = time.monotonic() + CLOSE_S
        for copier in self._copiers.values():
            copier.join(max(deadline - time.monotonic(), 0.0))

    def _forget_idle(self) -> None:
        """Forget devices that could not be opened and may not exist, so that they take no room from others."""
        for device, copier in list(self._copiers.items()):
            if copier.idle:
                del self._copiers[device]
                copier.stop()
