"""Calls whose exceptions do not reach the engine: a default answer that costs only the cache, a count, one line in the
log."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any, Protocol, TypeVar, cast

log = logging.getLogger(__name__)

F = TypeVar("F", bound=Callable[..., Any])


class Noting(Protocol):
    """An object whose methods are guarded."""

    def note_error(self, where: str, error: Exception) -> None: ...


class ErrorNotes:
    """Logs one line for each kind of error in each place, with its traceback. For one thread."""

    def __init__(self) -> None:
        self._seen: set[tuple[str, type[Exception]]] = set()

    def note(self, where: str, error: Exception) -> None:
        if (where, type(error)) not in self._seen:
            self._seen.add((where, type(error)))
            log.error("%s failed, the engine continues without the cache there: %r", where, error, exc_info=error)


def harmless(
    default: Callable[[], object] = lambda: None, then: Callable[..., object] | None = None
) -> Callable[[F], F]:
    """Decorates a method so that it returns `default()` where it would raise. `then` is called first, with the method's
    arguments; its result replaces the default unless it is None or `then` raises."""

    def decorate(method: F) -> F:
        @functools.wraps(method)
        def guarded(self: Noting, *args: object, **kwargs: object) -> object:
            try:
                return method(self, *args, **kwargs)
            except Exception as error:  # noqa: BLE001 - whatever it is, it is the cache's
                self.note_error(method.__name__, error)
            try:
                answer = then(self, *args, **kwargs) if then is not None else None
            except Exception as error:  # noqa: BLE001
                self.note_error(method.__name__, error)
                answer = None
            return default() if answer is None else answer

        return cast("F", guarded)

    return decorate
