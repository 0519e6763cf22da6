"""Owns how a status document looks on a terminal. Pure. What a server says is shown as it is, never read as markup."""

from __future__ import annotations

from typing import Any

import msgspec
from rich.box import SIMPLE_HEAD
from rich.console import Group, RenderableType
from rich.table import Column, Table
from rich.text import Text

from kvframework.api import ByteSize
from kvframework.errors import KVFrameworkError


def view_status(encoded: bytes) -> RenderableType:
    """The document that REPORT_STATUS returns."""
    document: dict[str, Any] = msgspec.json.decode(encoded)
    server, l1 = document["server"], document["l1"]
    lines = [
        f"kvframework {server['version']} at {server['endpoint']} (pid {server['pid']})",
        f"up {server['uptime_s']:.0f} s, configuration {server['config']}, chunk size {server['chunk_size']}",
        (
            f"L1 {ByteSize(l1['used_bytes'])} of {ByteSize(l1['capacity_bytes'])} "
            f"({l1['used_bytes'] / l1['capacity_bytes']:.0%}), {l1['objects']} objects, {l1['pins']} pins, "
            f"{l1['evictions']} evictions, fragmentation {l1['fragmentation']:.0%}"
        ),
    ]
    tiers, instances = document["l2"], document["instances"]
    return Group(
        *(Text(line) for line in lines),
        *([_tiers(tiers)] if tiers else []),
        *_tier_errors(tiers),
        _instances(instances) if instances else Text("no instance is registered"),
    )


def unreachable(endpoint: str, error: KVFrameworkError) -> RenderableType:
    """What a watch shows while there is no answer."""
    return Text.assemble((f"waiting for a server at {endpoint}\n", "bold yellow"), str(error))


def _tiers(tiers: list[dict[str, Any]]) -> Table:
    """`get` and `put` are p50 and p99 of calls in milliseconds. A tier may leave out anything: servers differ."""
    counters = ("hits", "misses", "stored", "errors", "corrupt")
    table = _table("L2", "circuit", "codec", "used", *counters, "to write", "get ms", "put ms")
    for tier in tiers:
        cells = (
            tier.get("name", "?"), tier.get("state", "?"), tier.get("codec", "-"), _usage(tier),
            *(tier.get(counter, 0) for counter in counters), tier.get("write_pending", 0),
            _latency(tier, "get_into"), _latency(tier, "put"),
        )  # fmt: skip
        table.add_row(*(Text(str(cell)) for cell in cells))
    return table


def _tier_errors(tiers: list[dict[str, Any]]) -> list[RenderableType]:
    broken = [tier for tier in tiers if tier.get("state") != "closed" and tier.get("last_error")]
    return [Text(f"L2 {tier.get('name', '?')}: {tier['last_error']}", style="red") for tier in broken]


def _usage(tier: dict[str, Any]) -> str:
    usage = tier.get("usage")
    return f"{ByteSize(usage['used_bytes'])} / {ByteSize(usage['capacity_bytes'])}" if usage else "-"


def _latency(tier: dict[str, Any], call: str) -> str:
    latency = tier.get("latency_ms", {}).get(call, {})
    return f"{latency['p50']:.3g} / {latency['p99']:.3g}" if latency.get("count") else "-"


def _instances(instances: list[dict[str, Any]]) -> Table:
    table = _table(
        "instance", "pid", "model", "rank", "transport", "format", "layers", "dtype", "chunk", "bytes/token"
    )  # fmt: skip
    for context in instances:
        rank = "?" if context["rank"] is None else context["rank"]
        cells = (
            context["instance_id"], context["pid"], context["model"], f"{rank}/{context['world_size']}",
            context["transport"], context["format"], context["layers"], context["dtype"], context["chunk_tokens"],
            f"{context['bytes_per_token']:g}",
        )  # fmt: skip
        table.add_row(*(Text(str(cell)) for cell in cells))
    return table


def _table(*headers: str) -> Table:
    """Lean: where the terminal is narrow, cells are folded, and nothing is cut off."""
    columns = (Column(header, overflow="fold") for header in headers)
    return Table(*columns, box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
