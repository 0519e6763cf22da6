"""Calls of an engine's own methods that an integration has to know of, because the engine tells it nothing."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from typing import Any, Protocol


@dataclass
class WatchedCall:
    """One call of a method; `args` begin with its object. `result` is None until the method has returned."""

    name: str
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    result: Any = None

    def argument(self, place: int, name: str, default: Any = None) -> Any:
        """The argument at `place`, where the method's object is at 0, or by name."""
        return self.args[place] if len(self.args) > place else self.kwargs.get(name, default)


class CallWatcher(Protocol):
    def around(self, call: WatchedCall) -> AbstractContextManager[object]:
        """The call runs within the context. An exception of the context reaches the engine."""


def watch_calls(owner: type, names: Iterable[str], watcher: CallWatcher) -> None:
    """Runs every call of these methods of a class within `watcher.around`, from now on and for each object of it. The
    watcher is borrowed: it watches no more once its owner has dropped it. Idempotent. Raises `AttributeError` for a
    method that the class lacks, before it changes any."""
    methods = {name: getattr(owner, name) for name in names}
    for name, method in methods.items():
        watchers = getattr(method, "watchers", None)
        if watchers is None:
            watchers = weakref.WeakSet()
            setattr(owner, name, _watched(name, method, watchers))
        watchers.add(watcher)


def _watched(name: str, method: Callable[..., Any], watchers: weakref.WeakSet[Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def watched(*args: Any, **kwargs: Any) -> Any:
        call = WatchedCall(name, args, kwargs)
        with ExitStack() as contexts:
            for watcher in list(watchers):
                contexts.enter_context(watcher.around(call))
            call.result = method(*args, **kwargs)
        return call.result

    watched.watchers = watchers  # type: ignore[attr-defined]
    return watched
