"""How a status document looks: the part on L2, with everything that a server may say of a tier and with little."""

from __future__ import annotations

import re

import msgspec
import pytest
from rich.console import Console

from kvframework.cli.status_view import view_status

DOCUMENT: dict[str, object] = {
    "server": {
        "version": "1", "endpoint": "ipc:///s", "pid": 7, "uptime_s": 3.0, "config": "default", "chunk_size": 256,
    },
    "l1": {
        "used_bytes": 1 << 20, "capacity_bytes": 4 << 20, "objects": 3, "pins": 0, "evictions": 0, "fragmentation": 0.0,
    },
    "instances": [],
}  # fmt: skip
TIER = {
    "name": "redis",
    "state": "closed",
    "last_error": "",
    "codec": "zstd",
    "write_policy": "all",
    "capabilities": ["capacity"],
    "usage": {"used_bytes": 3 << 20, "capacity_bytes": 8 << 30},
    "latency_ms": {
        "get_into": {"count": 9, "p50": 0.523, "p99": 12.34},
        "put": {"count": 0, "p50": 0.0, "p99": 0.0},
        "contains": {"count": 1, "p50": 0.1, "p99": 0.1},
    },
    "hits": 11, "misses": 12, "stored": 13, "errors": 14, "corrupt": 15, "write_pending": 16,
}  # fmt: skip


def shown(*tiers: dict[str, object], width: int = 160) -> list[str]:
    console = Console(width=width)
    with console.capture() as capture:
        console.print(view_status(msgspec.json.encode(DOCUMENT | {"l2": tiers})))
    return capture.get().splitlines()


def cells(*tiers: dict[str, object]) -> list[list[str]]:
    """Header and rows of the table on L2."""
    lines = [line.strip() for line in shown(*tiers) if line.strip()]
    header = next((index for index, line in enumerate(lines) if line.startswith("L2 ")), len(lines))
    return [re.split(" {2,}", line) for line in lines[header : header + 2 + len(tiers)] if not line.startswith("─")]


def test_every_tier_is_a_row() -> None:
    header, *rows = cells(TIER, TIER | {"name": "disk", "codec": "none", "state": "half-open"})
    assert header[:4] == ["L2", "circuit", "codec", "used"]
    assert rows[0] == [
        "redis", "closed", "zstd", "3.0 MiB / 8.0 GiB", "11", "12", "13", "14", "15", "16", "0.523 / 12.3", "-",
    ]  # fmt: skip
    assert rows[1][:3] == ["disk", "half-open", "none"]
    assert len(header) == len(rows[0])


def test_a_tier_that_tells_little() -> None:
    _, row = cells({"name": "old", "state": "closed", "usage": None, "write_pending": 1})
    assert row == ["old", "closed", "-", "-", "0", "0", "0", "0", "0", "1", "-", "-"]


def test_without_l2_there_is_no_table() -> None:
    assert cells() == []
    assert not any("circuit" in line for line in shown())


@pytest.mark.parametrize(("state", "told"), [("closed", False), ("open", True), ("half-open", True)])
def test_the_last_error_is_told_while_it_matters(state: str, told: bool) -> None:
    lines = shown(TIER | {"state": state, "last_error": "no [bold]route[/bold] to host"})
    assert any("L2 redis: no [bold]route[/bold] to host" in line for line in lines) is told


def test_a_narrow_terminal_loses_nothing() -> None:
    text = "".join(shown(TIER, width=80))
    for number in ("11", "12", "13", "14", "15", "16"):
        assert number in text
