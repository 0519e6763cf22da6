"""HAND_OVER: a next server of this node gets L1, and this one ends. `kvframework.cli.takeover` is the other side."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
from collections.abc import Callable, Sequence

from kvframework.api.requests import ClientInfo, Handler
from kvframework.errors import RequestError
from kvframework.service.own_user import check_own_user
from kvframework.wire import messages as m
from kvframework.wire.protocol import REQUESTS

log = logging.getLogger(__name__)

_SEND_S = 2.0


class HandOver:
    """`descriptors()` returns the arena and the journal, borrowed; `stop()` begins the end of this server. `done`: a
    next server has them."""

    done = False

    def __init__(self, descriptors: Callable[[], Sequence[int]], stop: Callable[[], None]) -> None:
        self._descriptors = descriptors
        self._stop = stop

    def handlers(self) -> list[Handler]:  # type: ignore[type-arg]
        return [Handler(REQUESTS["HAND_OVER"], self._hand_over, pooled=True, ordered=True)]

    def _hand_over(self, client: ClientInfo, payload: m.HandOver, _buffers: object) -> m.Empty:
        check_own_user(client, "take over from this server")
        try:
            descriptors = self._descriptors()
            with contextlib.closing(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)) as next_one:
                next_one.settimeout(_SEND_S)
                next_one.connect(payload.path)
                socket.send_fds(next_one, [b"arena, journal"], list(descriptors))
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or str(error)
            raise RequestError(f"L1 cannot be handed over: {reason}", where=os.path.basename(payload.path)) from None
        self.done = True
        log.info("process %d takes over: this server ends", client.pid)
        self._stop()
        return m.Empty()
