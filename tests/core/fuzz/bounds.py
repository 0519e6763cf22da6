"""The bounds of what decoding may allocate, and of what an error may say."""

from __future__ import annotations

import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager

# Of each byte that came: a number of one byte becomes an object, and lists grow ahead.
PER_BYTE = 48
ALWAYS = 128 << 10


def check_words(error: Exception, most: int = 600) -> None:
    """What a stranger sent is not repeated at length."""
    assert 0 < len(str(error)) < most


@contextmanager
def bounded(received: int) -> Iterator[None]:
    """Fails if the block allocates more at its peak than `received` bytes are worth."""
    tracemalloc.start()
    try:
        yield
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak <= ALWAYS + PER_BYTE * received, f"{peak} bytes for {received}"
