"""Owns the figures of `kvframework bench contention`. Rates are GB (10^9 bytes) a second."""

from __future__ import annotations

import msgspec

from kvframework.bench.attempt import NotMeasured
from kvframework.bench.statistics import Latency, Spread


class SpinningTransfers(msgspec.Struct, frozen=True):
    """Stores or retrieves, on a quiet machine and beside the spinners. `quiet_of_copy` and `of_copy` are shares of the
    speed of `copy` on a quiet machine, the latter beside the spinners; `of_quiet` is of the own speed there. `reach` is
    meant for `of_copy`."""

    operation: str
    quiet_gb_s: Spread
    gb_s: Spread
    quiet_of_copy: Spread
    of_copy: Spread
    of_quiet: Spread
    reach: float


class SpinningShape(msgspec.Struct, frozen=True):
    """`spun_cores` is how much of a core each spinner had while it was meant to spin. `copy_of_quiet` is what the
    spinners leave to `copy` itself. `verified` says that every byte was compared after the first and after the last
    round, beside the spinners."""

    shape: str
    nbytes: int
    repetitions: int
    verified: bool
    spinners: int
    spun_cores: Spread
    copy_name: str
    copy_gb_s: Spread
    copy_of_quiet: Spread
    transfers: list[SpinningTransfers]


class StoringLookup(msgspec.Struct, frozen=True):
    """LOOKUP of a prompt wholly in L1. `p50_ratio` is taken round by round, `p99_ratio` over all; `reach` is meant for
    the latter."""

    tokens: int
    quiet: Latency
    storing: Latency
    p50_ratio: Spread
    p99_ratio: float
    reach: float


class StoringFigures(msgspec.Struct, frozen=True):
    """What the other client stored meanwhile: prompts of `prompt_bytes`, so many a round, at this speed of its own."""

    shape: str
    prompt_bytes: int
    stores: Spread
    gb_s: Spread
    lookups: list[StoringLookup]


class HitRow(msgspec.Struct, frozen=True):
    """One hit: LOOKUP, retrieve and free of a request that is hashed. Processor time of all threads of the engine's
    process, in microseconds: `processor_us` of it all, `copy_us` of the copy, `besides_us` of the rest, hit by hit;
    `asking_us` of that rest is the thread's that asks, the others are the connection's. `wall_us` is what went by.
    `reach_us` is meant for the median of `besides_us`."""

    shape: str
    tokens: int
    nbytes: int
    hits: int
    wall_us: Spread
    processor_us: Spread
    copy_us: Spread
    besides_us: Spread
    asking_us: Spread
    reach_us: float


class HotSpot(msgspec.Struct, frozen=True):
    """A function under a profiler, which makes all of them slower: calls and own time a hit, and its share of the own
    times of all."""

    function: str
    calls: float
    own_us: float
    share: float


class HitFigures(msgspec.Struct, frozen=True):
    """`hot_spots` are of `profiled` hits of the shape `profiled_shape`, in the thread that asks, the copy left out."""

    rows: list[HitRow]
    profiled_shape: str
    profiled: int
    hot_spots: list[HotSpot]


class ContentionFigures(msgspec.Struct, frozen=True):
    """A part that was left out or not asked for is None or empty."""

    spinning: list[SpinningShape]
    storing: StoringFigures | None
    hit: HitFigures | None
    not_measured: list[NotMeasured]
