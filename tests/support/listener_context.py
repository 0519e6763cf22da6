"""What a server offers to a listener, without a server."""

from __future__ import annotations

from collections.abc import Collection

from kvf_hashers.sha256 import Sha256
from kvframework.api.listener import ServerTerms
from kvframework.messaging.curve import ServerKeys
from kvframework.messaging.server.sockets import ListenerDoors
from kvframework.service.listeners import ServerContext


def listener_context(
    *,
    where: str = "[events]",
    server: ServerTerms | None = None,
    keys: ServerKeys | None = None,
    admit_uids: Collection[int] = (),
    doors: ListenerDoors | None = None,
) -> ServerContext:
    """The context of a listener whose L1 is empty."""
    return ServerContext(
        where,
        server or ServerTerms(256, ("ipc:///run/x/server.sock",)),
        Sha256(),
        which_present=lambda keys: [False] * len(keys),
        shape_of=lambda _namespace, _salt: None,
        doors=doors or ListenerDoors(),
        keys=keys,
        admit_uids=admit_uids,
    )
