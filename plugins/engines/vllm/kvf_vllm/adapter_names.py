"""The scheduler's knowledge of adapters: the name of the content with which a request will be computed.

An adapter that all workers hold has the name that they tell. One that they do not hold yet is named by its files, in a
thread; the workers compare when they have loaded it. A name that is known only from the files is good for a load within
the step that uses the adapter, never for one before it.

vLLM's own prefix cache goes by an adapter's name and path. Once these had two contents in the engine's life, blocks of
both may lie there, and their requests are left out.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from kvf_vllm.adapters import AdapterFacts, AdapterReader, adapter_of
from kvf_vllm.step_messages import AdapterNews, AdapterUse
from kvframework.api.futures import Future, Promise


class Adapted(NamedTuple):
    """The adapter of one request, if it has one. `use` is None as long as it has no name; `reason` says why it gets
    none, "" as long as it is looked for. `is_loaded`: all workers hold it."""

    use: AdapterUse | None = None
    is_loaded: bool = False
    reason: str = ""


class AdapterNames:
    """See above. `by_path` False: vLLM's prefix cache goes by the adapter's name alone. For one thread."""

    def __init__(
        self,
        workers: int,
        *,
        settings: Sequence[str] = (),
        by_path: bool = True,
        read: Callable[[AdapterFacts], str] | None = None,
    ) -> None:
        self._workers = workers
        self._settings = tuple(settings)
        self._by_path = by_path
        self._read = read or AdapterReader().content
        self._held: dict[int, dict[int, AdapterNews]] = {}
        self._contents: dict[tuple[str, str], set[str]] = {}
        self._reading: dict[str, Future[str]] = {}
        self._wanted: queue.SimpleQueue[tuple[AdapterFacts, Promise[str]]] | None = None

    def heard(self, worker: int, news: Mapping[int, AdapterNews | None]) -> None:
        """Applies the news of one worker."""
        for number, each in news.items():
            held = self._held.setdefault(number, {})
            if each is None:
                held.pop(worker, None)
                if not held:
                    del self._held[number]
                continue
            held[worker] = each
            self._contents.setdefault(self._key(each.name, each.path), set()).add(each.content)

    def adapted(self, request_id: str, request: Any) -> Adapted:
        """The adapter of vLLM's `LoRARequest`; without a use and a reason it is to be asked again. Never blocks."""
        adapter = adapter_of(request, self._settings)
        held = self._held.get(adapter.number, {})
        is_loaded = len(held) == self._workers
        if is_loaded:
            contents = {each.content for each in held.values()}
            content = contents.pop() if len(contents) == 1 else ""
        else:
            reading = self._reading.get(request_id) or self._started(request_id, adapter)
            if not reading.query():
                return Adapted()
            content = reading.result(0) if reading.exception() is None else ""
        self.forget(request_id)
        if not content:
            return Adapted(reason="lora_unnamed")
        if self._contents.get(self._key(adapter.name, adapter.path), set()) - {content}:
            return Adapted(reason="lora_changed")
        return Adapted(AdapterUse(adapter.number, content), is_loaded)

    def forget(self, request_id: str) -> None:
        """The request has ended, or waits no longer."""
        self._reading.pop(request_id, None)

    def _key(self, name: str, path: str) -> tuple[str, str]:
        return name, path if self._by_path else ""

    def _started(self, request_id: str, adapter: AdapterFacts) -> Future[str]:
        if self._wanted is None:
            self._wanted = queue.SimpleQueue()
            threading.Thread(
                target=self._keep_reading, args=(self._wanted,), name="kvf-vllm-adapters", daemon=True
            ).start()
        promise: Promise[str] = Promise()
        self._reading[request_id] = promise
        self._wanted.put((adapter, promise))
        return promise

    def _keep_reading(self, wanted: queue.SimpleQueue[tuple[AdapterFacts, Promise[str]]]) -> None:
        while True:
            adapter, promise = wanted.get()
            try:
                promise.set_result(self._read(adapter))
            except Exception as error:  # noqa: BLE001 - whatever it is, the adapter has no name
                promise.set_exception(error)


NO_ADAPTER = Adapted()
