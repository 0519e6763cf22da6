"""The format that docs/traces.md shows is the one that is read and written."""

from __future__ import annotations

import json
from pathlib import Path

from kvf_plan.trace import conversations, lines
from kvf_plan.trace.form import MAX_ID, UNKNOWN, Header, Request
from kvf_plan.trace.reading import BAILIAN_CHUNK_TOKENS, MOONCAKE_CHUNK_TOKENS, open_trace
from kvf_plan.trace.writing import TraceFile
from kvframework.service import recording
from tests.docs.shown import blocks
from tests.support.doc_tables import rows

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "traces.md").read_text()
PLAIN = " ".join(PAGE.split())


def test_its_example_is_read_and_written_as_it_stands(tmp_path: Path) -> None:
    (shown,) = blocks(PAGE, "json")
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
    table = {field.strip("`"): without for field, _, without in rows(PAGE, "The format")}
    assert table.keys() == set(lines.Line.__struct_fields__)
    whole = {"timestamp": 0, "input_length": 512, "hash_ids": [1], "output_length": 1, "start": 0, "hit_length": 1}
    del whole["hit_length"]
    (tmp_path / "t.jsonl").write_text(json.dumps(whole))
    (request,) = open_trace(tmp_path / "t.jsonl")
    assert request.hit_tokens == UNKNOWN
    required = {name for name in table if name in ("timestamp", "input_length", "hash_ids")}
    assert {name for name, without in table.items() if without == "refused"} == required


def test_its_numbers_are_those_of_the_code() -> None:
    assert MAX_ID == 2**63 - 1
    assert f"the tokens of a chunk: {MOONCAKE_CHUNK_TOKENS}," in PAGE
    assert f"the tokens of a chunk: {BAILIAN_CHUNK_TOKENS}," in PAGE
    assert f"{conversations.CONVERSATIONS_PER_HOUR:.0f} an hour begin by chance" in PAGE
    assert conversations.MAX_OPEN_BYTES == 1 << 30
    assert f"has not asked for {recording.READER_S:.0f} s" in PLAIN
    assert f"or after {recording.UNDECIDED_S:.0f} s without it" in PLAIN
