"""Owns how a status document looks on a terminal. Pure. What a server says is shown as it is, never read as markup."""

from __future__ import annotations

from typing import Any

import msgspec
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
    lines += [
        f"L2 {tier['name']} {tier['state']}, {tier.get('stored', 0)} stored, {tier.get('hits', 0)} hits, "
        f"{tier.get('errors', 0)} errors, {tier['write_pending']} to write"
        for tier in document["l2"]
    ]
    instances = document["instances"]
    return Group(
        *(Text(line) for line in lines),
        _instances(instances) if instances else Text("no instance is registered"),
    )


def unreachable(endpoint: str, error: KVFrameworkError) -> RenderableType:
    """What a watch shows while there is no answer."""
    return Text.assemble((f"waiting for a server at {endpoint}\n", "bold yellow"), str(error))


def _instances(instances: list[dict[str, Any]]) -> Table:
    headers = ("instance", "pid", "model", "rank", "transport", "format", "layers", "dtype", "chunk", "bytes/token")
    table = Table(*(Column(header, overflow="fold") for header in headers))
    for context in instances:
        rank = "?" if context["rank"] is None else context["rank"]
        cells = (
            context["instance_id"], context["pid"], context["model"], f"{rank}/{context['world_size']}",
            context["transport"], context["format"], context["layers"], context["dtype"], context["chunk_tokens"],
            f"{context['bytes_per_token']:g}",
        )  # fmt: skip
        table.add_row(*(Text(str(cell)) for cell in cells))
    return table
