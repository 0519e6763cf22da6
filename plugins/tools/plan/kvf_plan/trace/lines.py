"""Traces in JSON lines: ours and Mooncake's. One line is in memory at a time."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, BinaryIO

import msgspec

from kvf_plan.errors import TraceError
from kvf_plan.trace.form import MAX_ID, UNKNOWN, Request

VERSION = 1
MAX_LINE = 16 << 20
MAX_TOKENS = 1 << 30
MAX_CHUNK_TOKENS = 1 << 20
# Ten years: beyond it a time is of another unit.
MAX_SPAN_S = 10 * 366 * 86400.0
_MAX_SINCE_1970_MS = 1e15

FORM = (
    "a JSON object on each line: `timestamp` in ms, in the order of time, `input_length` and `output_length` in "
    "tokens, `hash_ids` of the chunks, integers from 0 to 2**63 - 1"
)

Tokens = Annotated[int, msgspec.Meta(ge=0, le=MAX_TOKENS)]
Ordinal = Annotated[int, msgspec.Meta(ge=0, le=MAX_ID)]


class Line(msgspec.Struct, omit_defaults=True):
    """A request as it is on disk. The first four fields are Mooncake's, and always written; the others are ours."""

    timestamp: float
    input_length: Tokens
    hash_ids: list[Ordinal]
    output_length: Tokens | msgspec.UnsetType = msgspec.UNSET
    start: Tokens = 0
    hit_length: Annotated[int, msgspec.Meta(ge=UNKNOWN, le=MAX_TOKENS)] = UNKNOWN
    tenant: Ordinal = 0
    model: Ordinal = 0
    lost: Ordinal = 0


class HeaderLine(msgspec.Struct):
    """The first line of a trace of ours. It reads as an empty request too, for readers that know only Mooncake's."""

    kvframework_trace: Annotated[int, msgspec.Meta(ge=1)]
    chunk_tokens: Annotated[int, msgspec.Meta(ge=1, le=MAX_CHUNK_TOKENS)]
    recorded_at: float = 0.0
    timestamp: float = 0.0
    input_length: int = 0
    output_length: int = 0
    hash_ids: tuple[()] = ()


_decode = msgspec.json.Decoder(Line).decode


def read_lines(file: BinaryIO, name: str) -> Iterator[tuple[int, bytes]]:
    """Yield the lines that are not blank, with their numbers. Raises `TraceError` for one longer than `MAX_LINE`, of
    which no more than that is read."""
    number = 0
    while line := file.readline(MAX_LINE + 1):
        number += 1
        if len(line) > MAX_LINE:
            raise TraceError(
                f"the line is longer than {MAX_LINE >> 20} MiB",
                where=f"{name}:{number}",
                available=FORM,
                hint="write one request per line",
            )
        if not line.isspace():
            yield number, line


def requests(lines: Iterator[tuple[int, bytes]], name: str, chunk_tokens: int) -> Iterator[Request]:
    """Yield the requests of the lines. Raises `TraceError` at the first line that is wrong."""
    first: float | None = None
    before = 0.0
    for number, text in lines:
        where = f"{name}:{number}"
        line = decoded(text, where)
        now = line.timestamp
        if not 0 <= now <= _MAX_SINCE_1970_MS:
            raise _wrong_time(where, f"`timestamp` is {now:g} ms")
        if first is None:
            first = before = now
        if now < before:
            raise TraceError(
                f"`timestamp` is {_time(now)} ms, after a line with {_time(before)} ms",
                where=where,
                available="lines in the order of time",
                hint=f"sort the file: jq -s -c 'sort_by(.timestamp)[]' {name}",
            )
        at = (now - first) / 1000
        if at > MAX_SPAN_S:
            raise _wrong_time(where, f"`timestamp` is {at / 86400:.0f} days after the first")
        before = now
        _check_chunks(line.input_length, len(line.hash_ids), chunk_tokens, where)
        if line.start % chunk_tokens or line.start > line.input_length:
            raise TraceError(
                f"`start` is {line.start} tokens of {line.input_length}",
                where=where,
                available=f"whole chunks of {chunk_tokens} tokens within the prompt",
                hint="correct this field",
            )
        yield Request(
            at,
            line.input_length,
            line.output_length or 0,
            line.hash_ids,
            line.start,
            line.hit_length,
            line.tenant,
            line.model,
            line.lost,
        )


def decoded(text: bytes, where: str) -> Line:
    """Return the request of a line. Raises `TraceError`."""
    try:
        return _decode(text)
    except msgspec.ValidationError as error:
        raise wrong_field(error, where, FORM) from None
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        cut = not text.endswith(b"\n")
        raise TraceError(
            "the file ends within this line" if cut else f"the line is not a JSON object: {error}",
            where=where,
            available=FORM,
            hint="copy the file again, or cut off its last line: sed -i '$d' FILE" if cut else "correct the line",
        ) from None


def wrong_field(error: msgspec.ValidationError, where: str, form: str) -> TraceError:
    """Return the error of an object whose field msgspec does not accept."""
    fact, _, place = str(error).partition(" - at `$.")
    return TraceError(
        f"`{place.rstrip('`')}`: {fact}" if place else fact, where=where, available=form, hint="correct this field"
    )


def _check_chunks(tokens: int, chunks: int, chunk_tokens: int, where: str) -> None:
    """Raise `TraceError` unless so many tokens fill the chunks, but for the last one."""
    full = tokens // chunk_tokens
    if not full <= chunks <= full + (tokens % chunk_tokens > 0):
        guess = f", or {tokens / chunks:.0f} tokens are a chunk" if chunks else ""
        raise TraceError(
            f"`hash_ids` has {chunks} chunks, but `input_length` is {tokens} tokens, "
            f"{tokens / chunk_tokens:.2f} chunks of {chunk_tokens}",
            where=where,
            available=f"{full} chunks, or one more for the part of one",
            hint=f"correct the line{guess}: say so with --chunk-tokens",
        )


def _time(value: float) -> str:
    return f"{value:.3f}".rstrip("0").rstrip(".")


def _wrong_time(where: str, fact: str) -> TraceError:
    return TraceError(
        fact,
        where=where,
        available="milliseconds since the first request or since 1970, from 0 to ten years after the first request",
        hint="convert the times to ms",
    )
