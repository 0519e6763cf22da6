"""The worker's knowledge of its engine's adapters: the content that vLLM has loaded under each number, and whether it
still holds it.

vLLM reports neither to a connector, so one call of vLLM's is watched: the load of an adapter. The files are named
before and after it; if they differ, what was loaded is unknown, and the adapter has no name. Without such a call in
this vLLM no adapter has one. For the worker's thread.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from kvf_vllm.adapters import AdapterFacts, AdapterReader, adapter_of, settings_of
from kvf_vllm.step_messages import AdapterNews, AdapterUse
from kvframework.client import WatchedCall, watch_calls

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
            watch_calls(manager_class, ("_load_adapter",), self)
        except AttributeError as error:
            log.warning("requests with adapters are computed, this vLLM's loads cannot be seen: %s", error)

    @contextmanager
    def around(self, call: WatchedCall) -> Iterator[None]:
        """A load by vLLM. Several engines may share a process."""
        manager = call.args[0]
        if self._config is None or getattr(manager, "lora_config", None) is not self._config:
            yield
            return
        adapter = adapter_of(call.argument(1, "lora_request"), self._settings)
        before = self._named(adapter)
        yield
        self._loaded(manager, adapter, before)

    def _loaded(self, manager: Any, adapter: AdapterFacts, before: str) -> None:
        """A load has succeeded; `before` is the adapter's name from before that."""
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
