"""A proxy between clients and a real server that changes replies on their way: a server that lies about one thing."""

from __future__ import annotations

import os
import tempfile
import threading
from collections.abc import Callable
from typing import Any

import zmq

from kvframework.api.endpoint import parse_endpoint
from kvframework.config.endpoint import LIVENESS_SUFFIX
from kvframework.wire.frames import ERROR_TYPE, decode, join, split
from kvframework.wire.protocol import REQUESTS

# Makes another reply of the server's.
Lie = Callable[[Any], Any]


class LyingProxy:
    """Clients connect to `endpoint`. The liveness socket is the server's own, so they map its arena. A reply to a
    request named in `lies` is passed on changed; `lied` counts these."""

    def __init__(self, server: str) -> None:
        self.lies: dict[str, Lie] = {}
        self.lied = 0
        self._server = server
        self._directory = tempfile.TemporaryDirectory(prefix="kvf-")
        self.endpoint = f"ipc://{self._directory.name}/s.sock"
        os.symlink(parse_endpoint(server).path + LIVENESS_SUFFIX, parse_endpoint(self.endpoint).path + LIVENESS_SUFFIX)
        self._context = zmq.Context()
        self._router = self._socket(zmq.ROUTER)
        self._router.bind(self.endpoint)
        self._behind: dict[bytes, zmq.Socket[bytes]] = {}
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run, name="lying proxy")

    def __enter__(self) -> LyingProxy:
        self._thread.start()
        return self

    def __exit__(self, *_exc: object) -> None:
        self._ending.set()
        self._thread.join()
        for each in (self._router, *self._behind.values()):
            each.close(0)
        self._context.term()
        self._directory.cleanup()

    def _socket(self, kind: int) -> zmq.Socket[bytes]:
        made = self._context.socket(kind)
        made.linger = 0
        return made

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._router, zmq.POLLIN)
        while not self._ending.is_set():
            ready = dict(poller.poll(20))
            if self._router in ready:
                identity, *request = self._router.recv_multipart()
                if identity not in self._behind:
                    self._behind[identity] = self._socket(zmq.DEALER)
                    self._behind[identity].connect(self._server)
                    poller.register(self._behind[identity], zmq.POLLIN)
                self._behind[identity].send_multipart(request)
            for identity, behind in self._behind.items():
                if behind in ready:
                    self._router.send_multipart([identity, *self._changed(behind.recv_multipart())])

    def _changed(self, frames: list[bytes]) -> list[Any]:
        reply = split(frames)
        lie = self.lies.get(reply.type)
        if lie is None or reply.type == ERROR_TYPE:
            return [*frames]
        self.lied += 1
        honest = decode(reply.payload, REQUESTS[reply.type].response, where="the proxy")
        return join(reply.request_id, reply.type, lie(honest), reply.buffers)
