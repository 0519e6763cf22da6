"""Owns the sending side of the server's sockets: every response and error frame leaves through here.

Serving thread only. A slow or vanished peer costs a counter, never time.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Sequence

import zmq

from kvframework.api import Buffer, Message
from kvframework.errors import HelloRequired
from kvframework.messaging import frames_io
from kvframework.messaging.listeners import Listeners
from kvframework.wire.frames import ERROR_TYPE, ErrorPayload, error_payload, join

logger = logging.getLogger(__name__)


class ReplySender:
    """Sends to identities. Borrows the listeners."""

    def __init__(self, listeners: Listeners, counters: dict[str, int]) -> None:
        self._listeners = listeners
        self._counters = counters

    def send(
        self, identity: bytes, request_id: int, type_name: str, payload: Message, buffers: Sequence[Buffer] = ()
    ) -> bool:
        """False if the peer is gone or does not read. Raises if the message cannot be encoded; nothing is sent then."""
        frames = frames_io.outgoing(join(request_id, type_name, payload, buffers))
        try:
            self._listeners.send(identity, frames)
        except zmq.Again:
            self._counters["dropped"] += 1
            return False
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                logger.error("cannot send a reply: %s", error)
            self._counters["unroutable"] += 1
            return False
        self._counters["responses"] += 1
        return True

    def send_farewell(self, identity: bytes, request_id: int, error: HelloRequired) -> None:
        """Tells a peer whose session has ended to say HELLO again, if it is there: most have just left. Not counted,
        never raises."""
        frames = frames_io.outgoing(join(request_id, ERROR_TYPE, error_payload(error), ()))
        with contextlib.suppress(zmq.ZMQError):
            self._listeners.send(identity, frames)

    def send_error(self, identity: bytes, request_id: int, error: BaseException) -> bool:
        """Tells the peer of `error`; never raises."""
        payload = error_payload(error)
        self._counters["errors"] += 1
        self._counters[f"errors.{payload.code}"] += 1
        try:
            return self.send(identity, request_id, ERROR_TYPE, payload)
        except Exception:  # an error text that cannot be encoded, or that is far too long
            logger.exception("an error frame cannot be sent as it is")
            return self.send(identity, request_id, ERROR_TYPE, ErrorPayload(payload.code, "see the server's log"))
