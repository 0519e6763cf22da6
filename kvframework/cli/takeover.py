"""`kvframework serve --takeover`: L1 of the server that runs at the endpoint, handed over by it, and its end.

`kvframework.service.operator_requests` is the other side.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import socket
from collections.abc import Collection
from typing import TYPE_CHECKING

from kvframework.errors import EndpointError, KVFrameworkError
from kvframework.storage.l1.journal import own_description

if TYPE_CHECKING:
    from kvframework.client import KVClient
    from kvframework.storage.recovery import Keeper

log = logging.getLogger(__name__)

# Longer than a server takes to stop.
END_S = 10.0
_HANDED = 2
_ANSWER_S = 10.0


class HandedOver:
    """A keeper that has what the earlier server handed over, the arena and the journal; `keeper`, if there is one,
    holds it from then on."""

    def __init__(self, descriptors: Collection[int], keeper: Keeper | None) -> None:
        self._descriptors = descriptors
        self._keeper = keeper
        self.lasts = keeper is not None

    def kept(self, names: Collection[str]) -> dict[str, int]:
        held = {} if self._keeper is None else self._keeper.kept(names)
        for fd in held.values():
            os.close(fd)
        found = {}
        for name, fd in zip(names, self._descriptors, strict=False):
            # The lock of the earlier server lasts as long as its own description.
            found[name] = own_description(fd)
            os.close(fd)
            if name not in held:
                self.store(name, found[name])
        return found

    def store(self, name: str, fd: int) -> None:
        if self._keeper is not None:
            self._keeper.store(name, fd)

    def remove(self, name: str) -> None:
        if self._keeper is not None:
            self._keeper.remove(name)


def take_over(endpoint: str, pid: int, keeper: Keeper | None) -> HandedOver:
    """Have the server at `endpoint`, the process `pid` of this user, hand over L1 and end. Blocks for some seconds.
    Raises `EndpointError` if it does not end, and its refusal: nothing has changed then."""
    from kvframework.client import KVClient

    try:
        process = os.pidfd_open(pid)
    except ProcessLookupError:
        raise EndpointError(
            f"the server, process {pid}, has ended meanwhile", where=endpoint, hint="start without --takeover"
        ) from None
    # Its own, beside another that takes over: no longer than the name of any endpoint's socket with its suffix.
    path = f"{os.path.dirname(endpoint.removeprefix('ipc://'))}/{os.getpid():x}"
    with contextlib.closing(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)) as listener:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
        before = os.umask(0o177)
        try:
            listener.bind(path)
        finally:
            os.umask(before)
        try:
            listener.listen(1)
            listener.settimeout(_ANSWER_S)
            with KVClient(endpoint, name="takeover") as client:
                if not client.wait_up(_ANSWER_S):
                    client.raise_down()
                descriptors = _handed_over(client, path, listener)
        finally:
            os.unlink(path)
    try:
        ended = select.poll()
        ended.register(process, select.POLLIN)
        if not ended.poll(END_S * 1000):
            raise EndpointError(f"the server, process {pid}, does not end", where=endpoint, hint=f"kill -9 {pid}")
    finally:
        os.close(process)
    log.info("took over from process %d", pid)
    return HandedOver(descriptors, keeper)


def _handed_over(client: KVClient, path: str, listener: socket.socket) -> list[int]:
    from kvframework.wire import messages as m

    try:
        client.request("HAND_OVER", m.HandOver(path), m.Empty, timeout=_ANSWER_S)
    except KVFrameworkError:
        # It may end before its answer arrives: what counts is what it sent before.
        listener.settimeout(0.0)
        try:
            return _received(listener)
        except BlockingIOError:
            pass
        raise
    return _received(listener)


def _received(listener: socket.socket) -> list[int]:
    connection, _ = listener.accept()
    with connection:
        _, descriptors, _, _ = socket.recv_fds(connection, 64, _HANDED)
    return descriptors
