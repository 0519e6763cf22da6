"""The server half of every device transport: the copier of each instance, and its copies' futures.

Called from the serving thread; never blocks, except `close` at the end of the server.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from kvframework.api.driver import DeviceOptions, DeviceTransportProvider
from kvframework.api.futures import Future
from kvframework.api.layout import KVLayout, MemoryLayoutDesc
from kvframework.api.requests import ClientInfo
from kvframework.api.server_transport import CopyJob, ServerContext, ServerTransport
from kvframework.by_name import NamedCall
from kvframework.devices import pinning
from kvframework.devices.handles import read_handles
from kvframework.devices.messages import Start
from kvframework.devices.supervisor import CopierInstance, CopierSupervisor
from kvframework.errors import KVFrameworkError, RequestError
from kvframework.logs.form import chosen_log

MAX_DEVICES = 64
# A killed process ends at once, unless its driver holds it in the kernel.
CLOSE_S = 1.0


class DeviceServerTransport(ServerTransport):
    """The server half of `provider`'s devices, with one copier process per device, started with its first instance.

    Raises `PluginBroken` if another process cannot find the provider's function.
    """

    def __init__(self, provider: DeviceTransportProvider[Any], options: DeviceOptions, arena_fd: int) -> None:
        self._create = NamedCall.of(provider.create_copier, options, where=f"transport.{provider.name}")
        self._stall_s = options.stall_s
        self._arena_fd = arena_fd
        self._copiers: dict[str, CopierSupervisor] = {}

    def open(
        self, client: ClientInfo, layout: KVLayout, desc: MemoryLayoutDesc, handles: Sequence[bytes]
    ) -> DeviceContext:
        memory = read_handles(handles, layout, desc)
        copier = self._copiers.get(memory.device)
        if copier is None:
            if len(self._copiers) >= MAX_DEVICES:
                self._forget_idle()
            if len(self._copiers) >= MAX_DEVICES:
                raise RequestError(f"{MAX_DEVICES} devices are in use", where="handles")
            copier = self._copiers[memory.device] = self._start(memory.device)
        return DeviceContext(copier, copier.open(layout, desc, handles, client.liveness_fd()))

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

    def _start(self, device: str) -> CopierSupervisor:
        start = Start(self._create, device, chosen_log(), pinning.SLICE_BYTES)
        return CopierSupervisor(start, self._arena_fd, stall_s=self._stall_s)


class DeviceContext(ServerContext):
    """One instance's memory at its copier."""

    def __init__(self, copier: CopierSupervisor, instance: CopierInstance) -> None:
        self._copier = copier
        self._instance = instance

    def copy(self, job: CopyJob) -> Future[bool]:
        return self._copier.copy(self._instance, job)

    def close(self) -> None:
        self._copier.close_instance(self._instance)

    def when_closed(self) -> Future[None] | None:
        return self._instance.closed

    def when_open(self) -> Future[None] | None:
        return self._instance.opened

    def failure(self) -> KVFrameworkError | None:
        return self._instance.failure
