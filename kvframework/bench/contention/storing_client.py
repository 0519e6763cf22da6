"""Owns the bench's side of the client that stores without a pause: a `Disturbance`. For one thread."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from kvframework.bench.child import BenchChild, running
from kvframework.bench.contention.storing_process import Start, Stored
from kvframework.bench.errors import BenchFailed
from kvframework.bench.orders import Orders


class StoringClient:
    """`stored` is what it did each time between `begin` and `end`."""

    def __init__(self, child: BenchChild) -> None:
        self.stored: list[Stored] = []
        self._child = child
        self._orders = Orders(child)
        self._storing = False

    def begin(self) -> None:
        """Returns once it has stored one prompt and is at the next. Raises `BenchFailed`."""
        if not self._storing:
            self._orders.tell(b"store")
            self.hear()
            self._storing = True

    def end(self) -> None:
        """Returns once it has told what it stored, the store that was under way included. Raises `BenchFailed`."""
        if not self._storing:
            return
        self._storing = False
        self._orders.tell(b"stop")
        stored = self.hear()
        if not stored.stores:
            raise BenchFailed("the client that is to store has stored nothing")
        self.stored.append(stored)

    def start(self, start: Start) -> None:
        """Returns once it is registered and has warmed up. Raises `BenchFailed`."""
        self._orders.tell(msgspec.json.encode(start))
        self.hear()

    def hear(self) -> Stored:
        stored = msgspec.json.decode(self._orders.hear(), type=Stored)
        if stored.error:
            raise self._child.failure(f"failed: {stored.error}")
        return stored


@contextmanager
def running_storing_client(directory: Path, start: Start) -> Iterator[StoringClient]:
    """A new one, which stores nothing yet. It ends on the way out. Raises `BenchFailed`."""
    command = [sys.executable, "-m", "kvframework.bench.contention.storing_process"]
    with running("storing client", command, directory, piped=True) as child:
        client = StoringClient(child)
        client.start(start)
        yield client
