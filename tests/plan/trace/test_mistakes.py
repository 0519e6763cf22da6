"""What is no trace, or a wrong one, is refused: with the file, the line or place, what was expected and one hint."""

from __future__ import annotations

import contextlib
import gzip
import json
import os
import tempfile
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given

from kvf_plan.errors import TraceError
from kvf_plan.trace import lines
from kvf_plan.trace.form import MAX_ID
from kvf_plan.trace.reading import HEAD, open_trace

_GOOD = {"timestamp": 5, "input_length": 1024, "output_length": 3, "hash_ids": [1, 2]}
_HEADER = {"kvframework_trace": 1, "chunk_tokens": 256}


def _refused(path: Path, **options: Any) -> TraceError:
    with pytest.raises(TraceError) as caught:
        list(open_trace(path, **options))
    error = caught.value
    assert error.hint
    assert error.available
    assert str(path) in error.where
    return error


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"timestamp": 4}, "`timestamp` is 4 ms, after a line with 5 ms"),
        ({"timestamp": -1}, "`timestamp` is -1 ms"),
        ({"timestamp": 1e300}, "`timestamp` is 1e+300 ms"),
        ({"timestamp": 1e15}, "days after the first"),
        ({"timestamp": "5"}, "`timestamp`: Expected `float`, got `str`"),
        ({"timestamp": None}, "`timestamp`: Expected `float`, got `null`"),
        ({"input_length": -1}, "`input_length`: Expected `int` >= 0"),
        ({"input_length": 1 << 40}, "`input_length`: Expected `int` <= "),
        ({"input_length": 5.5}, "`input_length`: Expected `int`, got `float`"),
        ({"output_length": -1}, "`output_length`: Expected `int` >= 0"),
        ({"hash_ids": [1, -1]}, "`hash_ids[1]`: Expected `int` >= 0"),
        ({"hash_ids": [1, MAX_ID + 1]}, "`hash_ids[1]`: Expected `int` <= "),
        ({"hash_ids": [1, "a"]}, "`hash_ids[1]`: Expected `int`, got `str`"),
        ({"hash_ids": [1]}, "`hash_ids` has 1 chunks, but `input_length` is 1024 tokens, 2.00 chunks of 512"),
        ({"hash_ids": [1, 2, 3]}, "`hash_ids` has 3 chunks"),
        ({"hash_ids": [1, 2, 3, 4, 5], "input_length": 1700}, "3.32 chunks of 512"),
        ({"hash_ids": []}, "`hash_ids` has 0 chunks"),
        ({"start": 100}, "`start` is 100 tokens of 1024"),
        ({"start": 1536}, "`start` is 1536 tokens of 1024"),
        ({"hit_length": -2}, "`hit_length`: Expected `int` >= -1"),
        ({"tenant": -1}, "`tenant`: Expected `int` >= 0"),
    ],
)  # fmt: skip
def test_a_wrong_field_is_named_with_its_line(tmp_path: Path, changed: dict[str, Any], said: str) -> None:
    rows = [_GOOD, {**_GOOD, **changed}, _GOOD]
    error = _refused(_rows(tmp_path, *rows))
    assert said in error.fact
    assert error.where.endswith("trace.jsonl:2")


@pytest.mark.parametrize("chunks", [3, 4])
def test_the_part_of_a_chunk_is_counted_or_not(tmp_path: Path, chunks: int) -> None:
    row = {**_GOOD, "input_length": 1700, "hash_ids": [*range(chunks)]}
    assert [len(each.chunks) for each in open_trace(_rows(tmp_path, row))] == [chunks]


@pytest.mark.parametrize("field", ["timestamp", "input_length", "hash_ids"])
def test_a_missing_field_is_named(tmp_path: Path, field: str) -> None:
    error = _refused(_rows(tmp_path, _GOOD, {name: value for name, value in _GOOD.items() if name != field}))
    assert f"missing required field `{field}`" in error.fact
    assert error.where.endswith(":2")


def test_the_number_of_chunks_hints_at_their_size(tmp_path: Path) -> None:
    assert (
        "16 tokens are a chunk: say so with --chunk-tokens"
        in _refused(_rows(tmp_path, {**_GOOD, "input_length": 64, "hash_ids": [1, 2, 3, 4]})).hint
    )


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999"])
def test_numbers_that_are_none_are_refused(tmp_path: Path, number: str) -> None:
    text = json.dumps(_GOOD) + "\n" + json.dumps({**_GOOD, "timestamp": 0}).replace("0,", f"{number},", 1) + "\n"
    assert _refused(_text(tmp_path, text)).where.endswith(":2")


def test_a_truncated_line_says_that_the_file_ends_within_it(tmp_path: Path) -> None:
    whole = json.dumps(_GOOD)
    error = _refused(_text(tmp_path, f"{whole}\n{whole[:-5]}"))
    assert error.fact == "the file ends within this line"
    assert error.where.endswith(":2")
    error = _refused(_text(tmp_path, f"{whole}\n{whole[:-5]}\n{whole}\n"))
    assert error.fact.startswith("the line is not a JSON object:")
    assert error.where.endswith(":2")


def test_a_line_without_an_end_is_not_read_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lines, "MAX_LINE", 1 << 20)
    path = tmp_path / "trace.jsonl"
    with path.open("w") as file:
        file.write(json.dumps(_GOOD) + "\n" + '{"timestamp": 5, "hash_ids": [' + "1," * HEAD)
        file.truncate(1 << 40)  # sparse: a terabyte that nobody may read
    error = _refused(path)
    assert error.fact == "the line is longer than 1 MiB"
    assert error.where.endswith(":2")


def test_nested_ever_deeper(tmp_path: Path) -> None:
    assert _refused(_text(tmp_path, json.dumps(_GOOD) + '\n{"x": ' + "[" * 100_000 + "\n")).where.endswith(":2")


@pytest.mark.parametrize(
    ("written", "fact"),
    [
        (gzip.compress(b"{}", mtime=0), "the trace file has an unknown format"),
        ('{"timestamp": 1}'.encode("utf-16"), "the trace file has an unknown format"),
        (bytes(100), "the trace file has an unknown format"),
        (json.dumps([_GOOD]).encode(), "the trace file has an unknown format"),
        (b"[server]\nprice = true\n", "the trace file has an unknown format"),
        (b'{"prompt": "Tell me"}\n', "the trace file has an unknown format"),
        (b"TIMESTAMP,ContextTokens\n18:17,4808\n", "the trace file has an unknown format"),
        (b"", "the trace file is empty"),
        (b"\n \n", "the trace file is empty"),
    ],
    ids=["gzip", "utf-16", "binary", "array", "toml", "prompts", "csv", "empty", "blank"],
)
def test_another_form_is_refused_with_those_that_are_read(tmp_path: Path, written: bytes, fact: str) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_bytes(written)
    error = _refused(path)
    assert error.fact == fact
    assert "Mooncake" in error.available
    assert "kvframework trace record" in error.hint


def test_what_is_no_file(tmp_path: Path) -> None:
    assert _refused(tmp_path / "missing").fact == "the trace file does not exist"
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path, tmp_path / "pipe"):
        assert "the path is a folder, a pipe or a device" in _refused(path).fact


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"kvframework_trace": 2}, "a later release wrote this trace"),
        ({"kvframework_trace": 0}, "`kvframework_trace`: Expected `int` >= 1"),
        ({"chunk_tokens": 0}, "`chunk_tokens`: Expected `int` >= 1"),
        ({"chunk_tokens": "256"}, "`chunk_tokens`: Expected `int`, got `str`"),
    ],
)
def test_a_wrong_header(tmp_path: Path, changed: dict[str, Any], said: str) -> None:
    error = _refused(_rows(tmp_path, {**_HEADER, **changed}, _GOOD))
    assert said in error.fact
    assert error.where.endswith(":1")


_WHOLE = {
    "ours": "\n".join(map(json.dumps, (_HEADER, {**_GOOD, "hash_ids": [1, 2, 3, 4]}))) + "\n",
    "mooncake": (json.dumps(_GOOD) + "\n") * 2,
}


@given(st.sampled_from(sorted(_WHOLE)), st.data())
def test_a_damaged_trace_is_read_or_refused_and_nothing_else(which: str, data: st.DataObject) -> None:
    text = bytearray(_WHOLE[which].encode())
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(text)))
        text[at : at + data.draw(st.integers(0, 8))] = data.draw(
            st.binary(max_size=4)
            | st.sampled_from([b"1e999", b"null", b"[[", b'"', b"-9", b"\n", b"99999999999999999999"])
        )
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        path.write_bytes(text)
        requests = []
        with contextlib.suppress(TraceError):
            requests = list(open_trace(path))
        before = 0.0
        for each in requests:
            assert before <= each.at < lines.MAX_SPAN_S * 3
            assert 0 <= each.tokens <= lines.MAX_TOKENS
            assert all(0 <= chunk <= MAX_ID for chunk in each.chunks)
            before = each.at


def _rows(folder: Path, *rows: dict[str, Any]) -> Path:
    return _text(folder, "".join(json.dumps(row) + "\n" for row in rows))


def _text(folder: Path, text: str, name: str = "trace.jsonl") -> Path:
    path = folder / name
    path.write_text(text)
    return path
