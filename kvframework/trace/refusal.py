"""The error of a file that is no trace, or cannot be read."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kvframework.errors import TraceError

RECORD = "record one: kvframework trace record --for 10m -o trace.jsonl"
_READ = (
    "a trace of `kvframework trace record`, of Mooncake (JSON lines with `timestamp`, `input_length`, `hash_ids`), "
    "of Qwen's Bailian, or of kv-cache-tester (a JSON file with `requests`, or a folder of them)"
)


@contextmanager
def readable(path: Path) -> Iterator[None]:
    """Turn errors of the system into `TraceError`."""
    try:
        yield
    except FileNotFoundError:
        raise no_trace(path, "there is no such file", "check the path") from None
    except OSError as error:
        raise no_trace(path, error.strerror or type(error).__name__, "check the path and its permissions") from None


def no_trace(path: Path, fact: str, hint: str) -> TraceError:
    return TraceError(fact, where=str(path), available=_READ, hint=hint)
