"""Owns one sample of `bench scale`: some clients at one operation for a moment. In the bench's process."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from kvframework.bench.at_rest import run_ns
from kvframework.bench.scale.client import ClientProcess
from kvframework.bench.scale.messages import Operation, Run

# All clients must have been told before the first begins.
_LEAD_S = 0.02
_LEAD_PER_CLIENT_S = 0.001


@dataclass(frozen=True)
class Sample:
    """`rate` is in requests a second, of all clients together; `server_s` the processor time of the server for one."""

    latencies: list[float]
    rate: float
    server_s: float

    @property
    def cost(self) -> float:
        return 1.0 / self.rate


def take(
    clients: Sequence[ClientProcess],
    firsts: Sequence[int],
    operation: Operation,
    *,
    count: int,
    seconds: float,
    server_pid: int,
) -> Sample:
    """All `clients` at once, each with `count` prompts of its own or shared ones, see `Run`. Blocks so long.

    Raises what `ClientProcess` raises.
    """
    before = run_ns(server_pid)  # beside busy cores, clients may be done before this process runs again
    at = time.monotonic() + _LEAD_S + _LEAD_PER_CLIENT_S * len(clients)
    for client, first in zip(clients, firsts, strict=True):
        client.tell(Run(operation, first, count, at, seconds))
    reports = [client.hear() for client in clients]
    server_ns = run_ns(server_pid) - before
    latencies = [latency for report in reports for latency in report.latencies]
    # A client's last request may end after the time is over: its own rate counts it and the time it took.
    rate = sum(len(report.latencies) / report.took for report in reports)
    return Sample(latencies, rate, server_ns / 1e9 / len(latencies))
