"""Traces of three forms are read as what they say, as often as asked, and one line at a time."""

from __future__ import annotations

import json
import tempfile
import tracemalloc
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
from hypothesis import given

from kvf_plan.trace import conversations
from kvf_plan.trace.form import KV_CACHE_TESTER, KVFRAMEWORK, MAX_ID, MOONCAKE, UNKNOWN, Header, Request
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


def _conversation(*requests: dict[str, Any], scope: str = "local", block_size: int = 64) -> str:
    return json.dumps({"id": "x", "block_size": block_size, "hash_id_scope": scope, "requests": requests})


def _asked(t: float, tokens: int, ids: list[int], out: int = 5) -> dict[str, Any]:
    return {"t": t, "type": "n", "model": "m", "in": tokens, "out": out, "hash_ids": ids, "think_time": 1.0}


def test_a_conversation_with_a_sub_agent_whose_times_are_its_own(tmp_path: Path) -> None:
    agent = {"t": 3.0, "type": "subagent", "requests": [_asked(0.0, 64, [9]), _asked(4.0, 130, [9, 10])]}
    text = _conversation(_asked(0.0, 64, [1]), agent, _asked(5.0, 128, [1, 2]))
    trace = open_trace(_written(tmp_path, text, "trace_1.json"))
    assert trace.header == Header(64, "trace_1.json", KV_CACHE_TESTER)
    assert [(each.at, each.tokens, len(each.chunks)) for each in trace] == [
        (0.0, 64, 1), (3.0, 64, 1), (5.0, 128, 2), (7.0, 130, 2)
    ]  # fmt: skip
    first, agents, second, agents_second = (each.chunks for each in trace)
    assert first[0] == second[0]
    assert agents[0] == agents_second[0]
    assert len({*first, *second, *agents, *agents_second}) == 4


def test_a_folder_of_conversations_shares_what_has_global_ids(tmp_path: Path) -> None:
    for name, scope in (("a", "local"), ("b", "local"), ("c", "global"), ("d", "global")):
        text = _conversation(_asked(0.0, 64, [1]), _asked(10**6, 64, [1]), scope=scope)
        _written(tmp_path, text, f"{name}.json")
    _written(tmp_path, _conversation(), "e.json")
    trace = open_trace(tmp_path)
    requests = list(trace)
    assert [each.at for each in requests] == sorted(each.at for each in requests)
    assert len(requests) == 8
    assert requests[0].at == 0
    ids = [each.chunks[0] for each in requests[:4]]
    assert len(set(ids)) == 3
    assert ids[2] == ids[3]
    assert list(trace) == requests
    faster = list(open_trace(tmp_path, conversations_per_hour=conversations.CONVERSATIONS_PER_HOUR * 2))
    assert 0 < faster[3].at == requests[3].at / 2


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
