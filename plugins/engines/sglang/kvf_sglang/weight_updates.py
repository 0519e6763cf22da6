"""Updates of the weights in a running engine. SGLang does not tell its storage backend of them: without this, KV of the
new weights would be stored under the names of the old ones."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from kvf_sglang.cache import PageCache
from kvframework.client import WatchedCall, watch_calls

UPDATES = (
    "update_weights_from_disk",
    "begin_weight_update",
    "load_weights_from_distributed",
    "update_weights_from_tensor",
    "update_weights_from_ipc",
)


class _Updates:
    """The updates of this process since the first call of `watch`; `why` is the last one, "" for none."""

    def __init__(self) -> None:
        self.why = ""
        self.caches: weakref.WeakSet[Any] = weakref.WeakSet()

    @contextmanager
    def around(self, call: WatchedCall) -> Iterator[None]:
        self.why = f"SGLang updates its weights ({call.name})"
        for cache in list(self.caches):
            cache.retire(self.why)
        yield


# By SGLang's class.
_updates: weakref.WeakKeyDictionary[type, _Updates] = weakref.WeakKeyDictionary()


def watch(cache: PageCache, updater: type) -> None:
    """Retires the cache before any update of the weights of this process, and at once if there was one since the first
    call: a backend may be detached and attached. `updater` is SGLang's class. Raises `AttributeError` if its methods
    are not those that are known."""
    updates = _updates.setdefault(updater, _Updates())
    watch_calls(updater, UPDATES, updates)
    updates.caches.add(cache)
    if updates.why:
        cache.retire(updates.why)
