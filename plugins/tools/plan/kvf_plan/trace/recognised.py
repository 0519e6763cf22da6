"""The format of a file that was given as a trace, recognised by its first bytes. Pure."""

from __future__ import annotations

import re

import msgspec

from kvf_plan.trace.form import BAILIAN, KV_CACHE_TESTER, KVFRAMEWORK, MOONCAKE, RECORD

HEAD = 1 << 16

_UNPACK = "unpack it first: {} FILE > trace.jsonl"
_ROWS = "write its rows as JSON lines, with the fields that are expected"
# Formats known by their first bytes, with what to do.
_MAGIC = {
    b"\x1f\x8b": ("a gzip file", _UNPACK.format("gunzip -c")),
    b"\x28\xb5\x2f\xfd": ("a zstd file", _UNPACK.format("zstd -dc")),
    b"\xfd7zXZ\x00": ("an xz file", _UNPACK.format("xz -dc")),
    b"BZh": ("a bzip2 file", _UNPACK.format("bunzip2 -c")),
    b"\x04\x22\x4d\x18": ("an lz4 file", _UNPACK.format("lz4 -dc")),
    b"PK\x03\x04": ("a zip file", _UNPACK.format("unzip -p")),
    b"PAR1": ("a Parquet file", _ROWS),
    b"ARROW1": ("an Arrow file", _ROWS),
    b"\x93NUMPY": ("an array of NumPy", _ROWS),
    b"SQLite format 3": ("an SQLite database", _ROWS),
    b"\xff\xfe": ("text in UTF-16", "convert it: iconv -f UTF-16 -t UTF-8 FILE > trace.jsonl"),
    b"\xfe\xff": ("text in UTF-16", "convert it: iconv -f UTF-16 -t UTF-8 FILE > trace.jsonl"),
    b"\xef\xbb\xbf": ("text that begins with a byte order mark", "cut it off: tail -c +4 FILE > trace.jsonl"),
    b"%PDF": ("a PDF", "name the trace's file"),
    b"\x89PNG": ("a picture", "name the trace's file"),
}
_TEXT = "it holds text, and no ids of chunks: record a trace of the served requests with kvframework trace record"
# Fields that no other format has, in the order of preference.
_FIELDS = {
    "chunk_hashes": (
        "a log of LMCache's lookups",
        "write its lines with the expected fields, hashes as integers",
    ),
    "conversations": ("dialogues of ShareGPT", _TEXT),
    "messages": ("messages of a chat", _TEXT),
    "prompt": ("prompts", _TEXT),
    "text_input": ("a trace with the prompts' text", _TEXT),
    "traceEvents": ("a timeline of Chrome's profiler", "record requests with kvframework trace record"),
    "resourceSpans": ("spans of OpenTelemetry", "record requests with kvframework trace record"),
}
_ARRAY = "write its elements as lines: jq -c '.[]' FILE > trace.jsonl"


class Recognised(msgspec.Struct, frozen=True):
    """`form` is one that is read, or "". Then `looks_like` says what the file is, "" unknown, and `hint` what to do."""

    form: str = ""
    looks_like: str = ""
    hint: str = ""


def recognised(head: bytes) -> Recognised:
    """Return what a file is whose first bytes, `HEAD` at most, are these."""
    for magic, (looks_like, hint) in _MAGIC.items():
        if head.startswith(magic):
            return Recognised(looks_like=looks_like, hint=hint)
    text = head.lstrip()
    if re.match(rb"(#.*\n\s*)*\[{1,2}[a-z]\w*(\.\w+)*\]{1,2}\s*(#.*)?(\n|$)", text):
        return Recognised(looks_like="a TOML file", hint="name the trace's file; a configuration goes behind --config")
    if b"\0" in text:
        return Recognised(looks_like="a binary file", hint="name the trace's file")
    if text.startswith(b"["):
        found = _by_fields(text)
        return found if found.looks_like else Recognised(looks_like="a JSON array", hint=_ARRAY)
    if not text.startswith(b"{"):
        return _by_line(text.split(b"\n", 1)[0])
    first_line = text.split(b"\n", 1)[0]
    if _has(first_line, "kvframework_trace"):
        return Recognised(KVFRAMEWORK)
    if _has(text, "requests") and _has(text, "block_size"):
        return Recognised(KV_CACHE_TESTER)
    if _has(first_line, "timestamp") and _has(first_line, "hash_ids"):
        return Recognised(BAILIAN if _has(first_line, "parent_chat_id") else MOONCAKE)
    return _by_fields(text)


def _by_fields(text: bytes) -> Recognised:
    for field, (looks_like, hint) in _FIELDS.items():
        if _has(text, field):
            return Recognised(looks_like=looks_like, hint=hint)
    return Recognised()


def _by_line(line: bytes) -> Recognised:
    """Return what text is whose first line begins no JSON."""
    if re.search(rb"\b(DEBUG|INFO|WARNING|ERROR|CRITICAL)\b", line) and re.search(rb"\d\d:\d\d:\d\d", line):
        return Recognised(looks_like="a log", hint="a log does not say what prompts share; " + RECORD)
    columns = line.count(b",")
    if columns and re.search(rb"(?i)timestamp|token|length|time", line):
        hint = "a CSV has lengths, but no ids of chunks: what prompts share is not in it"
        return Recognised(looks_like=f"a CSV file of {columns + 1} columns", hint=hint)
    if columns:
        return Recognised(
            looks_like="a CSV file", hint="write its rows as JSON lines, with the fields that are expected"
        )
    return Recognised(looks_like="text that is no JSON" if line else "", hint="name the trace's file")


def _has(text: bytes, field: str) -> bool:
    return re.search(rb'"%b"\s*:' % field.encode(), text) is not None
