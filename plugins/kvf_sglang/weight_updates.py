"""Updates of the weights in a running engine. SGLang does not tell its storage backend of them: without this, KV of the
new weights would be stored under the names of the old ones."""

from __future__ import annotations

import functools
import logging
import weakref
from collections.abc import Callable
from typing import Any, Protocol

log = logging.getLogger(__name__)

UPDATES = (
    "update_weights_from_disk",
    "begin_weight_update",
    "load_weights_from_distributed",
    "update_weights_from_tensor",
    "update_weights_from_ipc",
)


class Retiring(Protocol):
    def retire(self, why: str) -> None:
        """Everything is a miss from now on. Never raises."""


_watching: weakref.WeakSet[Any] = weakref.WeakSet()
# The updates of this process, by SGLang's class.
_updated: weakref.WeakKeyDictionary[type, str] = weakref.WeakKeyDictionary()


def watch(cache: Retiring, updater: type) -> None:
    """Retires the cache before any update of the weights of this process, and at once if there was one since the first
    call: a backend may be detached and attached. `updater` is SGLang's class. Raises `AttributeError` if its methods
    are not those that are known."""
    for name in UPDATES:
        method = getattr(updater, name)
        if not hasattr(method, "kvf_sglang"):
            setattr(updater, name, _watched(updater, name, method))
    _watching.add(cache)
    if updater in _updated:
        cache.retire(_updated[updater])


def _watched(updater: type, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def watched(*args: Any, **kwargs: Any) -> Any:
        why = _updated[updater] = f"SGLang updates its weights ({name})"
        for cache in list(_watching):
            cache.retire(why)
        return method(*args, **kwargs)

    watched.kvf_sglang = True  # type: ignore[attr-defined]
    return watched
