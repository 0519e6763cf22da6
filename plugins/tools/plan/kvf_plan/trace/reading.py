"""Opens a trace, whatever form it has, which its first bytes tell. Files are streamed: memory is bounded however long
they are."""

from __future__ import annotations

import re
import stat
from collections.abc import Iterator
from pathlib import Path

import msgspec

from kvf_plan.errors import TraceError
from kvf_plan.trace import lines
from kvf_plan.trace.form import (
    KVFRAMEWORK,
    MOONCAKE,
    RECORD,
    Header,
    Request,
    Trace,
    no_trace,
    readable,
)

HEAD = 1 << 16
MOONCAKE_CHUNK_TOKENS = 512
_header = msgspec.json.Decoder(lines.HeaderLine)


def form_of(head: bytes) -> str:
    """Return the form of a file whose first bytes, `HEAD` at most, are these; "" for one that is not read."""
    text = head.lstrip()
    first_line = text.split(b"\n", 1)[0]
    if not text.startswith(b"{"):
        return ""
    if _has(first_line, "kvframework_trace"):
        return KVFRAMEWORK
    return MOONCAKE if _has(first_line, "timestamp") and _has(first_line, "hash_ids") else ""


def _has(text: bytes, field: str) -> bool:
    return re.search(rb'"%b"\s*:' % field.encode(), text) is not None


def open_trace(path: str | Path, *, chunk_tokens: int = 0) -> Trace:
    """Open the trace at `path`, and read what says its form.

    Mooncake's form does not say the tokens of a chunk: they are `chunk_tokens`, if it is 0 the 512 of its traces.
    Raises `TraceError` for a file that cannot be read, is empty or of another form.
    """
    path = Path(path)
    with readable(path):
        if not stat.S_ISREG(path.stat().st_mode):
            raise no_trace(path, "the path is a folder, a pipe or a device", "give a file")
        with path.open("rb") as file:
            head = file.read(HEAD)
        form = form_of(head)
        if form == KVFRAMEWORK:
            return _Lines(path, _read_header(path))
        if form == MOONCAKE:
            return _Lines(path, Header(chunk_tokens or MOONCAKE_CHUNK_TOKENS, path.name, MOONCAKE))
    raise no_trace(path, "the trace file has an unknown format" if head.strip() else "the trace file is empty", RECORD)


class _Lines:
    """A trace in JSON lines."""

    def __init__(self, path: Path, header: Header) -> None:
        self.header = header
        self._path = path

    def __iter__(self) -> Iterator[Request]:
        form, chunk_tokens, name = self.header.form, self.header.chunk_tokens, str(self._path)
        with readable(self._path), self._path.open("rb") as file:
            numbered = lines.read_lines(file, name)
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
        raise TraceError(
            f"the line is not a JSON object: {error}", where=where, available=expected, hint=RECORD
        ) from None
    if read.kvframework_trace > lines.VERSION:
        raise TraceError(
            f"`kvframework_trace` is {read.kvframework_trace}: a later release wrote this trace",
            where=where,
            available=f"{lines.VERSION}",
            hint="install that release to read the trace",
        )
    return Header(read.chunk_tokens, path.name, KVFRAMEWORK, read.recorded_at)
