"""Owns the server under measurement: a real `kvframework serve` in a process of its own, with defaults otherwise."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import zmq

from kvframework.bench.child import BenchChild, running
from kvframework.client import KVClient
from kvframework.wire import messages as m
from kvframework.wire.frames import join
from kvframework.wire.handshake import offer

_START_S = 30.0
_READY_S = 120.0
_POLL_S = 0.005
# A bench waits where an engine would compute: a late answer is to be seen in the figures, not turned into a miss.
# The scale of clients' deadlines: a figure is worth waiting for.
PATIENT = 20.0


@dataclass(frozen=True)
class RunningServer:
    """`start_s` is the time from the start of the process to its first answer."""

    child: BenchChild
    endpoint: str
    start_s: float

    @contextmanager
    def client(self) -> Iterator[KVClient]:
        """A connected client. Waits until all of the arena may be handed out. Raises `BenchFailed`."""
        with KVClient(self.endpoint, name="bench", deadline_scale=PATIENT) as client:
            deadline = time.monotonic() + _READY_S
            while not _arena_ready(client):
                self.child.check_alive()
                if time.monotonic() > deadline:
                    raise self.child.failure(f"has not touched its arena within {_READY_S:.0f} s")
                time.sleep(_POLL_S)
            yield client


@contextmanager
def running_server(directory: Path, capacity: int, settings: Sequence[str] = ()) -> Iterator[RunningServer]:
    """A new server with `capacity` bytes of L1, and `settings` in the words of `serve --set`. Waits for its first
    answer; ends it on the way out.

    Raises `BenchFailed` with the end of its log.
    """
    endpoint = f"ipc://{directory}/server.sock"
    command = [sys.executable, "-m", "kvframework.cli.main", "serve"]
    for setting in (f"server.endpoint={endpoint}", f"l1.capacity={capacity}", *settings):
        command += ["--set", setting]
    started = time.perf_counter()
    with running("server", command, directory) as child:
        _await_answer(child, endpoint)
        yield RunningServer(child, endpoint, time.perf_counter() - started)


def _await_answer(child: BenchChild, endpoint: str) -> None:
    """Returns with the first answer. A bare socket: a client's pauses between its tries would be measured too."""
    context = zmq.Context()
    try:
        dealer = context.socket(zmq.DEALER)
        dealer.setsockopt(zmq.RECONNECT_IVL, 2)
        dealer.connect(endpoint)
        dealer.send_multipart(join(1, "HELLO", offer("bench", os.getpid())))
        deadline = time.monotonic() + _START_S
        while not dealer.poll(100):
            child.check_alive()
            if time.monotonic() > deadline:
                raise child.failure(f"did not answer within {_START_S:.0f} s")
    finally:
        context.destroy(0)


def status(client: KVClient) -> dict[str, Any]:
    """The document of REPORT_STATUS."""
    document: dict[str, Any] = msgspec.json.decode(client.request("REPORT_STATUS", m.Empty(), m.StatusReply).document)
    return document


def _arena_ready(client: KVClient) -> bool:
    _ = client.hello
    l1 = status(client)["l1"]
    return bool(l1["ready_bytes"] == l1["capacity_bytes"])
