"""The worker's knowledge of its engine's adapters: the content that vLLM has loaded under each number, and whether it
still holds it.

vLLM reports neither to a connector, so one call of vLLM's is watched: the load of an adapter. The files are named
before and after it; if they differ, what was loaded is unknown, and the adapter has no name. Without such a call in
this vLLM no adapter has one. For the worker's thread.
"""

from __future__ import annotations

import functools
import logging
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from kvf_vllm.adapters import AdapterFacts, AdapterReader, adapter_of, settings_of
from kvf_vllm.step_messages import AdapterNews, AdapterUse

log = logging.getLogger(__name__)


class LoadedAdapters:
    """The adapters of the engine with this `LoRAConfig`, None: it has none. `resolve` gives the folder for a path, as
    vLLM finds it. `base_uses_last_slot`: vLLM computes requests without an adapter by whatever lies in the last slot
    for adapters, as its code for CPUs does (index -1)."""

    def __init__(
        self,
        lora_config: Any = None,
        *,
        resolve: Callable[[str], str] = str,
        base_uses_last_slot: bool = False,
        reader: AdapterReader | None = None,
    ) -> None:
        self._config = lora_config
        self._base_uses_last_slot = base_uses_last_slot
        self._is_base_spoiled = False
        self._settings = settings_of(lora_config)
        self._resolve = resolve
        self._reader = reader or AdapterReader()
        self._content: dict[int, str] = {}
        self._news: dict[int, AdapterNews] = {}
        self._held: Callable[[], set[int]] = set
        self._slots: Callable[[], Sequence[int | None]] = tuple

    def watch(self, manager_class: Any) -> None:
        """Follows the loads of vLLM's class from now on. Never raises."""
        try:
            watch_loads(manager_class)
            _watching.append(weakref.ref(self))
        except AttributeError as error:
            log.warning("requests with adapters are computed, this vLLM's loads cannot be seen: %s", error)

    def concerns(self, manager: Any) -> bool:
        """True if this manager of adapters is that of this engine: several may share a process."""
        return self._config is not None and getattr(manager, "lora_config", None) is self._config

    def content(self, request: Any) -> str:
        """The name of what lies in the adapter's files now, "" if it has none. Reads them."""
        return self._named(adapter_of(request, self._settings))

    def loaded(self, manager: Any, request: Any, before: str) -> None:
        """A load by vLLM has succeeded; `before` is the adapter's name from before that."""
        adapter = adapter_of(request, self._settings)
        content = self._named(adapter)
        if content != before:
            log.warning("the files of adapter %s changed while it was loaded: its requests are computed", adapter.name)
            content = ""
        self._content[adapter.number] = content
        self._news[adapter.number] = AdapterNews(adapter.name, adapter.path, content)
        self._held = manager.list_adapters
        # In doubt the last slot is taken.
        slots = getattr(manager, "_adapter_manager", None)
        self._slots = lambda: getattr(slots, "lora_index_to_id", [adapter.number])

    def holds(self, use: AdapterUse) -> bool:
        """True if vLLM holds the adapter with just this content."""
        return bool(use.content) and self._content.get(use.number) == use.content and use.number in self._held()

    def spoils_base(self) -> bool:
        """True once requests without an adapter may have been computed by one, and lie so in vLLM's own prefix cache.
        To be asked after each step."""
        if self._base_uses_last_slot and not self._is_base_spoiled and self._slots()[-1:] not in ([], (), [None]):
            self._is_base_spoiled = True
            log.warning("on a CPU vLLM gives requests without an adapter the one in its last slot: they are not stored")
        return self._is_base_spoiled

    def take_news(self) -> dict[int, AdapterNews | None]:
        """What was loaded since the last call, by number; None for what vLLM has dropped."""
        news: dict[int, AdapterNews | None] = dict(self._news)
        self._news.clear()
        if self._content:
            for number in self._content.keys() - self._held():
                del self._content[number]
                news[number] = None
        return news

    def _named(self, adapter: AdapterFacts) -> str:
        try:
            return self._reader.content(replace(adapter, path=self._resolve(adapter.path)))
        except Exception as error:  # noqa: BLE001 - whatever it is, the adapter has no name
            log.warning("requests with adapter %s are computed: %s", adapter.name, error)
            return ""


_watching: list[weakref.ref[LoadedAdapters]] = []


def watch_loads(manager_class: Any) -> None:
    """Makes the class tell the watching engines of each load. Idempotent."""
    load = manager_class._load_adapter
    if getattr(load, "tells_kvframework", False):
        return

    @functools.wraps(load)
    def watched(manager: Any, lora_request: Any, *args: Any, **kwargs: Any) -> Any:
        engine = next((each for ref in _watching if (each := ref()) is not None and each.concerns(manager)), None)
        before = engine.content(lora_request) if engine is not None else ""
        adapter = load(manager, lora_request, *args, **kwargs)
        if engine is not None:
            engine.loaded(manager, lora_request, before)
        return adapter

    watched.tells_kvframework = True  # type: ignore[attr-defined]
    manager_class._load_adapter = watched
