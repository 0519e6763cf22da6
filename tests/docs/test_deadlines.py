"""The table of docs/deadlines.md is the one in the code."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path

from kvf_plan.trace import lines
from kvf_plan.trace.form import UNKNOWN, Header, Request
from kvf_plan.trace.reading import open_trace
from kvf_plan.trace.writing import TraceFile
from kvframework.wire.protocol import (
    KINDS,
    LOCAL,
    REQUESTS,
    TCP,
)
from tests.docs.shown import blocks
from tests.support.doc_tables import rows

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


# The format that docs/traces.md shows is the one that is read and written.


PAGE_OF_TRACES = (Path(__file__).resolve().parents[2] / "docs" / "traces.md").read_text()
PLAIN = " ".join(PAGE_OF_TRACES.split())


def test_its_example_is_read_and_written_as_it_stands(tmp_path: Path) -> None:
    (shown,) = blocks(PAGE_OF_TRACES, "json")
    (tmp_path / "shown.jsonl").write_text(shown)
    trace = open_trace(tmp_path / "shown.jsonl")
    assert trace.header == Header(256, "shown.jsonl", "kvframework", 1_790_000_000.0)
    requests = list(trace)
    first = Request(0.0, 768, 0, [8211907432098071111, 310985731095377218, 5120973109570921873], hit_tokens=512)
    second = [8211907432098071111, 1175018310957392271]
    assert requests == [first, Request(0.0125, 512, 0, second, start=256, hit_tokens=0, tenant=1, lost=3)]
    with TraceFile(tmp_path / "again.jsonl") as file:
        file.begin(trace.header.chunk_tokens, trace.header.recorded_at)
        for request in requests:
            file.add(request)
    assert (tmp_path / "again.jsonl").read_text() == shown


def test_its_table_has_every_field_and_whether_it_may_lack(tmp_path: Path) -> None:
    table = {field.strip("`"): without for field, _, without in rows(PAGE_OF_TRACES, "The format")}
    assert table.keys() == set(lines.Line.__struct_fields__)
    whole = {"timestamp": 0, "input_length": 512, "hash_ids": [1], "output_length": 1, "start": 0, "hit_length": 1}
    del whole["hit_length"]
    (tmp_path / "t.jsonl").write_text(json.dumps(whole))
    (request,) = open_trace(tmp_path / "t.jsonl")
    assert request.hit_tokens == UNKNOWN
    required = {name for name in table if name in ("timestamp", "input_length", "hash_ids")}
    assert {name for name, without in table.items() if without == "refused"} == required
