"""Owns how a failure that costs time only is told. Runs in the engine process."""

from __future__ import annotations

import logging

from kvframework.errors import KVFrameworkError


def warn(log: logging.Logger, what: str, error: Exception) -> None:
    """One entry in `log`; a traceback only for what nobody foresaw."""
    if isinstance(error, KVFrameworkError):
        log.warning("%s: %s", what, error)
    else:
        log.warning("%s", what, exc_info=error)
