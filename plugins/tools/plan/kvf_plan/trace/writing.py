"""Writes a trace of ours: a header, then a line for each request, in JSON that Mooncake's readers take too; names of
content and of models are numbers that mean nothing outside of the trace."""

from __future__ import annotations

import contextlib
import hashlib
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from kvf_plan.errors import TraceError
from kvf_plan.trace.form import MAX_ID, Request
from kvf_plan.trace.lines import VERSION, HeaderLine, Line

DIGEST_BYTES = 32
_encode = msgspec.json.Encoder().encode
_MOST_PENDING = 1 << 20


class Anonymous:
    """The numbers of one trace. Chunk ids are 63 bits of BLAKE2b, keyed with 32 random bytes that are kept only here:
    without them a trace does not say whether it has a certain prompt, and two traces share no id. A model's number is
    its place in the order of appearance."""

    def __init__(self) -> None:
        self._salt = secrets.token_bytes(32)
        self._models: dict[str, int] = {}

    def chunks(self, scope: bytes, digests: bytes) -> list[int]:
        """Return an id for each of the packed digests, of 32 bytes: equal ones have equal ids within a scope. About
        1 us each."""
        scoped = hashlib.blake2b(scope, digest_size=8, key=self._salt, person=b"kvf-trace")
        ids = []
        for at in range(0, len(digests), DIGEST_BYTES):
            each = scoped.copy()
            each.update(digests[at : at + DIGEST_BYTES])
            ids.append(int.from_bytes(each.digest(), "little") & MAX_ID)
        return ids

    def model(self, name: str) -> int:
        return self._models.setdefault(name, len(self._models))


class TraceFile:
    """A new file that only its user may read. Raises `TraceError` if it exists, or cannot be written. It holds what the
    last `flush` that did not fail has left, in whole lines: a full disk takes back what it has cut off."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with self._writing():
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            self._file = os.fdopen(descriptor, "wb", 0)
        self._pending = bytearray()
        self._written = 0

    def __enter__(self) -> TraceFile:
        return self

    def __exit__(self, *_exc: object) -> None:
        with self._file:
            self.flush()

    def begin(self, chunk_tokens: int, recorded_at: float = 0.0) -> None:
        """Write the header, once, before any request."""
        self._write(HeaderLine(VERSION, chunk_tokens, recorded_at))

    def add(self, request: Request) -> None:
        """Write a request. The caller keeps the order of time."""
        self._write(
            Line(
                timestamp=round(request.at * 1000, 3),
                input_length=request.tokens,
                output_length=request.output_tokens,
                hash_ids=list(request.chunks),
                start=request.start,
                hit_length=request.hit_tokens,
                tenant=request.tenant,
                model=request.model,
                lost=request.lost,
            )
        )

    def flush(self) -> None:
        """Give all lines since the last time to the system, or none: those are forgotten then."""
        lines, self._pending = memoryview(self._pending), bytearray()
        try:
            with self._writing():
                left = lines
                while left:
                    left = left[self._file.write(left) :]
        except BaseException:
            with contextlib.suppress(OSError):
                self._file.truncate(self._written)
            raise
        self._written += len(lines)

    def _write(self, line: HeaderLine | Line) -> None:
        self._pending += _encode(line)
        self._pending += b"\n"
        if len(self._pending) >= _MOST_PENDING:
            self.flush()

    @contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except FileExistsError:
            raise TraceError(
                "the file exists",
                where=str(self.path),
                available="a new file",
                hint="give another file name, or remove the existing file",
            ) from None
        except OSError as error:
            raise TraceError(
                error.strerror or type(error).__name__,
                where=str(self.path),
                available="a file that can be written",
                hint="check the folder and the free space on its disk",
            ) from None
