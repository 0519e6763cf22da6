"""Opens a trace, whatever form it has, which its first bytes tell. Files are streamed: memory is bounded however long
they are."""

from __future__ import annotations

import re
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

import msgspec

from kvf_plan.errors import TraceError
from kvf_plan.trace import lines
from kvf_plan.trace.conversations import CONVERSATIONS_PER_HOUR, Conversations
from kvf_plan.trace.form import (
    BAILIAN,
    KV_CACHE_TESTER,
    KVFRAMEWORK,
    MOONCAKE,
    RECORD,
    Header,
    Request,
    no_trace,
    readable,
)

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


MOONCAKE_CHUNK_TOKENS = 512
BAILIAN_CHUNK_TOKENS = 16
_header = msgspec.json.Decoder(lines.HeaderLine)


class Trace(Protocol):
    """A trace in a file. It can be iterated as often as you like: each time reads the file again."""

    @property
    def header(self) -> Header: ...

    def __iter__(self) -> Iterator[Request]:
        """Yield the requests in the order of time. Raises `TraceError` at the first mistake."""
        ...


def open_trace(
    path: str | Path, *, chunk_tokens: int = 0, conversations_per_hour: float = CONVERSATIONS_PER_HOUR
) -> Trace:
    """Open the trace at `path`, and read what says its form.

    Mooncake's and Bailian's forms do not say the tokens of a chunk: they are `chunk_tokens`, if it is 0 those of the
    traces that are out, 512 and 16.
    Conversations of kv-cache-tester do not say when they began: about so many do in an hour. Raises `TraceError` for a
    file that cannot be read, is empty or of another format.
    """
    path = Path(path)
    with readable(path):
        if path.is_dir():
            return Conversations(_files(path), path.name, conversations_per_hour)
        if not stat.S_ISREG(path.stat().st_mode):
            raise no_trace(path, "this is no file, but a pipe or a device", "write it into a file first")
        with path.open("rb") as file:
            head = file.read(HEAD)
        found = recognised(head)
        if not head.strip():
            raise no_trace(path, "the file is empty", RECORD)
        if found.form == KV_CACHE_TESTER:
            return Conversations([path], path.name, conversations_per_hour)
        if found.form == KVFRAMEWORK:
            return _Lines(path, _read_header(path))
        if found.form == MOONCAKE:
            return _Lines(path, Header(chunk_tokens or MOONCAKE_CHUNK_TOKENS, path.name, MOONCAKE))
        if found.form == BAILIAN:
            return _Lines(path, Header(chunk_tokens or BAILIAN_CHUNK_TOKENS, path.name, BAILIAN))
    looks_like = f"this looks like {found.looks_like}" if found.looks_like else "this is of no known format"
    raise no_trace(path, looks_like, found.hint or RECORD)


class _Lines:
    """A trace in JSON lines."""

    def __init__(self, path: Path, header: Header) -> None:
        self.header = header
        self._path = path

    def __iter__(self) -> Iterator[Request]:
        form, chunk_tokens, name = self.header.form, self.header.chunk_tokens, str(self._path)
        with readable(self._path), self._path.open("rb") as file:
            numbered = lines.read_lines(file, name)
            if form == BAILIAN:
                yield from lines.of_prefixes(lines.requests(numbered, name, chunk_tokens, lines.SECONDS))
                return
            if form == KVFRAMEWORK:
                next(numbered)  # the header
            yield from lines.requests(numbered, name, chunk_tokens)


def _read_header(path: Path) -> Header:
    with path.open("rb") as file:
        number, text = next(lines.read_lines(file, str(path)))
    where = f"{path}:{number}"
    expected = 'a header: {"kvframework_trace": 1, "chunk_tokens": N}'
    try:
        read = _header.decode(text)
    except msgspec.ValidationError as error:
        raise lines.wrong_field(error, where, expected) from None
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise TraceError(f"this is no JSON object: {error}", where=where, available=expected, hint=RECORD) from None
    if read.kvframework_trace > lines.VERSION:
        raise TraceError(
            f"`kvframework_trace` is {read.kvframework_trace}: a later release wrote this trace",
            where=where,
            available=f"{lines.VERSION}",
            hint="install that release to read it",
        )
    return Header(read.chunk_tokens, path.name, KVFRAMEWORK, read.recorded_at)


def _files(folder: Path) -> list[Path]:
    """Return the conversations of a folder, by name."""
    files = sorted(folder.glob("*.json"))
    if not files:
        others = sorted(each.name for each in folder.iterdir())
        named = f"{', '.join(others[:3])}{', ...' if len(others) > 3 else ''}"
        hint = f"name one of its files: {named}" if others else RECORD
        raise no_trace(folder, "the folder has no *.json" if others else "the folder is empty", hint)
    return files
