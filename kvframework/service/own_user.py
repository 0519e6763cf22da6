"""Requests for the server's own user alone: a process of that user on this node, and none of `admit_uids`."""

from __future__ import annotations

import contextlib
import os
import socket
import struct

from kvframework.api.requests import ClientInfo
from kvframework.errors import RequestError


def check_own_user(client: ClientInfo, what: str) -> None:
    """Raise `RequestError` unless the client is a process of the server's own user, by the kernel's word for its
    liveness socket. `what` ends the sentence "only ... may"."""
    if _uid(client) != os.geteuid():
        raise RequestError(
            f"only a process of the server's own user may {what}",
            available=f"user {os.geteuid()} on the server's node, over ipc://",
        )


def _uid(client: ClientInfo) -> int | None:
    descriptor = client.liveness_fd() if client.local else None
    if descriptor is None:
        return None
    with contextlib.suppress(OSError), socket.socket(fileno=descriptor) as peer:
        form = struct.Struct("3i")
        credentials = peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, form.size)
        return int(form.unpack(credentials)[1])
    return None
