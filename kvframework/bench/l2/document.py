"""Owns the figures of `kvframework bench l2`. Rates are GB (10^9 bytes) a second of the objects' own bytes."""

from __future__ import annotations

import msgspec

from kvframework.bench.attempt import NotMeasured
from kvframework.bench.statistics import Latency, Spread


class RedisRow(msgspec.Struct, frozen=True):
    """One operation of the tier on `value_bytes` each, `nbytes` a call, beside the faster `bare_way` of a bare client.
    `tool` is what redis-benchmark says, None without it. `reach`: the share of the bare client to be reached."""

    operation: str
    value_bytes: int
    nbytes: int
    bare_way: str
    bare_gb_s: Spread
    tier_gb_s: Spread
    of_bare: Spread
    tool_gb_s: Spread | None
    reach: float


class RedisFigures(msgspec.Struct, frozen=True):
    """`version` is the server's; everything goes over its Unix socket."""

    version: str
    rows: list[RedisRow]


class EngineRow(msgspec.Struct, frozen=True):
    """A prompt that only Redis has: `to_l1` from LOOKUP until it is pinned, `to_engine` until it is in the engine's
    memory. `verified` says that every byte was compared after the first and after the last."""

    shape: str
    object_bytes: int
    nbytes: int
    verified: bool
    bare_way: str
    bare_gb_s: Spread
    to_l1_gb_s: Spread
    to_engine_gb_s: Spread
    of_bare: Spread


class DiskRow(msgspec.Struct, frozen=True):
    """`cached` is the share of the tier's files in the page cache: before they were read, after they were written."""

    operation: str
    value_bytes: int
    nbytes: int
    plain_gb_s: Spread
    tier_gb_s: Spread
    of_plain: Spread
    cached: float


class DiskFigures(msgspec.Struct, frozen=True):
    file_system: str
    rows: list[DiskRow]


class StalledRow(msgspec.Struct, frozen=True):
    """LOOKUP of a prompt wholly in L1. `tier_state` is that of the stalled tier's circuit after the last one, when
    `write_pending` objects still waited for it."""

    tokens: int
    without_l2: Latency
    stalled: Latency
    ratio: Spread
    tier_state: str
    write_pending: int


class MemoryRow(msgspec.Struct, frozen=True):
    """`nbytes` of objects moved, with at most `growth_bytes` more in the server's process than before, its arena left
    out. `stored_bytes` are those of all values in Redis: `prompt_bytes` as packed, with headers and one record."""

    codec: str
    direction: str
    object_bytes: int
    prompt_bytes: int
    nbytes: int
    growth_bytes: int
    stored_bytes: int


class L2Figures(msgspec.Struct, frozen=True):
    """A part that was left out or not asked for is None or empty."""

    redis: RedisFigures | None
    engine: list[EngineRow]
    disk: DiskFigures | None
    stalled: list[StalledRow]
    memory: list[MemoryRow]
    not_measured: list[NotMeasured]
