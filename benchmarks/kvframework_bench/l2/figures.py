"""The figures of `kvframework bench l2` and their tables. Rates are GB (10^9 bytes) a second of the objects'
bytes.
"""

from __future__ import annotations

import msgspec
from rich.table import Table

from kvframework.api.plugin import ByteSize
from kvframework.text import short_number
from kvframework_bench.console import format_latency, format_range, format_rate, format_ratio, new_table, skipped_table
from kvframework_bench.errors import Skipped
from kvframework_bench.rounds import Latency, Spread


class RedisRow(msgspec.Struct, frozen=True):
    """One operation of the tier on `value_bytes` each, `nbytes` a call. `reference` is the faster case of a plain
    client, and `tool_gb_s` the rate of redis-benchmark, None without it."""

    operation: str
    value_bytes: int
    nbytes: int
    reference: str
    reference_gb_s: Spread
    tier_gb_s: Spread
    ratio_to_reference: Spread
    tool_gb_s: Spread | None
    target_ratio: float


class RedisFigures(msgspec.Struct, frozen=True):
    """`version` is the server's; everything goes over its Unix socket."""

    version: str
    rows: list[RedisRow]


class S3Row(msgspec.Struct, frozen=True):
    """One operation of the tier on `value_bytes` each, `nbytes` a call. `reference` is the faster way of obstore
    itself. Processor seconds are those of the client's process, a GB."""

    operation: str
    value_bytes: int
    nbytes: int
    reference: str
    reference_gb_s: Spread
    tier_gb_s: Spread
    ratio_to_reference: Spread
    reference_processor_s: Spread
    tier_processor_s: Spread
    target_ratio: float
    target_processor_s: float


class S3Figures(msgspec.Struct, frozen=True):
    rows: list[S3Row]


class MooncakeRow(msgspec.Struct, frozen=True):
    """One operation of the tier on `value_bytes` each, `nbytes` a call. The reference is plain TCP, one connection."""

    operation: str
    value_bytes: int
    nbytes: int
    reference_gb_s: Spread
    tier_gb_s: Spread
    ratio_to_reference: Spread
    target_ratio: float


class EngineRow(msgspec.Struct, frozen=True):
    """A prompt that only a tier has: `to_l1` from LOOKUP until it is pinned, `to_engine` until it is in the engine's
    memory, `arriving` if what has arrived is taken while the rest arrives. `verified` says that every byte was compared
    after the first and after the last. `tier` is one call of the plugin for all of it, where there is such a case,
    else the reference."""

    source: str
    shape: str
    object_bytes: int
    nbytes: int
    verified: bool
    reference: str
    reference_gb_s: Spread
    tier_gb_s: Spread
    to_l1_gb_s: Spread
    to_engine_gb_s: Spread
    ratio_to_reference: Spread
    arriving_gb_s: Spread
    arriving_ratio_to_reference: Spread
    arriving_ratio_to_tier: Spread


class DiskRow(msgspec.Struct, frozen=True):
    """`cached` is the share of the tier's files in the page cache: before they were read, after they were written."""

    operation: str
    value_bytes: int
    nbytes: int
    reference_gb_s: Spread
    tier_gb_s: Spread
    ratio_to_reference: Spread
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


class NewRow(msgspec.Struct, frozen=True):
    """LOOKUP of a prompt of which L1 has the first half, and no tier the second. `tier` is a bare question to the
    tier about as many objects; `again` is the same prompt once more. `added_to_tier` is what an L2 adds to a LOOKUP, in
    units of that question."""

    tokens: int
    tier: Latency
    without_l2: Latency
    new: Latency
    again: Latency
    ratio_to_tier: Spread
    added_to_tier: Spread
    target_ratio: float


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


class CodecRow(msgspec.Struct, frozen=True):
    """Objects of KV in bfloat16, packed to `ratio` of their size; `bound` is what the best coder of single bytes could
    reach. Rates are GB of unpacked bytes a processor second, of one thread."""

    codec: str
    content: str
    object_bytes: int
    ratio: float
    bound: float
    pack_gb_s: Spread
    unpack_gb_s: Spread


class L2Figures(msgspec.Struct, frozen=True):
    """The figures of all parts. A part that was left out or not asked for is None or empty."""

    redis: RedisFigures | None
    s3: S3Figures | None
    mooncake: list[MooncakeRow]
    engine: list[EngineRow]
    disk: DiskFigures | None
    stalled: list[StalledRow]
    new: list[NewRow]
    memory: list[MemoryRow]
    codecs: list[CodecRow]
    skipped: list[Skipped]


def l2_tables(figures: L2Figures) -> list[Table]:
    """Return a table for each part that has figures, and one for those without."""
    made = []
    if figures.redis is not None:
        made.append(_redis(figures.redis))
    if figures.s3 is not None:
        made.append(_s3(figures.s3))
    if figures.mooncake:
        made.append(_mooncake(figures.mooncake))
    if figures.engine:
        made.append(_engine(figures.engine))
    if figures.disk is not None:
        made.append(_disk(figures.disk))
    if figures.stalled:
        made.append(_stalled(figures.stalled))
    if figures.new:
        made.append(_new(figures.new))
    if figures.memory:
        made.append(_memory(figures.memory))
    if figures.codecs:
        made.append(_codecs(figures.codecs))
    if figures.skipped:
        made.append(skipped_table(figures.skipped))
    return made


def _redis(figures: RedisFigures) -> Table:
    title = f"tier redis, redis-server {figures.version}, Unix socket"
    table = new_table(title, "GB/s", "min to max", "ratio to bare client", "min to max", "target")
    for row in figures.rows:
        name = f"{ByteSize(row.value_bytes)} {row.operation}"
        if row.tool_gb_s is not None:
            table.add_row(f"{name}, redis-benchmark", *format_rate(row.tool_gb_s))
        table.add_row(f"{name}, bare client, {row.reference}", *format_rate(row.reference_gb_s))
        table.add_row(
            f"{name}, tier",
            *format_rate(row.tier_gb_s),
            *format_ratio(row.ratio_to_reference),
            f"{short_number(row.target_ratio)} x",
        )
    return table


def _s3(figures: S3Figures) -> Table:
    headers = ("GB/s", "min to max", "ratio to obstore", "min to max", "target", "CPU s per GB", "target")
    table = new_table("tier s3, SeaweedFS, TCP", *headers)
    for row in figures.rows:
        name = f"{ByteSize(row.value_bytes)} {row.operation}"
        spent = f"{row.reference_processor_s.median:.2f}"
        table.add_row(f"{name}, {row.reference}", *format_rate(row.reference_gb_s), "", "", "", spent)
        table.add_row(
            f"{name}, tier",
            *format_rate(row.tier_gb_s),
            *format_ratio(row.ratio_to_reference),
            f"{short_number(row.target_ratio)} x",
            f"{row.tier_processor_s.median:.2f}",
            short_number(row.target_processor_s),
        )
    return table


def _mooncake(rows: list[MooncakeRow]) -> Table:
    table = new_table("tier mooncake, TCP", "GB/s", "min to max", "ratio to TCP", "min to max", "target")
    for row in rows:
        name = f"{ByteSize(row.value_bytes)} {row.operation}"
        table.add_row(f"{name}, bare TCP", *format_rate(row.reference_gb_s))
        table.add_row(
            f"{name}, tier",
            *format_rate(row.tier_gb_s),
            *format_ratio(row.ratio_to_reference),
            f"{short_number(row.target_ratio)} x",
        )
    return table


def _engine(rows: list[EngineRow]) -> Table:
    headers = ("GB/s", "min to max", "ratio to reference", "min to max", "ratio to the tier alone")
    table = new_table("load from a tier into the engine", *headers)
    for row in rows:
        name = f"{row.shape}, {row.source}"
        sizes = f"({ByteSize(row.nbytes)} in objects of {ByteSize(row.object_bytes)})"
        table.add_row(f"{name} {sizes}, reference: {row.reference}", *format_rate(row.reference_gb_s))
        table.add_row(f"{name}, LOOKUP until it is pinned in L1", *format_rate(row.to_l1_gb_s))
        ends = f"{name}, LOOKUP, then RETRIEVE"
        table.add_row(ends, *format_rate(row.to_engine_gb_s), *format_ratio(row.ratio_to_reference))
        table.add_row(
            f"{name}, RETRIEVE of objects as they arrive",
            *format_rate(row.arriving_gb_s),
            *format_ratio(row.arriving_ratio_to_reference),
            f"{row.arriving_ratio_to_tier.median:.2f} x",
        )
    return table


def _disk(figures: DiskFigures) -> Table:
    headers = ["in page cache", "plain file, GB/s", "tier, GB/s", "min to max", "ratio to plain file", "min to max"]
    table = new_table(f"tier filesystem, {figures.file_system}", *headers)
    for row in figures.rows:
        name = f"{ByteSize(row.value_bytes)} {row.operation}"
        plain = f"{row.reference_gb_s.median:.2f}"
        table.add_row(
            name, f"{row.cached:.0%}", plain, *format_rate(row.tier_gb_s), *format_ratio(row.ratio_to_reference)
        )
    return table


def _stalled(rows: list[StalledRow]) -> Table:
    table = new_table(
        "LOOKUP of a prompt in L1", "p50", "p99", "ratio to no L2", "min to max", "state of the tier at the end"
    )
    for row in rows:
        name = f"{row.tokens // 1024}k tokens"
        table.add_row(f"{name}, no L2", *format_latency(row.without_l2))
        state = f"circuit {row.tier_state}, {row.write_pending} objects to write"
        ratio = f"{row.ratio.median:.2f} x"
        table.add_row(f"{name}, stalled Redis", *format_latency(row.stalled), ratio, format_range(row.ratio), state)
    return table


def _new(rows: list[NewRow]) -> Table:
    headers = (
        "p50",
        "p99",
        "ratio to a bare tier lookup",
        "min to max",
        "added time, ratio to a bare tier lookup",
        "min to max",
        "target",
    )
    table = new_table("LOOKUP of a prompt that Redis lacks", *headers)
    for row in rows:
        name = f"{row.tokens // 1024}k tokens"
        table.add_row(f"{name}, a bare tier lookup", *format_latency(row.tier))
        table.add_row(f"{name}, no L2", *format_latency(row.without_l2))
        table.add_row(
            f"{name}, new prompt",
            *format_latency(row.new),
            *format_ratio(row.ratio_to_tier),
            *format_ratio(row.added_to_tier),
            f"{short_number(row.target_ratio)} x",
        )
        table.add_row(f"{name}, same prompt again", *format_latency(row.again))
    return table


def _memory(rows: list[MemoryRow]) -> Table:
    table = new_table(
        "server memory without the arena", "bytes moved", "object size", "growth", "prompt size", "size in Redis"
    )
    for row in rows:
        moved, one = ByteSize(row.nbytes), ByteSize(row.object_bytes)
        sizes = [f"{nbytes / (1 << 20):.1f} MiB" for nbytes in (row.growth_bytes, row.prompt_bytes, row.stored_bytes)]
        table.add_row(f"codec {row.codec}, {row.direction}", str(moved), str(one), *sizes)
    return table


def _codecs(rows: list[CodecRow]) -> Table:
    headers = [
        "content",
        "packed/original size",
        "best for a byte coder",
        "packing, GB/CPU s",
        "min to max",
        "unpacking",
        "min to max",
    ]
    table = new_table(f"codecs, object size {ByteSize(rows[0].object_bytes)}", *headers)
    for row in rows:
        rates = [*format_rate(row.pack_gb_s), *format_rate(row.unpack_gb_s)]
        table.add_row(row.codec, row.content, f"{row.ratio:.3f}", f"{row.bound:.3f}", *rates)
    return table
