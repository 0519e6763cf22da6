"""The form that every trace has in memory, whatever file it was read from. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

import msgspec

from kvf_plan.errors import TraceError

RECORD = "record a trace: kvframework trace record --for 10m -o trace.jsonl"
_READ = (
    "a trace of `kvframework trace record`, or of Mooncake (JSON lines with `timestamp`, `input_length`, `hash_ids`)"
)
MAX_ID = (1 << 63) - 1
UNKNOWN = -1
KVFRAMEWORK = "kvframework"
MOONCAKE = "mooncake"


@contextmanager
def readable(path: Path) -> Iterator[None]:
    """Turn errors of the system into `TraceError`."""
    try:
        yield
    except FileNotFoundError:
        raise no_trace(path, "the trace file does not exist", "check the path") from None
    except OSError as error:
        raise no_trace(path, error.strerror or type(error).__name__, "check the path and its permissions") from None


def no_trace(path: Path, fact: str, hint: str) -> TraceError:
    return TraceError(fact, where=str(path), available=_READ, hint=hint)


class Request(msgspec.Struct, frozen=True, gc=False):
    """One prompt that an engine asked the cache for.

    `at` is in seconds from the trace's first request, never negative, never less than the one before. `tokens` is the
    prompt's length, `output_tokens` that of the answer, 0 if unknown. `chunks` are ids in the prompt's order, from
    0 to `MAX_ID`: equal ids in one trace are equal prompts from the first token to the end of that chunk. They are as
    many as `tokens` fill, or one more where the trace also counts the chunk that is not full.

    The first `start` tokens the engine had itself, and asked only for what follows: whole chunks. `hit_tokens` is what
    the recorded server had of that, or `UNKNOWN`. `tenant` is the number of a configured one in the order of the
    server's TOML, 0 for none; `model` numbers those of the trace from 0 on. `lost` requests between this and the one
    before are missing from the trace.
    """

    at: float
    tokens: int
    output_tokens: int
    chunks: Sequence[int]
    start: int = 0
    hit_tokens: int = UNKNOWN
    tenant: int = 0
    model: int = 0
    lost: int = 0


class Header(msgspec.Struct, frozen=True):
    """What is said of a trace as a whole. `form` names the format of its file: one of those below. `chunk_tokens`
    is the tokens of each chunk, `name` the name of the file, `recorded_at` seconds since 1970, 0 unknown."""

    chunk_tokens: int
    name: str
    form: str
    recorded_at: float = 0.0


class Trace(Protocol):
    """A trace in a file. It can be iterated as often as you like: each time reads the file again."""

    @property
    def header(self) -> Header: ...

    def __iter__(self) -> Iterator[Request]:
        """Yield the requests in the order of time. Raises `TraceError` at the first mistake."""
        ...
