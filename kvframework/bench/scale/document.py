"""Owns the figures of `kvframework bench scale`."""

from __future__ import annotations

import msgspec

from kvframework.bench.statistics import Latency, Spread


class ToEcho(msgspec.Struct, frozen=True):
    """Beside a bare ZMQ echo of a LOOKUP's size with as many clients: requests a second as a share of its echoes, and
    latencies in units of its latencies."""

    rate: Spread
    p50: Spread
    p99: float


class ScaleRow(msgspec.Struct, frozen=True):
    """One operation with `clients` that ask all the time, and `objects` in L1.

    `cost` is the wall time that goes by for a request, whoever's it is: one through the requests a second.
    `server_us` is processor time of the server (for an echo: of the bare peer), all its threads. What ends with
    `to_first` is in units of the first step's. `to_echo` is None for the echo.
    """

    operation: str
    clients: int
    objects: int
    latency: Latency
    requests_s: Spread
    server_us: Spread
    cost_to_first: Spread
    server_to_first: Spread
    p50_to_first: Spread
    p99_to_first: float
    to_echo: ToEcho | None


class ScaleFigures(msgspec.Struct, frozen=True):
    """A request is of `chunks` objects of `object_bytes`; each takes `slot_bytes` of the arena. `left_out` names the
    steps that did not fit into memory."""

    seed: int
    chunks: int
    object_bytes: int
    slot_bytes: int
    request_bytes: int
    by_clients: list[ScaleRow]
    by_objects: list[ScaleRow]
    left_out: list[str]
