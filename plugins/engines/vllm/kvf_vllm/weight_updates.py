"""Calls by which vLLM updates the weights of a running engine, or resets its prefix cache. vLLM tells its connectors of
neither, so the methods are watched."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from kvframework.client import WatchedCall, watch_calls

# After the connector is made, and before the first request.
_STARTS = "compile_or_warm_up_model"
_OF_WORKER = (
    "load_model",
    "reload_weights",
    "start_draft_weight_update",
    "start_weight_update",
    "update_weights",
    "finish_weight_update",
)
_OF_RUNNER = ("load_model", "reload_weights")


class WeightUpdates:
    """The updates of one worker. `begins` is called before each, `ends` after it, with the time since the epoch at
    which it began if all weights are those of the model's files now, else None. While an update takes several calls it
    does not end."""

    def __init__(self, config: Any, *, begins: Callable[[], None], ends: Callable[[float | None], None]) -> None:
        self._parallel = config.parallel_config
        self._begins = begins
        self._ends = ends
        # None until vLLM has loaded the model.
        self._worker: Any = None
        self._depth = 0
        self._loaded: set[str] = set()
        # No call gives a draft model its files' weights back.
        self._is_draft_known = True

    @property
    def is_following(self) -> bool:
        return self._worker is not None

    def watch(self, worker_class: type) -> None:
        """Follows the worker of this class that has this configuration. Raises `AttributeError` for a class that is not
        as expected."""
        watch_calls(worker_class, (_STARTS,), self)

    @contextmanager
    def around(self, call: WatchedCall) -> Iterator[None]:
        subject = call.args[0]
        if call.name == _STARTS:
            if getattr(subject.vllm_config, "parallel_config", None) is self._parallel:
                self._follow(subject)
            yield
        elif self._worker is None or not any(subject is each for each in self._subjects()):
            yield
        else:
            yield from self._update(call)

    def _update(self, call: WatchedCall) -> Iterator[None]:
        is_outermost, started = not self._depth, time.time()
        wanted: set[str] | None = None
        if is_outermost:
            self._begins()
            self._loaded = set()
            if call.name == "reload_weights" and call.argument(1, "weights_iterator") is None:
                # As vLLM counts them.
                names = (name for name, _ in self._worker.get_model().named_parameters())
                wanted = {name.replace(".base_layer.", ".") for name in names}
        self._depth += 1
        is_done = False
        try:
            yield
            is_done = True
        finally:
            self._depth -= 1
            if call.name == "load_weights" and call.args[0] is self._worker.get_model():
                self._loaded |= call.result or set()
            if call.name == "start_draft_weight_update" or call.args[0] is self._worker.get_draft_model():
                self._is_draft_known = False
            if is_outermost and not getattr(self._worker, "_weight_update_active", False):
                is_whole = is_done and self._is_draft_known and wanted is not None and wanted <= self._loaded
                self._ends(started if is_whole else None)

    def _subjects(self) -> list[Any]:
        worker = self._worker
        return [worker, worker.model_runner, worker.get_model(), worker.get_draft_model()]

    def _follow(self, worker: Any) -> None:
        self._worker = worker
        for subject, names in (
            (worker, _OF_WORKER),
            (worker.model_runner, _OF_RUNNER),
            (worker.get_model(), ("load_weights",)),
            (worker.get_draft_model(), ("load_weights",)),
        ):
            watch_calls(type(subject), [name for name in names if hasattr(type(subject), name)], self)


class CacheResets:
    """The resets of one vLLM engine's prefix cache; `then` is called after each that has emptied it."""

    def __init__(self, manager: Any, then: Callable[[], None]) -> None:
        self._manager = manager
        self._then = then
        watch_calls(type(manager), ("reset_prefix_cache",), self)

    @contextmanager
    def around(self, call: WatchedCall) -> Iterator[None]:
        yield
        if call.args[0] is self._manager and call.result:
            self._then()
