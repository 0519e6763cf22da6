"""The two sockets of the publisher: XPUB, which says when a reader subscribes, and ROUTER, which repeats. Bound by the
thread that makes them, then used by one other."""

from __future__ import annotations

import logging
import math

import zmq

from kvf_events.history import Numbered
from kvf_events.options import EventsOptions
from kvframework.api.listener import ListenerContext

log = logging.getLogger(__name__)

# Topics and questions are short.
_MAX_ASKED_BYTES = 1024
# Of topics that readers have subscribed to, together: libzmq keeps them, in forty times the memory. Not less what they
# have given up, since who lies about that would not be noticed.
MOST_SUBSCRIBED_BYTES = 1 << 20
_LINGER_MS = 1000
_MOST_UNREAD = 64
_MOST_UNTAKEN = 16
_NUMBER_BYTES = 8
# Messages that are read before others are sent: a reader that writes without an end has its turn, and no more.
_MOST_AT_ONCE = 1000


class EventSockets:
    """Bound to the endpoints of `[events]`. Raises `EndpointError`; blocks for seconds while another process listens
    there."""

    def __init__(self, options: EventsOptions, context: ListenerContext) -> None:
        self._options = options
        self._context = context
        self._refused_before = 0
        self._open()

    @property
    def counters(self) -> dict[str, int]:
        return {"curve_refused": self._refused_before + self._sockets.refused}

    def _open(self) -> None:
        options, where = self._options, self._context.where
        self._subscribed_bytes = 0
        sockets = self._sockets = self._context.sockets(insecure=options.insecure)
        try:
            self._news, self._questions = sockets.socket(zmq.XPUB), sockets.socket(zmq.ROUTER)
            for each in (self._news, self._questions):
                each.setsockopt(zmq.MAXMSGSIZE, _MAX_ASKED_BYTES)
                each.setsockopt(zmq.LINGER, _LINGER_MS)
            self._news.setsockopt(zmq.XPUB_VERBOSER, 1)
            # libzmq takes in all that is there whenever the socket is used, and would not come to an end.
            self._news.setsockopt(zmq.RCVHWM, _MOST_UNTAKEN)
            sockets.bind(self._news, options.endpoint, where=f"{where} endpoint")
            # Who takes nothing makes this process hold so many messages; a full queue is an error, not silence.
            self._questions.setsockopt(zmq.SNDHWM, _MOST_UNREAD)
            self._questions.setsockopt(zmq.ROUTER_MANDATORY, 1)
            if options.replay:
                sockets.bind(self._questions, options.replay, where=f"{where} replay")
        except BaseException:
            sockets.close()
            raise
        self._poller = zmq.Poller()
        for ready in (self._news, self._questions, sockets.guard):
            if ready is not None:
                self._poller.register(ready, zmq.POLLIN)

    def wait(self, timeout_s: float) -> tuple[int, list[tuple[bytes, int | None]]]:
        """Return the number of new subscribers, and each replay request: its sender and first number (None:
        a request of another form). Waits `timeout_s` seconds at most."""
        ready = dict(self._poller.poll(math.ceil(max(timeout_s, 0.0) * 1000)))
        if self._sockets.guard in ready:
            self._sockets.serve_guard()
        subscribers = 0
        for _ in range(_MOST_AT_ONCE if self._news in ready else 0):
            try:
                change = self._news.recv(zmq.NOBLOCK)
            except zmq.Again:
                break
            if change[:1] == b"\1":
                subscribers += 1
                self._subscribed_bytes += len(change)
        asked: dict[bytes, int | None] = {}
        for _ in range(_MOST_AT_ONCE if self._questions in ready else 0):
            try:
                client, *question = self._questions.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                break
            good = len(question) == 2 and not question[0] and len(question[1]) == _NUMBER_BYTES
            # Of a client that asks often, the last question is answered.
            asked[client] = int.from_bytes(question[1], "big") if good else None
        if self._subscribed_bytes > MOST_SUBSCRIBED_BYTES:
            self._begin_anew()
        return subscribers, list(asked.items())

    def publish(self, message: Numbered) -> None:
        """Send to all subscribers. A reader that is too slow misses it, and sees that by the next number."""
        self._news.send_multipart([message.topic, message.number.to_bytes(_NUMBER_BYTES, "big"), message.payload])

    def answer(self, client: bytes, message: Numbered) -> bool | None:
        """Send to one client that has asked. False if it has not taken enough of what was sent before, None if it has
        left."""
        number = message.number.to_bytes(_NUMBER_BYTES, "big")
        try:
            self._questions.send_multipart([client, b"", message.topic, number, message.payload], zmq.NOBLOCK)
        except zmq.Again:
            return False
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            return None
        return True

    def close(self) -> None:
        """Close both; blocks for a moment, in which what was sent leaves."""
        self._sockets.close()

    def _begin_anew(self) -> None:
        """Disconnect all readers, since none can be by itself: those that read come back and ask for what they lack."""
        log.warning("disconnected all event readers, which subscribed to %d bytes of topics", self._subscribed_bytes)
        self._refused_before += self._sockets.refused
        self._sockets.close()
        self._open()
