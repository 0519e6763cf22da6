"""`KVClient.hello` promises that calls are possible, so it waits for what the client sets up after the handshake."""

from __future__ import annotations

import threading

from kvframework.client import KVClient
from kvframework.wire import messages as m
from tests.core.server.in_process import serving


def test_the_first_hello_is_there_once_calls_are_possible() -> None:
    shaken, ready = threading.Event(), threading.Event()

    class Slow(KVClient):
        def _up(self, reply: m.HelloReply, arena_fd: int | None) -> None:
            super()._up(reply, arena_fd)
            assert self.hello is reply  # what is set up then needs it
            shaken.set()
            assert ready.wait(60)

    with serving() as server, Slow(server.endpoint, connect_timeout_s=60.0) as client:
        assert shaken.wait(60)
        threading.Timer(0.2, ready.set).start()
        assert client.hello.chunk_size
        client.request("NOOP", m.Empty(), m.Empty)
