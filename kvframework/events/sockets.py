"""The two sockets of the publisher: XPUB, which says when a reader subscribes, and ROUTER, which repeats. Bound by the
thread that makes them, then used by one other."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import socket
import time
from collections.abc import Callable, Collection
from functools import partial

import zmq

from kvframework.config import EventsConfig, parse_endpoint
from kvframework.errors import EndpointError
from kvframework.events.history import Numbered
from kvframework.messaging import frames_io
from kvframework.messaging.curve import ServerKeys
from kvframework.messaging.server.admission import ZapHandler, drop_new_connections
from kvframework.messaging.server.sockets import EndpointFiles, bound_tcp, socket_umask

log = logging.getLogger(__name__)

# Topics and questions are short.
_MAX_ASKED_BYTES = 1024
# Of topics that readers have subscribed to, together: libzmq keeps them, in forty times the memory. Not less what they
# have given up, since who lies about that would not be noticed.
MOST_SUBSCRIBED_BYTES = 1 << 20
# An earlier server, which ends, may still listen.
_BIND_S = 5.0
_BIND_STEP_S = 0.05
_LINGER_MS = 1000
_MOST_UNREAD = 64
_MOST_UNTAKEN = 16
_NUMBER_BYTES = 8
# Messages that are read before others are sent: a reader that writes without an end has its turn, and no more.
_MOST_AT_ONCE = 1000


class EventSockets:
    """Bound to the endpoints of `[events]`. Over ipc:// processes of this user and of `admit_uids` may read, over
    tcp:// the clients that `keys` admit, all with None. Raises `EndpointError`; blocks for seconds while another
    process listens there."""

    def __init__(self, config: EventsConfig, *, keys: ServerKeys | None, admit_uids: Collection[int] = ()) -> None:
        self.counters = {"curve_refused": 0}
        self._config = config
        self._keys = keys
        self._admit_uids = admit_uids
        self._admitting = True
        self._open()

    def _open(self) -> None:
        config, keys = self._config, self._keys
        self._subscribed_bytes = 0
        with contextlib.ExitStack() as undo:
            # Released last: a socket that ends removes whatever lies at its path.
            self._files = undo.enter_context(contextlib.ExitStack())
            self._doors: list[Callable[[bool], None]] = []
            context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
            undo.callback(context.term)
            self._zap: ZapHandler | None = None
            if keys is not None:
                self._zap = ZapHandler(context, keys.admitted, self.counters)
                undo.callback(self._zap.close)
            self._news: frames_io.Socket = context.socket(zmq.XPUB)
            self._questions: frames_io.Socket = context.socket(zmq.ROUTER)
            undo.callback(self._news.close)
            undo.callback(self._questions.close)
            self._news.setsockopt(zmq.XPUB_VERBOSER, 1)
            # libzmq takes in all that is there whenever the socket is used, and would not come to an end.
            self._news.setsockopt(zmq.RCVHWM, _MOST_UNTAKEN)
            self._bind(self._news, config.endpoint, keys, "endpoint")
            # Who takes nothing makes this process hold so many messages; a full queue is an error, not silence.
            self._questions.setsockopt(zmq.SNDHWM, _MOST_UNREAD)
            self._questions.setsockopt(zmq.ROUTER_MANDATORY, 1)
            if config.replay:
                self._bind(self._questions, config.replay, keys, "replay")
            self._undo = undo.pop_all()
        self._poller = zmq.Poller()
        for each in (self._news, self._questions, self._zap and self._zap.socket):
            if each is not None:
                self._poller.register(each, zmq.POLLIN)

    def wait(self, timeout_s: float) -> tuple[int, list[tuple[bytes, int | None]]]:
        """Return the number of new subscribers, and who asks from which number on (None: a question of another form),
        after `timeout_s` seconds at most."""
        ready = dict(self._poller.poll(math.ceil(max(timeout_s, 0.0) * 1000)))
        if self._zap is not None and self._zap.socket in ready:
            self._zap.serve()
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

    def admit(self, readers: bool) -> None:
        """Let further readers in, or keep them out: each connection is a descriptor, and libzmq ends a process that has
        none left. From any thread. Raises `OSError`."""
        self._admitting = readers
        with contextlib.ExitStack() as each:  # a door that fails leaves no other as it was
            for door in self._doors:
                each.callback(door, readers)

    def close(self) -> None:
        """Close both; blocks for a moment, in which what was sent leaves."""
        self._undo.close()

    def _begin_anew(self) -> None:
        """Disconnect all readers, since none can be by itself: those that read come back and ask for what they lack."""
        log.warning("readers have subscribed to %d bytes of topics: all are disconnected", self._subscribed_bytes)
        self._undo.close()
        self._open()
        if not self._admitting:
            self.admit(False)

    def _bind(self, socket: frames_io.Socket, endpoint: str, keys: ServerKeys | None, key: str) -> None:
        parsed = parse_endpoint(endpoint)
        socket.setsockopt(zmq.MAXMSGSIZE, _MAX_ASKED_BYTES)
        socket.setsockopt(zmq.LINGER, _LINGER_MS)
        if parsed.kind == "tcp":
            frames_io.over_tcp(socket, parsed.host)
            if keys is not None:
                keys.apply(socket)
        else:
            files = EndpointFiles(endpoint, shared=bool(self._admit_uids))
            _when_free(files.acquire)
            self._files.callback(files.release)
            self._doors.append(files.show)
            for uid in {os.geteuid(), *self._admit_uids}:
                socket.setsockopt(zmq.IPC_FILTER_UID, uid)

        def bind() -> None:
            try:
                with socket_umask(shared=parsed.kind == "ipc" and bool(self._admit_uids)):
                    if parsed.kind == "ipc":
                        socket.bind(endpoint)
                    else:
                        self._doors.append(partial(_admit_at, self._files.enter_context(bound_tcp(socket, endpoint))))
            except zmq.ZMQError as error:
                raise EndpointError(
                    f"it cannot be listened at: {error.strerror}",
                    where=f"[events] {key} = {endpoint}",
                    hint="name an address of this machine that is free",
                ) from None

        _when_free(bind)


def _admit_at(listener: socket.socket, readers: bool) -> None:
    drop_new_connections(listener, everybody=not readers)


def _when_free(take: Callable[[], None]) -> None:
    """Take what an earlier server, which ends, may still have. A mistake is said after as long."""
    until = time.monotonic() + _BIND_S
    while True:
        try:
            take()
            return
        except EndpointError:
            if time.monotonic() >= until:
                raise
            time.sleep(_BIND_STEP_S)
