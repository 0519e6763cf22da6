"""The results of the calls of `TransformersKV`, and the log entry of a failure that costs time only."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

from kvframework.errors import KVFrameworkError


@dataclass(frozen=True)
class Restored:
    """A cache that holds the prompt's first `hit_tokens` tokens. Copying `nbytes` took `copy_seconds` of `seconds`; the
    rest went to hashing, the lookup, waiting for L2, and building the cache."""

    cache: Any
    hit_tokens: int = 0
    nbytes: int = 0
    seconds: float = 0.0
    copy_seconds: float = 0.0


@dataclass(frozen=True)
class Saved:
    """The result of a save: the server holds the first `tokens` tokens. Copying the `nbytes` that it lacked took
    `copy_seconds` of `seconds`."""

    tokens: int = 0
    nbytes: int = 0
    seconds: float = 0.0
    copy_seconds: float = 0.0


@dataclass(frozen=True)
class Generated:
    """Greedy tokens; `ttft_s` is the time to the first of them, the restore included."""

    tokens: list[int]
    restored: Restored
    saved: Saved
    ttft_s: float


def warn(log: logging.Logger, what: str, error: Exception) -> None:
    """Write one entry to `log`; with a traceback only for an unexpected error."""
    if isinstance(error, KVFrameworkError):
        log.warning("%s: %s", what, error)
    else:
        log.warning("%s", what, exc_info=error)
