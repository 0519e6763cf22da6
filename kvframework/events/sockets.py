"""The two sockets of the publisher: XPUB, which says when a reader subscribes, and ROUTER, which repeats. Bound by the
thread that makes them, then used by one other."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Collection
from pathlib import Path

import zmq

from kvframework.config import EventsConfig, ipc_path, parse_endpoint, prepare_private_directory
from kvframework.errors import EndpointError
from kvframework.events.history import Numbered
from kvframework.messaging import frames_io
from kvframework.messaging.curve import ServerKeys
from kvframework.messaging.server.endpoint_files import socket_umask
from kvframework.messaging.server.newcomers.zap import ZapHandler

# Topics and questions are short.
_MAX_ASKED_BYTES = 1024
# An earlier server, which ends, may still listen.
_BIND_S = 5.0
_BIND_STEP_S = 0.05
_LINGER_MS = 1000
_MOST_UNREAD = 64
_NUMBER_BYTES = 8


class EventSockets:
    """Bound to the endpoints of `[events]`. Over ipc:// processes of this user and of `admit_uids` may read, over
    tcp:// the clients that `keys` admit, all with None. Raises `EndpointError`; blocks for seconds while another
    process listens there."""

    def __init__(self, config: EventsConfig, *, keys: ServerKeys | None, admit_uids: Collection[int] = ()) -> None:
        self.counters = {"curve_refused": 0}
        self._admit_uids = admit_uids
        self._paths: list[str] = []
        with contextlib.ExitStack() as undo:
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
            self._bind(self._news, config.endpoint, keys, "endpoint")
            # Who takes nothing makes this process hold so many messages; a full queue is an error, not silence.
            self._questions.setsockopt(zmq.SNDHWM, _MOST_UNREAD)
            self._questions.setsockopt(zmq.ROUTER_MANDATORY, 1)
            if config.replay:
                self._bind(self._questions, config.replay, keys, "replay")
            self._undo = undo.pop_all()
        self._poller = zmq.Poller()
        for socket in (self._news, self._questions, self._zap and self._zap.socket):
            if socket is not None:
                self._poller.register(socket, zmq.POLLIN)

    def wait(self, timeout_s: float) -> tuple[int, list[tuple[bytes, int | None]]]:
        """Return the number of new subscribers, and who asks from which number on (None: a question of another form),
        after `timeout_s` seconds at most."""
        ready = dict(self._poller.poll(round(max(timeout_s, 0.0) * 1000)))
        if self._zap is not None and self._zap.socket in ready:
            self._zap.serve()
        subscribers = 0
        while self._news in ready:
            try:
                subscribers += self._news.recv(zmq.NOBLOCK)[:1] == b"\1"
            except zmq.Again:
                break
        asked: dict[bytes, int | None] = {}
        while self._questions in ready:
            try:
                client, *question = self._questions.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                break
            good = len(question) == 2 and not question[0] and len(question[1]) == _NUMBER_BYTES
            # Of a client that asks often, the last question is answered.
            asked[client] = int.from_bytes(question[1], "big") if good else None
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
        self._undo.close()
        for path in self._paths:
            with contextlib.suppress(OSError):
                os.unlink(path)

    def _bind(self, socket: frames_io.Socket, endpoint: str, keys: ServerKeys | None, key: str) -> None:
        parsed = parse_endpoint(endpoint)
        socket.setsockopt(zmq.MAXMSGSIZE, _MAX_ASKED_BYTES)
        socket.setsockopt(zmq.LINGER, _LINGER_MS)
        if parsed.kind == "tcp":
            frames_io.over_tcp(socket, parsed.host)
            if keys is not None:
                keys.apply(socket)
        else:
            shared = bool(self._admit_uids)
            prepare_private_directory(Path(ipc_path(endpoint)).parent, shared=shared)
            for uid in {os.geteuid(), *self._admit_uids}:
                socket.setsockopt(zmq.IPC_FILTER_UID, uid)
        until = time.monotonic() + _BIND_S
        while True:
            try:
                with socket_umask(shared=parsed.kind == "ipc" and bool(self._admit_uids)):
                    socket.bind(endpoint)
                break
            except zmq.ZMQError as error:
                if error.errno != zmq.EADDRINUSE or time.monotonic() >= until:
                    raise EndpointError(
                        f"it cannot be listened at: {error.strerror}",
                        where=f"[events] {key} = {endpoint}",
                        hint="name an address of this machine that is free",
                    ) from None
                time.sleep(_BIND_STEP_S)
        if parsed.kind == "ipc":
            self._paths.append(parsed.path)
