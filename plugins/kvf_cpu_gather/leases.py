"""Owns how a lease is given back after a failure. Engine side."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from kvframework.errors import KVFrameworkError

_log = logging.getLogger(__name__)


@contextmanager
def given_back(end: Callable[[str], object], lease: str) -> Iterator[None]:
    """Calls `end(lease)` if the body fails. If that fails too, the lease ends with its time or with this client."""
    try:
        yield
    except BaseException:
        try:
            end(lease)
        except KVFrameworkError as error:
            _log.debug("the lease was not given back: %s", error)
        raise
