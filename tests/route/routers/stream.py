"""What stands between a server and a router, and what a worker tells beside the server."""

from __future__ import annotations

import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import msgspec
import zmq

from tests.support.server_process import ServerProcess

Frames = list[bytes]


class Between:
    """A relay of the messages at `endpoint`, to be subscribed at its own; `change` returns what becomes of a message,
    None if it is lost. Subscriptions are passed on, so that the server hears of each."""

    def __init__(self, endpoint: str, change: Callable[[Frames], Frames | None]) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="kvf-")
        self.endpoint = f"ipc://{self._folder.name}/between.sock"
        self.lost = 0
        self.passed = 0
        self._change = change
        self._context = zmq.Context()
        self._news = self._context.socket(zmq.XSUB)
        self._readers = self._context.socket(zmq.XPUB)
        for each in (self._news, self._readers):
            each.linger = 0
        self._readers.setsockopt(zmq.XPUB_VERBOSER, 1)
        self._readers.bind(self.endpoint)
        self._news.connect(endpoint)
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Between:
        self._thread.start()
        return self

    def __exit__(self, *_exc: object) -> None:
        self._stopping.set()
        self._thread.join()
        self._context.destroy()
        self._folder.cleanup()

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._news, zmq.POLLIN)
        poller.register(self._readers, zmq.POLLIN)
        while not self._stopping.is_set():
            ready = dict(poller.poll(20))
            if self._readers in ready:
                self._news.send(self._readers.recv())
            if self._news in ready:
                message = self._change(self._news.recv_multipart())
                if message is None:
                    self.lost += 1
                else:
                    self.passed += 1
                    self._readers.send_multipart(message)


def sockets(server: ServerProcess) -> tuple[str, str]:
    folder = server.endpoint.rpartition("/")[0]
    return f"{folder}/told.sock", f"{folder}/again.sock"


def changed(frames: Frames, change: Callable[[dict[str, Any]], dict[str, Any]]) -> Frames:
    topic, number, payload = frames
    at, events, rank = msgspec.msgpack.decode(payload)
    return [topic, number, msgspec.msgpack.encode([at, [change(each) for each in events], rank])]


class OwnEvents:
    """A worker that tells of its GPU, in vLLM's form."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="kvf-")
        self.endpoint = f"ipc://{self._folder.name}/own.sock"
        self._context = zmq.Context()
        self._news = self._context.socket(zmq.XPUB)
        self._news.linger = 0
        self._news.bind(self.endpoint)
        self._number = 0

    def __enter__(self) -> OwnEvents:
        return self

    def __exit__(self, *_exc: object) -> None:
        self._context.destroy()
        self._folder.cleanup()

    def subscribed(self) -> None:
        assert self._news.poll(60_000)
        assert self._news.recv()[:1] == b"\1"

    def stored(self, tokens: Sequence[int], hashes: Iterable[int], block: int) -> None:
        event = {
            "type": "BlockStored",
            "block_hashes": list(hashes),
            "parent_block_hash": None,
            "token_ids": list(tokens),
            "block_size": block,
            "lora_id": None,
            "medium": "GPU",
            "lora_name": None,
        }
        payload = msgspec.msgpack.encode([time.time(), [event], 0])
        self._news.send_multipart([b"kv@worker@tiny", self._number.to_bytes(8, "big"), payload])
        self._number += 1
