"""Weights that change in a running engine: what a worker knows of its own, the scheduler of all workers', and the calls
by which vLLM updates them or resets its prefix cache. vLLM tells its connectors of neither, so the methods are watched.

An update is noticed in the workers, and the scheduler hears of it after their next step. Until then it plans for the
weights from before, and the workers refuse. Blocks in vLLM's memory may be from before the update until vLLM has reset
its prefix cache: steps that write KV are numbered, and an update and a reset each name the last one before it.
"""

from __future__ import annotations

import hmac
import logging
import os
import stat
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from kvf_vllm.options import WHERE, VllmOptions
from kvf_vllm.step_messages import StepPlan, Weights
from kvframework.api.futures import Future
from kvframework.client import WatchedCall, watch_calls
from kvframework.errors import ConfigFieldError

log = logging.getLogger(__name__)

_LEAST_SECRET_BYTES, _MOST_SECRET_BYTES = 16, 4096


class WorkerWeights:
    """The weights of one worker. For its thread."""

    def __init__(self) -> None:
        self._now = Weights()
        self._step = 0
        self._naming: Future[bool] | None = None

    def change(self) -> None:
        self._now = Weights(self._now.updates + 1, self._step, None)
        self._naming = None

    def changed(self, naming: Future[bool]) -> None:
        """The update has ended; `naming` will say whether the weights have a name that other engines know."""
        self._naming = naming

    def begin_step(self, plan: StepPlan) -> None:
        self._step = max(self._step, plan.step)

    def fit(self, worker: int, plan: StepPlan) -> bool:
        return self.now.is_shared is not None and plan.updates.get(worker, 0) == self._now.updates

    @property
    def now(self) -> Weights:
        if self._naming is not None and self._naming.query():
            naming, self._naming = self._naming, None
            self._now = self._now._replace(is_shared=naming.exception() is None and naming.result(0))
        return self._now


class EngineWeights:
    """The weights of all workers, as far as the scheduler has heard. `caches_prefixes`: vLLM has a prefix cache;
    `versions`: their names, None if replicas share no secret."""

    def __init__(self, *, caches_prefixes: bool = True, versions: WeightVersions | None = None) -> None:
        self._versions = versions
        self._caches_prefixes = caches_prefixes
        self._heard: dict[int, Weights] = {}
        self._clean_after = 0
        # The number of updates of each worker that had any.
        self.updates: Mapping[int, int] = {}

    def heard(self, news: Mapping[int, Weights]) -> None:
        self._heard.update(news)
        self.updates = {worker: each.updates for worker, each in self._heard.items()}

    def cache_was_reset(self, step: int) -> None:
        """vLLM holds no KV of this step or an earlier one."""
        self._clean_after = step

    def follow_versions(self, core: type, manager: Any, then: Callable[[], None]) -> None:
        """Follow the engine core of this class that has this manager of KV; `then` is called after announcements."""
        if self._versions is not None:
            self._versions.follow(core, manager, then)

    @property
    def version_salt(self) -> str:
        """The salt of the version announced for the weights of now, "" for none."""
        return self._versions.salt if self._versions is not None else ""

    @property
    def are_changing(self) -> bool:
        """True as long as an update is under way, or the name of what it has brought is looked for."""
        return any(each.is_shared is None for each in self._heard.values())

    @property
    def are_shared(self) -> bool:
        """True if the name of the weights is one that other engines know."""
        return all(each.is_shared for each in self._heard.values())

    @property
    def are_alone(self) -> bool:
        """True if no KV of other weights can be in vLLM's blocks, but for requests that have blocks now."""
        last = max((each.step for each in self._heard.values()), default=0)
        return not self.are_changing and (not self._caches_prefixes or self._clean_after >= last)


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
        """Follow the worker of this class that has this configuration. Raises `AttributeError` for a class that is not
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


def run_secret(file: str, where: str) -> bytes:
    """Return the secret of a training run. Raises `ConfigFieldError` for a file that cannot be read, that others may
    read, or that is too short or long."""
    path, new = (
        Path(file).expanduser(),
        f"make it once, and copy it to all replicas: (umask 077; openssl rand -hex 32 > {file})",
    )
    try:
        with path.open("rb") as opened:
            mode, secret = os.fstat(opened.fileno()).st_mode, opened.read(_MOST_SECRET_BYTES + 1).strip()
    except OSError as error:
        raise ConfigFieldError(f"{path} cannot be read: {error.strerror}", where=where, hint=new) from None
    if mode & stat.S_IRWXO:
        raise ConfigFieldError(f"other users may read or write {path}", where=where, hint=f"chmod o-rwx {path}")
    if not _LEAST_SECRET_BYTES <= len(secret) <= _MOST_SECRET_BYTES:
        need = f"{_LEAST_SECRET_BYTES} to {_MOST_SECRET_BYTES}"
        raise ConfigFieldError(f"the secret in {path} has {len(secret)} bytes", where=where, available=need, hint=new)
    return secret


class WeightVersions:
    """The version that vLLM's engine core announced last, as a salt that only engines with the same secret make. A
    version stands for the weights of its time: any later call to the workers may have changed them."""

    def __init__(self, secret: bytes) -> None:
        self._secret = secret
        self._last: str | None = None
        # "" if none was announced since the last call to the workers.
        self.salt = ""

    def follow(self, core: type, manager: Any, then: Callable[[], None]) -> None:
        self._manager, self._then = manager, then
        if hasattr(core, "set_weight_version"):  # from vLLM 0.32 on
            watch_calls(core, ("set_weight_version", "collective_rpc"), self)

    @contextmanager
    def around(self, call: WatchedCall) -> Iterator[None]:
        is_ours = call.args[0].scheduler.kv_cache_manager is self._manager
        if is_ours and call.name == "collective_rpc":
            self.salt = ""
        yield
        if is_ours and call.name == "set_weight_version":
            self.announced(call.argument(1, "weight_version"))
            self._then()

    def announced(self, version: str) -> None:
        if version == self._last and not self.salt:
            log.warning(
                "vLLM announced weight_version %r for two updates: no other engine shares KV of the second", version
            )
        else:
            self.salt = hmac.new(self._secret, b"kvframework weights " + version.encode(), "sha256").hexdigest()
        self._last = version


def engine_weights(config: Any, options: VllmOptions) -> EngineWeights:
    """Those of the engine with this configuration of vLLM. Raises as `run_secret` does."""
    secret, where = options.weights_secret, f"{WHERE} kvframework.weights_secret"
    return EngineWeights(
        caches_prefixes=bool(config.cache_config.enable_prefix_caching),
        versions=WeightVersions(run_secret(secret, where)) if secret else None,
    )


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
