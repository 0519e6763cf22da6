"""How a status document looks: the part on L2, with everything that a server may say of a tier and with little."""

from __future__ import annotations

from typing import cast

import msgspec
import pytest
from rich.console import Console

from kvf_observe.status import view_status

DOCUMENT: dict[str, object] = {
    "server": {
        "version": "1",
        "endpoint": "ipc:///s",
        "pid": 7,
        "uptime_s": 3.0,
        "config": "default",
        "chunk_size": 256,
    },
    "l1": {
        "used_bytes": 1 << 20,
        "capacity_bytes": 4 << 20,
        "objects": 3,
        "pins": 0,
        "evictions": 0,
        "fragmentation": 0.0,
    },
    "instances": [],
}
TIER = {
    "name": "redis",
    "state": "closed",
    "last_error": "",
    "codec": "zstd",
    "write_policy": "all",
    "capabilities": ["usage"],
    "usage": {"used_bytes": 3 << 20, "capacity_bytes": 8 << 30},
    "latency_ms": {
        "get_into": {"count": 9, "p50": 0.523, "p99": 12.34},
        "put": {"count": 0, "p50": 0.0, "p99": 0.0},
        "contains": {"count": 1, "p50": 0.1, "p99": 0.1},
    },
    "hits": 11,
    "misses": 12,
    "stored": 13,
    "errors": 14,
    "corrupt": 15,
    "write_pending": 16,
}


def shown(*tiers: dict[str, object], width: int = 200, **parts: object) -> list[str]:
    console = Console(width=width)
    with console.capture() as capture:
        console.print(view_status(msgspec.json.encode(DOCUMENT | {"l2": tiers} | parts)))
    return [line.rstrip() for line in capture.get().splitlines()]


def test_every_tier_is_a_line() -> None:
    tiers = [line for line in shown(TIER, TIER | {"name": "disk", "codec": "", "state": "half-open"}) if "L2 " in line]
    counts = "11 hits, 12 misses, 13 stored, 14 errors, 15 corrupt, 16 to write"
    used = "3.0 MiB of 8.0 GiB, get 0.523 / 12.3 ms"
    assert tiers == [
        f"L2 redis: circuit closed, codec zstd, {used}; {counts}",
        f"L2 disk: circuit half-open, {used}; {counts}",
    ]
    (old,) = [line for line in shown({"name": "old", "write_pending": 1}) if "L2 " in line]
    assert old == "L2 old: circuit ?; 0 hits, 0 misses, 0 stored, 0 errors, 0 corrupt, 1 to write"


def test_other_nodes_are_shown_with_what_came_and_went() -> None:
    nodes = [{"node": "10.0.0.8:9310", "state": "up", "values": 12, "nbytes": 3 << 20, "failed": 1}, {"node": "b"}, {}]
    lent = {"at": "10.0.0.7:9310", "values": 7, "nbytes": 2 << 20, "refused": {"busy": 3, "full": 0}}
    strangers = [{"node": "10.0.0.66", "reason": "another [red]token", "count": 4, "ago_s": 2.5}]
    details = {"nodes": nodes, "lending": lent | {"strangers": strangers}}
    lines = shown(TIER | {"details": details})
    assert "redis from 10.0.0.8:9310: up, 12 values, 3.0 MiB, 1 failed" in lines
    assert "redis from b: ?, 0 values, 0 B, 0 failed" in lines
    assert "loaded by other nodes at 10.0.0.7:9310: 7 values, 2.0 MiB; refused: busy 3" in lines
    assert "refused: node 10.0.0.66: another [red]token, 4 times, last 2.5 s ago" in lines
    assert not any("lent" in line for line in shown(TIER | {"details": {}}))


@pytest.mark.parametrize(
    ("found", "line"),
    [
        (
            {"objects": 31, "bytes": 31 << 20, "seconds": 0.012, "damaged": 0},
            "L1 recovered 31 objects (31.0 MiB) in 0.01 s",
        ),
        ({"objects": 1, "bytes": 1024, "seconds": 0.012, "damaged": 1}, "dropped"),
        ({"objects": 0, "bytes": 0, "seconds": 0.0, "why_cold": "damaged: two"}, "L1 began empty: damaged: two"),
        ({"objects": 0, "bytes": 0, "seconds": 0.0, "why_cold": "nothing_kept"}, ""),
        ({"objects": 0, "bytes": 0, "seconds": 0.0, "why_cold": "no_keeper"}, ""),
    ],
)
def test_what_l1_began_with(found: dict[str, object], line: str) -> None:
    l1 = cast("dict[str, object]", DOCUMENT["l1"]) | {"recovered": found}
    told = [text for text in shown(l1=l1) if text.startswith(("L1 recovered", "L1 began"))]
    assert len(told) == bool(line)
    assert line in "".join(told)


def test_what_is_wrong_and_what_was_counted_is_told() -> None:
    refused = {
        "client": "an\x1b[2Jengine",
        "pid": 7,
        "what": "HELLO",
        "code": "protocol.version",
        "reason": "too [red]new",
        "count": 9,
        "ago_s": 3.2,
    }
    lines = shown(
        TIER | {"state": "open", "last_error": "-"},
        problems=[{"where": "l2.0", "fact": "redis: no [bold]route[/bold] to host"}],
        messaging={"counters": {"malformed": 4}, "refused": [refused]},
    )
    assert "l2.0: redis: no [bold]route[/bold] to host" in lines
    (told,) = [line for line in lines if line.startswith("refused: ")]
    assert "of client 'an\\x1b[2Jengine' (process 7), 9 times, last 3 s ago: [protocol.version] too [red]new" in told
    assert "problems counted: l2.0.corrupt 15, l2.0.errors 14, messaging.counters.malformed 4" in lines


def test_what_clients_wrote_moves_no_cursor() -> None:
    instance = {
        "instance_id": 1,
        "pid": 2,
        "model": "m\x1b[2J\nx",
        "rank": 0,
        "world_size": 1,
        "namespace": "ab" * 16,
        "transport": "t",
        "format": "f",
        "layers": 1,
        "dtype": "d",
        "chunk_tokens": 256,
        "bytes_per_token": 1.0,
    }
    text = "\n".join(shown(instances=[instance]))
    assert "\x1b" not in text
    assert "m\\x1b[2J; x" in text


def test_the_releases_of_clients_are_a_line_and_others_than_the_servers_are_named() -> None:
    def line(*releases: str) -> list[str]:
        sessions = [{"name": "vl\x1b[2Jlm", "pid": pid, "client_version": each} for pid, each in enumerate(releases)]
        return [each for each in shown(messaging={"sessions": sessions}) if each.startswith(("1 client", "3 client"))]

    assert line("1") == ["1 client: 1 of 1"]
    assert line("1", "0.9", "1") == ["3 clients: 2 of 1, 1 of 0.9; 'vl\\x1b[2Jlm' (process 1) is 0.9"]
    assert line("1", "", "1") == ["3 clients: 2 of 1, 1 of an unknown release"]
    assert line() == []


def test_kernels_that_are_missing_are_a_line() -> None:
    server = cast("dict[str, object]", DOCUMENT["server"])
    told = shown(server=server | {"missing_kernels": ["hashes", "planes of codecs"]})
    assert "compiled kernels are missing, so these are slower: hashes, planes of codecs" in told
    assert not any("kernels" in each for each in shown(server=server | {"missing_kernels": []}))


@pytest.mark.parametrize(
    ("more", "shown_as"),
    [
        ({}, "uint8"),
        ({"model_dtype": ""}, "uint8"),
        ({"model_dtype": "uint8"}, "uint8"),
        ({"model_dtype": "bfloat16"}, "uint8 (model bfloat16)"),
    ],
)
def test_an_instance_is_a_line_with_the_dtype_of_its_model(more: dict[str, object], shown_as: str) -> None:
    instance = {"instance_id": 1, "pid": 2, "model": "m", "rank": 0, "world_size": 1, "namespace": "ab" * 16}
    memory = {"transport": "t", "format": "f", "layers": 1, "dtype": "uint8", "chunk_tokens": 256}
    (line,) = [
        each for each in shown(instances=[instance | memory | {"bytes_per_token": 1.0} | more]) if "f, 1" in each
    ]
    whose = "instance 1 (process 2): model m, rank 0/1, namespace abababab"
    assert line == f"{whose}; t, f, 1 layers of {shown_as}, chunks of 256 tokens, 1 bytes per token"


def test_devices_and_what_they_go_without_are_lines() -> None:
    device = {"device": "GPU-1", "pid": None, "starts": 3, "instances": 2, "copies": 0, "last_error": "it ended"}
    lines = shown(transports={"cpu_gather": {}, "cuda": {"devices": [device]}})
    assert "device GPU-1: no copier process, 3 starts, 2 instances, last error: it ended" in lines
    lacking = device | {"lacks": ["no kernel copies:\x1b[2J none is there"]}
    lines = shown(transports={"cuda": {"devices": [device, lacking]}})
    told = [line for line in lines if "lacks a" in line]
    assert told == ["GPU-1 lacks a feature: no kernel copies:\\x1b[2J none is there"]


def test_quarantine_and_hit_rate_are_told() -> None:
    lines = shown(
        l1=DOCUMENT["l1"] | {"quarantined_bytes": 2 << 20},  # type: ignore[operator]
        lookups={"lookups": 4, "asked_tokens": 2048, "hit_tokens": 512, "unknown_namespace": 0},
    )
    assert any(line.startswith("L1 quarantine 2.0 MiB") for line in lines)
    assert "4 lookups, hit 25% of 2048 tokens" in lines


def test_a_narrow_terminal_breaks_no_word() -> None:
    lines = shown(TIER, width=80)
    assert all(len(line) <= 80 for line in lines)
    assert "11 hits, 12 misses, 13 stored, 14 errors, 15 corrupt, 16 to write" in " ".join(lines)
