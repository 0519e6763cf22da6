"""The table of docs/deadlines.md is the one in the code."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

from kvf_vllm.options import VllmOptions
from kvframework.service.counts import RECENT_S
from kvframework.service.health import LOST_MANY
from kvframework.wire.protocol import (
    KINDS,
    LOCAL,
    LONGEST_SCALE,
    REQUESTS,
    SCALE_VARIABLE,
    SCALED,
    SHORTEST_SCALE,
    TCP,
)

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "deadlines.md").read_text()
ROWS = re.findall(r"^\| `(\w+_s)` \| ([^|]+) \| [^|]+ \| ([\d.]+) \| ([\d.]+) \|$", PAGE, re.MULTILINE)


def test_every_deadline_is_in_the_table_with_its_seconds() -> None:
    assert [(name, float(local), float(tcp)) for name, _, local, tcp in ROWS] == [
        (field.name, getattr(LOCAL, field.name), getattr(TCP, field.name))
        for field in dataclasses.fields(LOCAL)
        if field.name.endswith("_s") and not field.name.endswith("_per_s")
    ]


def test_every_request_is_at_its_deadline() -> None:
    assert KINDS.keys() <= REQUESTS.keys()
    told = {request: name for name, of, _, _ in ROWS for request in REQUESTS if re.search(rf"\b{request}\b", of)}
    assert {name: kind for name, kind in told.items() if name not in ("HELLO", "PING", "GATHER_BLOCK")} == KINDS
    assert all(LOCAL.of(name) == LOCAL.setup_s for name, kind in told.items() if kind == "setup_s")


def test_what_is_said_in_words() -> None:
    assert f"1 s more for each {LOCAL.bulk_bytes_per_s / 1e6:.0f} MB" in PAGE
    assert f"{LOCAL.lookup_tokens_per_s:,.0f} tokens a second" in PAGE
    assert LOCAL.of_bulk(20_000_000) == LOCAL.bulk_s + 1
    assert f"{SHORTEST_SCALE:g} to {LONGEST_SCALE:g}" in PAGE
    assert SCALE_VARIABLE in PAGE
    assert LOST_MANY == 3
    assert f"Three calls of one client, lost with pauses of less than {RECENT_S:.0f} s" in " ".join(PAGE.split())
    setting = PAGE.split("## One setting")[1].split("## ")[0]
    assert {name for name, *_ in ROWS} - set(SCALED) == set(re.findall(r"`(\w+_s)`", setting))
    assert "deadline_scale" in VllmOptions.__struct_fields__
