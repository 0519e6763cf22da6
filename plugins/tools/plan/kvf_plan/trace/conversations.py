"""Traces of kv-cache-tester (callanjfox/kv-cache-tester): a JSON file for each conversation of a coding agent.

A file has times from its own start, and block ids of its own (`hash_id_scope` "local"). When each conversation begins
is not recorded: in a folder they begin by chance, at a rate, the same every time.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from operator import itemgetter
from pathlib import Path
from random import Random
from typing import Annotated, NamedTuple, TypeVar

import msgspec

from kvf_plan.errors import TraceError
from kvf_plan.trace.form import KV_CACHE_TESTER, Header, Request, readable
from kvf_plan.trace.lines import MAX_CHUNK_TOKENS, MAX_SPAN_S, Tokens, check_chunks, wrong_field

MAX_FILE = 64 << 20
MAX_OPEN_BYTES = 1 << 30
MAX_FILES = 1 << 20
CONVERSATIONS_PER_HOUR = 20.0
FORM = (
    "a conversation of kv-cache-tester: `block_size`, and `requests` with `t` in s, in the order of time, `in` and "
    "`out` in tokens and `hash_ids`, integers from 0 to 2**40 - 1"
)
_ID_BITS = 40  # of a conversation's own ids; its number among the files is above them
_MAX_DEPTH = 8

T = TypeVar("T")
_Id = Annotated[int, msgspec.Meta(ge=0, lt=1 << _ID_BITS)]
_Time = Annotated[float, msgspec.Meta(ge=0, le=MAX_SPAN_S)]


class _Conversation(msgspec.Struct):
    block_size: Annotated[int, msgspec.Meta(ge=1, le=MAX_CHUNK_TOKENS)]
    requests: list[msgspec.Raw]
    hash_id_scope: str = "local"


class _Entry(msgspec.Struct):
    """A request, or a sub-agent, whose requests have times from its own."""

    t: _Time
    requests: list[msgspec.Raw] | None = None


class _Asked(msgspec.Struct):
    hash_ids: list[_Id]
    input: Tokens = msgspec.field(name="in")
    output: Tokens = msgspec.field(name="out", default=0)


_conversation = msgspec.json.Decoder(_Conversation)
_entry = msgspec.json.Decoder(_Entry)
_asked = msgspec.json.Decoder(_Asked)


class Conversations:
    """The requests of some conversations, in the order of time. Of those that go on at a time the files' bytes are in
    memory, `MAX_OPEN_BYTES` at most."""

    def __init__(self, paths: Sequence[Path], name: str, per_hour: float = CONVERSATIONS_PER_HOUR) -> None:
        """Raises `TraceError` if the first file is no conversation."""
        if len(paths) > MAX_FILES:
            raise TraceError(f"{len(paths)} files", where=name, available=f"{MAX_FILES} at most", hint="name fewer")
        self._paths = paths
        self._gap_s = 3600 / per_hour
        self.header = Header(_load(paths[0])[1].block_size, name, KV_CACHE_TESTER)

    def __iter__(self) -> Iterator[Request]:
        """Raises `TraceError` at the first mistake."""
        going_on: list[_GoingOn] = []
        chance = Random(0)  # noqa: S311 - a schedule, the same every time
        start = 0.0
        for number, path in enumerate(self._paths):
            start += chance.expovariate(1 / self._gap_s) if number else 0.0
            while going_on and going_on[0].at <= start:
                yield _take(going_on)
            size, requests = self._begun(number, path, start)
            _go_on(going_on, number, requests, size)
            _check_held(going_on, path)
        while going_on:
            yield _take(going_on)

    def _begun(self, number: int, path: Path, start: float) -> tuple[int, Iterator[Request]]:
        size, conversation = _load(path)
        if conversation.block_size != self.header.chunk_tokens:
            raise TraceError(
                f"`block_size` is {conversation.block_size}",
                where=str(path),
                available=f"{self.header.chunk_tokens}, as in {self._paths[0].name}",
                hint="read the files of each block size on their own",
            )
        shared = conversation.hash_id_scope == "global"
        return size, _requests(conversation, str(path), 0 if shared else number + 1, start)


class _GoingOn(NamedTuple):
    """A conversation of a heap: its next request, and those that follow. No two have one `number`."""

    at: float
    number: int
    next: Request
    others: Iterator[Request]
    bytes: int


def _go_on(going_on: list[_GoingOn], number: int, others: Iterator[Request], size: int) -> None:
    request = next(others, None)
    if request is not None:
        heapq.heappush(going_on, _GoingOn(request.at, number, request, others, size))


def _take(going_on: list[_GoingOn]) -> Request:
    """Take the earliest request."""
    first = heapq.heappop(going_on)
    _go_on(going_on, first.number, first.others, first.bytes)
    return first.next


def _check_held(going_on: list[_GoingOn], path: Path) -> None:
    held = sum(each.bytes for each in going_on)
    if held > MAX_OPEN_BYTES:
        raise TraceError(
            f"{len(going_on)} conversations go on at once, {held >> 20} MiB of files",
            where=str(path),
            available=f"{MAX_OPEN_BYTES >> 20} MiB",
            hint="name a folder of fewer files, or let fewer begin in an hour",
        )


def _load(path: Path) -> tuple[int, _Conversation]:
    """Return the bytes of the file and what is in it, requests not yet decoded."""
    with readable(path), path.open("rb") as file:
        text = file.read(MAX_FILE + 1)
    if len(text) > MAX_FILE:
        raise TraceError(
            f"the file is larger than {MAX_FILE >> 20} MiB", where=str(path), available=FORM, hint="split it"
        )
    return len(text), _decoded(_conversation, text, str(path))


def _requests(conversation: _Conversation, name: str, file_number: int, start: float) -> Iterator[Request]:
    base = file_number << _ID_BITS
    block = conversation.block_size
    for at, raw, where in sorted(_entries(conversation.requests, start, f"{name}: requests", 0), key=itemgetter(0)):
        asked = _decoded(_asked, raw, where)
        check_chunks(asked.input, len(asked.hash_ids), block, where, "`hash_ids`", "`in`")
        yield Request(at, asked.input, asked.output, [base | each for each in asked.hash_ids])


def _entries(raws: list[msgspec.Raw], start: float, where: str, depth: int) -> Iterator[tuple[float, msgspec.Raw, str]]:
    """Yield the requests with their times, those of sub-agents among them."""
    before = 0.0
    for index, raw in enumerate(raws):
        place = f"{where}[{index}]"
        entry = _decoded(_entry, raw, place)
        if entry.t < before:
            raise TraceError(
                f"`t` is {entry.t:g} s, after a request at {before:g} s",
                where=place,
                available="requests in the order of time",
                hint="sort them by `t`",
            )
        before = entry.t
        if entry.requests is None:
            yield start + entry.t, raw, place
        elif depth < _MAX_DEPTH:
            yield from _entries(entry.requests, start + entry.t, f"{place}.requests", depth + 1)
        else:
            raise TraceError(
                "sub-agents of sub-agents", where=place, available=f"{_MAX_DEPTH} levels", hint="correct the file"
            )


def _decoded(decoder: msgspec.json.Decoder[T], text: bytes | msgspec.Raw, where: str) -> T:
    try:
        return decoder.decode(text)
    except msgspec.ValidationError as error:
        raise wrong_field(error, where, FORM) from None
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise TraceError(f"this is no JSON: {error}", where=where, available=FORM, hint="copy the file again") from None
