"""A client in a separate process that stores one new prompt after the other over the arena.

`python -m kvframework_bench.contention.storing_client`: its first line is a `Start`; then a line begins its
stores and the next one ends them. Each is answered with a `Stored`. It ends with its standard input, so it
never outlives a benchmark. Between commands it does nothing.
"""

from __future__ import annotations

import os
import select
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from kvframework.client import KVClient
from kvframework.errors import KVFrameworkError
from kvframework_bench.errors import BenchFailed
from kvframework_bench.process import BenchChild, LineChannel, running
from kvframework_bench.server import PATIENT
from kvframework_bench.workload import Shape

if TYPE_CHECKING:
    from kvframework_bench.engine import Transfers

# A late answer shows in the figures and does not end the benchmark.
_TIMEOUT_S = 10.0
_INSTANCE = 2


class Start(msgspec.Struct, frozen=True):
    """The client's start: the server's endpoint, the shape to store, the transport's options, and the number of stores
    before the answer."""

    server: str
    shape: Shape
    options: dict[str, object]
    warm_up: int


class Stored(msgspec.Struct, frozen=True):
    """The number of complete stores, and their wall time in seconds. `error`: the reason why they stopped."""

    stores: int = 0
    seconds: float = 0.0
    error: str = ""


def main() -> None:
    """Run the client; blocks until the standard input ends."""
    with ExitStack() as stack:
        commands = _CommandLines()
        if not (line := commands.next()):
            return
        start = msgspec.json.decode(line, type=Start)
        try:
            transfers = _engine(start, stack)
            for _ in range(start.warm_up):
                transfers.store_new()
            _answer(Stored())
            while commands.next():
                # The answer comes after a store, while the next one is under way.
                transfers.store_new()
                _answer(Stored(1))
                _answer(_store_until_stopped(transfers, commands))
        except KVFrameworkError as error:
            # The benchmark may no longer read the answer; then the log has it.
            sys.stderr.write(f"{error}\n")
            _answer(Stored(error=str(error)))


def _engine(start: Start, stack: ExitStack) -> Transfers:
    from kvframework_bench.engine import PagedMemory, Transfers

    client = stack.enter_context(KVClient(start.server, name="bench storing", deadline_scale=PATIENT))
    _ = client.hello
    memory = PagedMemory(start.shape, shuffled=True)
    return stack.enter_context(Transfers(client, start.shape, memory, start.options, instance_id=_INSTANCE))


def _store_until_stopped(transfers: Transfers, commands: _CommandLines) -> Stored:
    started, stores = time.perf_counter(), 0
    while True:
        transfers.store_new()
        stores += 1
        if commands.ready():
            commands.next()
            return Stored(stores, time.perf_counter() - started)


class _CommandLines:
    """Lines of the standard input, unbuffered, so that a poll of the descriptor shows whether there is one."""

    def __init__(self) -> None:
        self._unread = b""

    def ready(self) -> bool:
        """Return whether there is a line, or the end. Never blocks."""
        return b"\n" in self._unread or bool(select.select([0], [], [], 0)[0])

    def next(self) -> bytes:
        """Return the next line, b"" at the end."""
        while b"\n" not in self._unread:
            data = os.read(0, 1 << 16)
            if not data:
                return b""
            self._unread += data
        line, _, self._unread = self._unread.partition(b"\n")
        return line


def _answer(stored: Stored) -> None:
    os.write(1, msgspec.json.encode(stored) + b"\n")


class StoringClient:
    """The client as a `Disturbance`. `stored` has its report of each time between `begin` and `end`."""

    def __init__(self, child: BenchChild) -> None:
        self.stored: list[Stored] = []
        self._child = child
        self._channel = LineChannel(child)
        self._storing = False

    def begin(self) -> None:
        """Start its stores; returns once it has stored one prompt and is at the next. Raises `BenchFailed`."""
        if not self._storing:
            self._channel.send(b"store")
            self.receive()
            self._storing = True

    def end(self) -> None:
        """Stop its stores; returns once it has reported them, including the one under way. Raises `BenchFailed`."""
        if not self._storing:
            return
        self._storing = False
        self._channel.send(b"stop")
        stored = self.receive()
        if not stored.stores:
            raise BenchFailed("the storing client has stored no object")
        self.stored.append(stored)

    def start(self, start: Start) -> None:
        """Return once it is registered and has warmed up. Raises `BenchFailed`."""
        self._channel.send(msgspec.json.encode(start))
        self.receive()

    def receive(self) -> Stored:
        stored = msgspec.json.decode(self._channel.receive(), type=Stored)
        if stored.error:
            raise self._child.failure(f"failed: {stored.error}")
        return stored


@contextmanager
def running_storing_client(directory: Path, start: Start) -> Iterator[StoringClient]:
    """Yield a new client, which stores nothing yet. It ends with the context. Raises `BenchFailed`."""
    command = [sys.executable, "-m", "kvframework_bench.contention.storing_client"]
    with running("storing client", command, directory, piped=True) as child:
        client = StoringClient(child)
        client.start(start)
        yield client


if __name__ == "__main__":
    main()
