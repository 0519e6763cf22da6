"""Weights that change in a running engine: from the moment an update begins, the engine neither loads nor stores until
it starts again. vLLM tells its connectors of no update, so the methods that make one are watched in each worker."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from kvframework.client import WatchedCall, watch_calls

# After the connector is made, and before the first request.
_STARTS = "compile_or_warm_up_model"
_OF_WORKER = ("load_model", "reload_weights", "start_draft_weight_update", "start_weight_update", "update_weights")
_OF_RUNNER = ("load_model", "reload_weights")


class WeightUpdates:
    """The updates of one worker's weights, with this configuration of vLLM's; `begins` is called before each."""

    def __init__(self, config: Any, begins: Callable[[], None]) -> None:
        self._parallel = config.parallel_config
        self._begins = begins
        # None until vLLM has loaded the model.
        self._worker: Any = None

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
        elif self._worker is not None and any(subject is each for each in self._subjects()):
            self._begins()
        yield

    def _subjects(self) -> list[Any]:
        worker = self._worker
        return [worker, worker.model_runner, worker.get_model(), worker.get_draft_model()]

    def _follow(self, worker: Any) -> None:
        self._worker = worker
        names = (_OF_WORKER, _OF_RUNNER, ("load_weights",), ("load_weights",))
        for subject, methods in zip(self._subjects(), names, strict=True):
            watch_calls(type(subject), [name for name in methods if hasattr(type(subject), name)], self)
