"""A full pipe that has no reader, for tests of writers."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator


@contextlib.contextmanager
def full_pipe() -> Iterator[tuple[int, int]]:
    """Yield the descriptors of its two ends; a write blocks."""
    reader, writer = os.pipe()
    try:
        fcntl.fcntl(writer, fcntl.F_SETPIPE_SZ, 4096)
        os.set_blocking(writer, False)
        with contextlib.suppress(BlockingIOError):
            while True:
                os.write(writer, b"." * 4096)
        with contextlib.suppress(BlockingIOError):
            while True:
                os.write(writer, b".")
        os.set_blocking(writer, True)
        yield reader, writer
    finally:
        os.close(reader)
        os.close(writer)
