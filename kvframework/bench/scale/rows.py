"""Owns how samples become rows: percentiles, and ratios to the first step and to the echo, round by round. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from kvframework.bench.scale.document import ScaleRow, ToEcho
from kvframework.bench.scale.samples import Sample
from kvframework.bench.statistics import Latency, Rounds, Spread, ratio

# Operation, clients, objects.
Step = tuple[str, int, int]


def rows(samples: Mapping[Step, Sequence[Sample]], *, first: tuple[int, int]) -> list[ScaleRow]:
    """A row for each step, in the order of `samples` within an operation. `first` are the clients and objects that all
    are compared with. Each step has as many samples, one a round."""
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
        to_echo=None if operation == "echo" else _to_echo(own, samples["echo", clients, objects]),
    )


def _to_echo(own: Sequence[Sample], echo: Sequence[Sample]) -> ToEcho:
    return ToEcho(
        rate=_of(own, echo, lambda sample: sample.rate),
        p50=ratio(_latencies(own), _latencies(echo)),
        p99=Latency.of(_latencies(own)).p99_us / Latency.of(_latencies(echo)).p99_us,
    )


def _of(over: Sequence[Sample], under: Sequence[Sample], value: Callable[[Sample], float]) -> Spread:
    return ratio([[value(sample)] for sample in over], [[value(sample)] for sample in under])


def _latencies(samples: Sequence[Sample]) -> Rounds:
    return [sample.latencies for sample in samples]
