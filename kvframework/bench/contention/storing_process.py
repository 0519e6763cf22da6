"""Owns the process of a client that stores one new prompt after the other: an engine of its own, over the arena.

`python -m kvframework.bench.contention.storing_process`: its first line is a `Start`; then a line begins its stores and
the next one ends them. Each is answered with a `Stored`. It ends when its standard input does, so it never outlives a
bench. Between orders it does nothing.
"""

from __future__ import annotations

import os
import select
import sys
import time
from contextlib import ExitStack
from typing import TYPE_CHECKING

import msgspec

from kvframework.bench.server import PATIENT
from kvframework.bench.shapes import Shape
from kvframework.client import KVClient
from kvframework.errors import KVFrameworkError

if TYPE_CHECKING:
    from kvframework.bench.transfers import Transfers

# A late answer is to be seen in the figures, not to end the bench.
_TIMEOUT_S = 10.0
_INSTANCE = 2


class Start(msgspec.Struct, frozen=True):
    """Where to connect to, what to store, how the transport moves it, and how many stores come before the answer."""

    server: str
    shape: Shape
    options: dict[str, object]
    warm_up: int


class Stored(msgspec.Struct, frozen=True):
    """How many stores ended, each of all its chunks, and the seconds that went by. `error`: why there are no more."""

    stores: int = 0
    seconds: float = 0.0
    error: str = ""


def main() -> None:
    """Blocks until the standard input ends."""
    with ExitStack() as stack:
        orders = _Orders()
        if not (line := orders.next()):
            return
        start = msgspec.json.decode(line, type=Start)
        try:
            transfers = _engine(start, stack)
            for _ in range(start.warm_up):
                transfers.store_new()
            _answer(Stored())
            while orders.next():
                # Whoever is told that it stores is told so after a store, while the next one is under way.
                transfers.store_new()
                _answer(Stored(1))
                _answer(_store_until_told(transfers, orders))
        except KVFrameworkError as error:
            # Nobody may ask for the answer any more; then the log says it.
            sys.stderr.write(f"{error}\n")
            _answer(Stored(error=str(error)))


def _engine(start: Start, stack: ExitStack) -> Transfers:
    from kvframework.bench.paged_memory import PagedMemory
    from kvframework.bench.transfers import Transfers

    client = stack.enter_context(KVClient(start.server, name="bench storing", deadline_scale=PATIENT))
    _ = client.hello
    memory = PagedMemory(start.shape, shuffled=True)
    return stack.enter_context(Transfers(client, start.shape, memory, start.options, instance_id=_INSTANCE))


def _store_until_told(transfers: Transfers, orders: _Orders) -> Stored:
    started, stores = time.perf_counter(), 0
    while True:
        transfers.store_new()
        stores += 1
        if orders.ready():
            orders.next()
            return Stored(stores, time.perf_counter() - started)


class _Orders:
    """Lines of the standard input, unbuffered, so that a look at the descriptor tells whether there is one."""

    def __init__(self) -> None:
        self._unread = b""

    def ready(self) -> bool:
        """Never blocks. Also at the end."""
        return b"\n" in self._unread or bool(select.select([0], [], [], 0)[0])

    def next(self) -> bytes:
        """b"" at the end."""
        while b"\n" not in self._unread:
            data = os.read(0, 1 << 16)
            if not data:
                return b""
            self._unread += data
        line, _, self._unread = self._unread.partition(b"\n")
        return line


def _answer(stored: Stored) -> None:
    os.write(1, msgspec.json.encode(stored) + b"\n")


if __name__ == "__main__":
    main()
