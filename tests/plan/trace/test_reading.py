"""Traces of two forms are read as what they say, as often as asked, and one line at a time."""

from __future__ import annotations

import json
import tempfile
import tracemalloc
from pathlib import Path

import hypothesis.strategies as st
from hypothesis import given

from kvf_plan.trace.form import KVFRAMEWORK, MAX_ID, MOONCAKE, UNKNOWN, Header, Request
from kvf_plan.trace.reading import open_trace

_MOONCAKE = """\
{"timestamp": 27482, "input_length": 6955, "output_length": 52, "hash_ids": [46, 47, 48, 49, 50, 51, 52, 53, 54, 55, \
56, 57, 2353, 2354]}
{"timestamp": 30535, "input_length": 1024, "output_length": 26, "hash_ids": [46, 47]}
"""


def test_mooncakes_times_begin_with_the_first_request(tmp_path: Path) -> None:
    trace = open_trace(_written(tmp_path, _MOONCAKE))
    assert trace.header == Header(512, "trace.jsonl", MOONCAKE)
    blocks = [46, 47, 48, 49, 50, 51, 52, 53, 54, 55, 56, 57, 2353, 2354]
    assert list(trace) == [Request(0.0, 6955, 52, blocks), Request(3.053, 1024, 26, [46, 47])]
    assert list(trace) == list(trace)


def test_mooncakes_form_with_chunks_of_another_size(tmp_path: Path) -> None:
    line = '{"timestamp": 0, "input_length": 33, "output_length": 1, "hash_ids": [1, 2, 3], "turn": 1}'
    trace = open_trace(_written(tmp_path, line), chunk_tokens=16)
    assert trace.header.chunk_tokens == 16
    assert list(trace) == [Request(0.0, 33, 1, [1, 2, 3])]


def test_a_trace_of_ours(tmp_path: Path) -> None:
    header = {"kvframework_trace": 1, "chunk_tokens": 256, "recorded_at": 1790000000.5, "new": [1]}
    first = {"timestamp": 0.25, "input_length": 300, "hash_ids": [MAX_ID]}
    more = {"tenant": 3, "model": 1, "hit_length": 256, "lost": 7}
    second = {"timestamp": 1000.25, "input_length": 512, "output_length": 9, "hash_ids": [MAX_ID, 0], **more}
    trace = open_trace(_written(tmp_path, "\n".join(map(json.dumps, (header, first, second)))))
    assert trace.header == Header(256, "trace.jsonl", KVFRAMEWORK, 1790000000.5)
    assert list(trace) == [
        Request(0.0, 300, 0, [MAX_ID], hit_tokens=UNKNOWN),
        Request(1.0, 512, 9, [MAX_ID, 0], tenant=3, model=1, hit_tokens=256, lost=7),
    ]


_requests = st.lists(
    st.tuples(st.integers(0, 10**6), st.integers(0, 5000), st.booleans(), st.integers(0, MAX_ID)), min_size=1
)


@given(_requests, st.integers(1, 600))
def test_what_a_reader_of_json_sees_is_what_is_read(rows: list[tuple[int, int, bool, int]], chunk: int) -> None:
    now, expected, text = 0, [], ""
    for gap, tokens, part, first in rows:
        now += gap
        chunks = tokens // chunk + (part and tokens % chunk > 0)
        ids = [min(first + each, MAX_ID) for each in range(chunks)]
        row = {"timestamp": now, "input_length": tokens, "output_length": 1, "hash_ids": ids}
        text += json.dumps(row) + "\n"
        expected.append(Request((now - rows[0][0]) / 1000, tokens, 1, ids))
    with tempfile.TemporaryDirectory() as folder:
        assert list(open_trace(_written(Path(folder), text), chunk_tokens=chunk)) == expected


def test_a_long_trace_costs_no_more_memory_than_a_short_one(tmp_path: Path) -> None:
    path = tmp_path / "long.jsonl"
    with path.open("w") as file:
        for number in range(20_000):
            row = {
                "timestamp": number,
                "input_length": 51200,
                "output_length": 1,
                "hash_ids": [*range(number, number + 100)],
            }
            file.write(json.dumps(row) + "\n")
    assert path.stat().st_size > 12 << 20
    tracemalloc.start()
    try:
        assert sum(len(each.chunks) for each in open_trace(path)) == 2_000_000
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 1 << 20


def _written(folder: Path, text: str, name: str = "trace.jsonl") -> Path:
    path = folder / name
    path.write_text(text)
    return path
