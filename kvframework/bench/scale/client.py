"""Owns the bench's side of its client processes: their start, orders to them, their reports. For one thread."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import msgspec

from kvframework.bench.child import BenchChild, running
from kvframework.bench.orders import Orders
from kvframework.bench.scale.messages import Order, Report, Start


class ClientProcess:
    """One client. `tell` and `hear` go in pairs, so that many can be told before the first is heard."""

    def __init__(self, child: BenchChild) -> None:
        self._child = child
        self._orders = Orders(child)

    def tell(self, order: Order) -> None:
        """Raises `BenchFailed` if it has ended."""
        self._orders.tell(msgspec.json.encode(order))

    def hear(self) -> Report:
        """Waits for the report on what it was told. Raises `BenchFailed` if that was not carried out."""
        report = msgspec.json.decode(self._orders.hear(), type=Report)
        if report.error:
            raise self._child.failure(f"failed: {report.error}")
        return report

    def do(self, order: Order) -> Report:
        self.tell(order)
        return self.hear()


@contextmanager
def running_clients(
    count: int, directory: Path, *, server: str, echo: str, seed: int, chunks: int, advance: Callable[[], None]
) -> Iterator[tuple[list[ClientProcess], Report]]:
    """So many clients, each in a new process and registered, and the report of the last start. They end on the way
    out. Raises `BenchFailed`."""
    command = [sys.executable, "-m", "kvframework.bench.scale.client_process"]
    with ExitStack() as stack:
        clients = []
        for index in range(count):
            child = stack.enter_context(running(f"client {index + 1}", command, directory, piped=True))
            clients.append(ClientProcess(child))
            clients[-1].tell(Start(server, echo, index + 1, seed, chunks))
        report = Report()
        for client in clients:
            report = client.hear()
            advance()
        yield clients, report
