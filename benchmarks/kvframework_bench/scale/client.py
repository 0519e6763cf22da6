"""The benchmark's side of its client processes: their start, commands and reports, one line of JSON each.

For one thread.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Literal

import msgspec

from kvframework_bench.process import BenchChild, LineChannel, running

Operation = Literal["echo", "lookup", "store", "retrieve"]
OPERATIONS: tuple[Operation, ...] = ("echo", "lookup", "store", "retrieve")


class Start(msgspec.Struct, frozen=True, tag="start"):
    """A client's start: the server's endpoint, and the seed that distinguishes its prompts. A request is of `chunks`
    objects."""

    server: str
    echo: str
    instance_id: int
    seed: int
    chunks: int


class Fill(msgspec.Struct, frozen=True, tag="fill"):
    """Store the prompts from `first` on. Prompts that are there already may stay."""

    first: int
    count: int


class Clear(msgspec.Struct, frozen=True, tag="clear"):
    """Empty L1."""


class Run(msgspec.Struct, frozen=True, tag="run"):
    """From `at` (of the monotonic clock, which all processes share) for `seconds`, one request after the other.

    LOOKUP and RETRIEVE take any of the prompts `[first, first + count)`, stores take those from `first` on, each once.
    """

    operation: Operation
    first: int
    count: int
    at: float
    seconds: float


Command = Start | Fill | Clear | Run


class Report(msgspec.Struct, frozen=True):
    """The answer to every command.

    `latencies`, in seconds, are those of the requests of a `Run`, which took `took` from the first to the last. A
    `Start` is answered with the sizes of a LOOKUP and of an object. `error` is the reason why a command failed.
    """

    latencies: list[float] = []
    took: float = 0.0
    request_bytes: int = 0
    object_bytes: int = 0
    error: str = ""


class ClientProcess:
    """One client. `send` and `receive` go in pairs, so that many get a command before the first is waited for."""

    def __init__(self, child: BenchChild) -> None:
        self._child = child
        self._channel = LineChannel(child)

    def send(self, command: Command) -> None:
        """Send a command. Raises `BenchFailed` if the process has ended."""
        self._channel.send(msgspec.json.encode(command))

    def receive(self) -> Report:
        """Wait for the report on its last command. Raises `BenchFailed` if the command failed."""
        report = msgspec.json.decode(self._channel.receive(), type=Report)
        if report.error:
            raise self._child.failure(f"failed: {report.error}")
        return report

    def do(self, command: Command) -> Report:
        self.send(command)
        return self.receive()


@contextmanager
def running_clients(
    count: int, directory: Path, *, server: str, echo: str, seed: int, chunks: int, advance: Callable[[], None]
) -> Iterator[tuple[list[ClientProcess], Report]]:
    """Yield `count` clients, each in a new process and registered, and the report of the last start. They end with the
    context. Raises `BenchFailed`."""
    command = [sys.executable, "-m", "kvframework_bench.scale.client_process"]
    with ExitStack() as stack:
        clients = []
        for index in range(count):
            child = stack.enter_context(running(f"client {index + 1}", command, directory, piped=True))
            clients.append(ClientProcess(child))
            clients[-1].send(Start(server, echo, index + 1, seed, chunks))
        report = Report()
        for client in clients:
            report = client.receive()
            advance()
        yield clients, report
