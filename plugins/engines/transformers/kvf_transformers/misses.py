"""The log entry of a failure that costs time only. Runs in the engine process."""

from __future__ import annotations

import logging

from kvframework.errors import KVFrameworkError


def warn(log: logging.Logger, what: str, error: Exception) -> None:
    """Write one entry to `log`; with a traceback only for an unexpected error."""
    if isinstance(error, KVFrameworkError):
        log.warning("%s: %s", what, error)
    else:
        log.warning("%s", what, exc_info=error)
