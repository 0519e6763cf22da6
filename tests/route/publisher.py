"""A publisher as vLLM's: PUB and the replay's ROUTER, in a thread of its own, with what goes wrong with them."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from typing import Any

import msgspec
import zmq

END = (-1).to_bytes(8, "big", signed=True)
TOPIC = b"kv@node@model"


def stored(
    hashes: Sequence[int | bytes], parent: int | bytes | None, tokens: Sequence[int], *, size: int = 4, **fields: Any
) -> dict[str, Any]:
    event = {
        "type": "BlockStored",
        "block_hashes": list(hashes),
        "parent_block_hash": parent,
        "token_ids": list(tokens),
        "block_size": size,
        "lora_id": None,
        "medium": "CPU",
        "lora_name": None,
    }
    return event | fields


def removed(hashes: Sequence[int | bytes], medium: str | None = "CPU") -> dict[str, Any]:
    return {"type": "BlockRemoved", "block_hashes": list(hashes), "medium": medium}


CLEARED = {"type": "AllBlocksCleared"}
# The fields of older publishers, in their order.
ARRAY = ("block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium", "lora_name", "extra_keys")


def as_array(event: dict[str, Any]) -> list[Any]:
    """The same event as older publishers write it."""
    return [event["type"], *(event[name] for name in ARRAY if name in event)]


def batch(*events: Any, at: float = 0.0, rank: int | None = 0) -> bytes:
    return msgspec.msgpack.encode([at, list(events), rank])


class ZmqPublisher:
    """Binds its endpoints, which outlive it. `lose` makes batches that only the replay knows."""

    def __init__(self, events: str, replay: str = "", *, first: int = 0, buffer: int = 10_000) -> None:
        self.next = first
        self.questions = 0
        self.silent = False
        self._buffer: deque[tuple[int, bytes, bytes]] = deque(maxlen=buffer)
        self._lock = threading.Lock()
        self._context = zmq.Context()
        self._pub = self._context.socket(zmq.PUB)
        self._pub.bind(events)
        self.events = self._pub.getsockopt_string(zmq.LAST_ENDPOINT)
        self._stopping = False
        self._router: Any = None
        self.replay = ""
        if replay:
            self._router = self._context.socket(zmq.ROUTER)
            self._router.setsockopt(zmq.SNDHWM, 0)
            self._router.bind(replay)
            self.replay = self._router.getsockopt_string(zmq.LAST_ENDPOINT)
            self._thread = threading.Thread(target=self._answer, daemon=True)
            self._thread.start()

    def __enter__(self) -> ZmqPublisher:
        return self

    def __exit__(self, *_exc: object) -> None:
        self._stopping = True
        if self._router is not None:
            self._thread.join()
        self._context.destroy(linger=0)

    def publish(self, *events: Any, topic: bytes = TOPIC, rank: int | None = 0) -> None:
        self._keep(topic, batch(*events, at=float(self.next), rank=rank), send=True)

    def publish_raw(self, payload: bytes) -> None:
        self._keep(TOPIC, payload, send=True)

    def send_frames(self, *frames: bytes) -> None:
        with self._lock:
            self._pub.send_multipart(frames)

    def lose(self, *events: Any) -> None:
        self._keep(TOPIC, batch(*events, at=float(self.next)), send=False)

    def _keep(self, topic: bytes, payload: bytes, *, send: bool) -> None:
        with self._lock:
            number = self.next
            self.next += 1
            self._buffer.append((number, topic, payload))
            if send:
                self._pub.send_multipart([topic, number.to_bytes(8, "big"), payload])

    def _answer(self) -> None:
        while not self._stopping:
            if not self._router.poll(20):
                continue
            identity, _, asked = self._router.recv_multipart()
            self.questions += 1
            if self.silent:
                continue
            with self._lock:
                kept = list(self._buffer)
            for number, topic, payload in kept:
                if number >= int.from_bytes(asked, "big"):
                    self._router.send_multipart([identity, b"", topic, number.to_bytes(8, "big"), payload])
            self._router.send_multipart([identity, b"", b"", END, b""])
