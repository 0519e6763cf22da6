"""Calls whose exceptions do not reach the engine: a default answer that costs only the cache, a count, one line in the
log."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any, Protocol, TypeVar, cast

from kvframework.errors import KVFrameworkError

log = logging.getLogger(__name__)

F = TypeVar("F", bound=Callable[..., Any])


class Counting(Protocol):
    """An object whose methods are guarded; `errors` counts by method and kind of error."""

    errors: dict[str, int]


def harmless(default: Callable[..., object]) -> Callable[[F], F]:
    """Decorates a method so that it returns `default(*its arguments)` where it would raise. The first error of each
    kind in each method is logged, with its traceback if it is not the framework's own."""

    def decorate(method: F) -> F:
        @functools.wraps(method)
        def guarded(self: Counting, *args: Any, **kwargs: Any) -> object:
            try:
                return method(self, *args, **kwargs)
            except Exception as error:
                kind = f"{method.__name__}: {type(error).__name__}"
                seen = self.errors[kind] = self.errors.get(kind, 0) + 1
                if seen == 1:
                    known = isinstance(error, KVFrameworkError)
                    log.error(
                        "%s failed, the engine continues without the cache there: %s",
                        method.__name__.lstrip("_"),
                        error if known else repr(error),
                        exc_info=None if known else error,
                    )
                return default(*args, **kwargs)

        return cast("F", guarded)

    return decorate
