"""The ZAP handler, which libzmq asks at every CURVE handshake whether to admit the client.

Served by the server's loop; a handshake waits for the answer, and delays no other client. Not `zmq.auth`: its
authenticators need a thread or an asyncio loop, and read the directory of clients once.
"""

from __future__ import annotations

import logging
from typing import Any

import zmq

from kvframework.messaging.curve import AdmittedClients

logger = logging.getLogger(__name__)

_ADDRESS = "inproc://zeromq.zap.01"
_VERSION = b"1.0"
_PER_ROUND = 64


class ZapHandler:
    """Admits the clients whose keys are listed. Must be made before the socket that it guards, and closed after it."""

    def __init__(self, context: zmq.Context[Any], admitted: AdmittedClients, counters: dict[str, int]) -> None:
        self._admitted = admitted
        self._counters = counters
        self.socket: zmq.Socket[bytes] = context.socket(zmq.REP)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.bind(_ADDRESS)

    def serve(self) -> None:
        """Answer the waiting requests, a bounded number. Never blocks."""
        for _ in range(_PER_ROUND):
            try:
                frames = self.socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            self.socket.send_multipart(self._decide(frames))

    def close(self) -> None:
        self.socket.close(0)

    def _decide(self, frames: list[bytes]) -> list[bytes]:
        request_id = frames[1] if len(frames) > 1 else b""
        name = None
        if len(frames) == 7 and frames[0] == _VERSION and frames[5] == b"CURVE":
            name = self._admitted.name_of(frames[6])
        if name is None:
            self._counters["curve_refused"] += 1
            where = frames[3].decode("ascii", "replace") if len(frames) > 3 else "?"
            logger.warning("a client at %s was refused: its public key is not among those admitted", where)
            return [_VERSION, request_id, b"400", b"not admitted", b"", b""]
        return [_VERSION, request_id, b"200", b"", name.encode()[:255], b""]
