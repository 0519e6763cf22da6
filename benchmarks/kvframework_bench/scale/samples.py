"""Samples of `bench scale`: clients at one operation for a moment; and the rows made of them, round by round."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from kvframework_bench.rounds import Latency, Rounds, Spread, ratio
from kvframework_bench.scale.client import ClientProcess, Operation, Run
from kvframework_bench.scale.figures import RatioToEcho, ScaleRow
from kvframework_bench.server import run_ns

# Every client has its command before the first begins.
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
    """Take a sample: all `clients` at once, each with `count` prompts of its own or shared ones, see `Run`. Blocks for
    `seconds`.

    Raises the errors of `ClientProcess`.
    """
    before = run_ns(server_pid)  # next to busy cores, clients may be done before this process runs again
    at = time.monotonic() + _LEAD_S + _LEAD_PER_CLIENT_S * len(clients)
    for client, first in zip(clients, firsts, strict=True):
        client.send(Run(operation, first, count, at, seconds))
    reports = [client.receive() for client in clients]
    server_ns = run_ns(server_pid) - before
    latencies = [latency for report in reports for latency in report.latencies]
    # A client's last request may end after the time is over: its own rate counts it and the time it took.
    rate = sum(len(report.latencies) / report.took for report in reports)
    return Sample(latencies, rate, server_ns / 1e9 / len(latencies))


# Operation, clients, objects.
Step = tuple[str, int, int]


def rows(samples: Mapping[Step, Sequence[Sample]], *, first: tuple[int, int]) -> list[ScaleRow]:
    """Return a row for each step, in the order of `samples` within an operation. `first` are the clients and objects
    that all are compared with. Each step has as many samples, one a round."""
    ordered = sorted(samples, key=lambda step: (list(dict.fromkeys(s[0] for s in samples)).index(step[0]), step[1:]))
    return [_row(step, samples, (step[0], *first)) for step in ordered]


def _row(step: Step, samples: Mapping[Step, Sequence[Sample]], first: Step) -> ScaleRow:
    operation, clients, objects = step
    own, start = samples[step], samples[first]
    latency = Latency.of(_latencies(own))
    return ScaleRow(
        operation=operation,
        clients=clients,
        objects=objects,
        latency=latency,
        requests_s=Spread.of([sample.rate for sample in own]),
        server_us=Spread.of([sample.server_s * 1e6 for sample in own]),
        cost_to_first=_of(own, start, lambda sample: sample.cost),
        server_to_first=_of(own, start, lambda sample: sample.server_s),
        p50_to_first=ratio(_latencies(own), _latencies(start)),
        p99_to_first=latency.p99_us / Latency.of(_latencies(start)).p99_us,
        ratio_to_echo=None if operation == "echo" else _ratio_to_echo(own, samples["echo", clients, objects]),
    )


def _ratio_to_echo(own: Sequence[Sample], echo: Sequence[Sample]) -> RatioToEcho:
    return RatioToEcho(
        rate=_of(own, echo, lambda sample: sample.rate),
        p50=ratio(_latencies(own), _latencies(echo)),
        p99=Latency.of(_latencies(own)).p99_us / Latency.of(_latencies(echo)).p99_us,
    )


def _of(over: Sequence[Sample], under: Sequence[Sample], value: Callable[[Sample], float]) -> Spread:
    return ratio([[value(sample)] for sample in over], [[value(sample)] for sample in under])


def _latencies(samples: Sequence[Sample]) -> Rounds:
    return [sample.latencies for sample in samples]
