"""vLLM's view of the connector: `KvFrameworkConnector`, thin over `SchedulerSide` and `WorkerSide`. vLLM creates one of
each role, in the scheduler's process and in every worker's, and calls it from that process's engine thread.

Selected by vLLM's own option, see docs/engines/vllm.md. All refusals happen at the engine's start; later an exception
would end the engine, so every call is guarded by `harmless`.
"""

from __future__ import annotations

import logging
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from vllm.config import get_current_vllm_config_or_none
from vllm.distributed.kv_events import MEDIUM_CPU, BlockRemoved, BlockStored, KVCacheEvent
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)
from vllm.utils.import_utils import resolve_obj_by_qualname
from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash, resolve_kv_cache_block_sizes

import vllm
from vllm import envs

try:
    from vllm.v1.metrics.cache_hit_source import CacheHitSource
except ImportError:  # vLLM before 0.32 does not ask for the source of hits
    CacheHitSource = None

from kvf_vllm.adapters import AdapterNames, LoadedAdapters
from kvf_vllm.attach import AttachedInstance
from kvf_vllm.beside_nixl import claimed
from kvf_vllm.canonical import BlockForm, CanonicalBlocks, prove_planes
from kvf_vllm.events import BlocksRemoved, BlocksStored
from kvf_vllm.facts import (
    check_parallel,
    check_sleep,
    forms_of,
    groups_of,
    model_of,
    packing_of,
    part_of,
    place_of,
    why_unread,
)
from kvf_vllm.identity import Named, identify
from kvf_vllm.layouts import GroupFacts, OpaqueBlocks, only_between_steps
from kvf_vllm.lookups import ServerLookups
from kvf_vllm.metrics import Counted, Shown
from kvf_vllm.options import VllmOptions, caches_adapters_by_path, check_version, parse_options
from kvf_vllm.registration import NAME, join_log, register
from kvf_vllm.scheduler import SchedulerSide
from kvf_vllm.step_messages import StepPlan, StepReport
from kvf_vllm.weights import CacheResets, WeightUpdates, engine_weights
from kvf_vllm.worker import WorkerSide
from kvframework.client import ErrorNotes, KVClient, harmless
from kvframework.errors import ConfigFieldError, KVFrameworkError

if TYPE_CHECKING:
    import torch

log = logging.getLogger(__name__)
# A start waits for at most 60 s until the server answers.
_AUTOSTART_S = 90.0

# For an engine that names this module and whose VLLM_PLUGINS leaves the entry point out.
register()


class Plan(KVConnectorMetadata):  # type: ignore[misc]
    """Wraps a `StepPlan` for vLLM's transfer from the scheduler to the workers."""

    def __init__(self, plan: StepPlan) -> None:
        self.plan = plan


class Report(KVConnectorWorkerMetadata):  # type: ignore[misc]
    """Wraps a `StepReport` for vLLM's transfer from the workers to the scheduler."""

    def __init__(self, report: StepReport) -> None:
        self.report = report

    def aggregate(self, other: Report) -> Report:
        return Report(self.report.merge(other.report))


class SaltedBlockStored(BlockStored, tag="BlockStored"):  # type: ignore[misc, call-arg]
    """vLLM's event with the field by which NVIDIA Dynamo keeps salts apart. Other readers skip it."""

    cache_salt: str | None = None


def published(event: BlocksStored | BlocksRemoved) -> KVCacheEvent:
    """vLLM's event for one of the connector's. The medium is CPU, for blocks in any tier of the server."""
    hashes = [maybe_convert_block_hash(each) for each in event.hashes]
    if isinstance(event, BlocksRemoved):
        return BlockRemoved(block_hashes=hashes, medium=MEDIUM_CPU)
    fields: dict[str, Any] = {
        "block_hashes": hashes,
        "parent_block_hash": maybe_convert_block_hash(event.parent) if event.parent is not None else None,
        "token_ids": list(event.tokens),
        "block_size": event.block_size,
        # Requests with adapters are not announced.
        "lora_id": None,
        "lora_name": None,
        "medium": MEDIUM_CPU,
        "extra_keys": list(event.extra_keys) or None,
    }
    return SaltedBlockStored(**fields, cache_salt=event.salt) if event.salt else BlockStored(**fields)


class KvFrameworkConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]
    """See `KVConnectorBase_V1`. Raises `VersionMismatch`, `ConfigFieldError`, `BadLayout` or `TransportMismatch` for an
    engine that it cannot serve; a server that does not run costs recompute only."""

    _cache_hit_source = CacheHitSource and CacheHitSource.HOST

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        self._tried = check_version(vllm.__version__)
        join_log("vllm")
        if self._tried:
            log.warning("vLLM %s is untested, but its interface equals that of a supported release", vllm.__version__)
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        transfer = vllm_config.kv_transfer_config
        self._options = parse_options(transfer.kv_connector_extra_config)
        check_failure_policy(transfer)
        check_parallel(vllm_config.parallel_config)
        self._groups = groups_of(kv_cache_config)
        if self._options.load == "sync" and only_between_steps(self._groups):
            raise ConfigFieldError(
                "this model has several KV cache groups, sliding windows or recurrent states, which vLLM can only load "
                "asynchronously",
                where="kvframework.load",
                available="auto, async",
            )
        self.errors = ErrorNotes(self._count_error)
        self._client: KVClient | None = None
        self._scheduler: SchedulerSide | None = None
        self._worker: WorkerSide | None = None
        self._instance: AttachedInstance | None = None
        self._unread = why_unread(vllm_config, invariant=bool(getattr(envs, "VLLM_BATCH_INVARIANT", False)))
        self._named: Named | None = None
        self._updates: WeightUpdates | None = None
        self._resets: CacheResets | None = None
        self._is_beside_others = others_beside(transfer, vllm_config.parallel_config)
        if role == KVConnectorRole.SCHEDULER:
            if self._unread:
                log.warning("vLLM loads and stores no KV: %s", self._unread)
            self._start("the scheduler's side", self._start_scheduler)

    # vLLM asks these two before it makes a connector, the first one while it reads its configuration, for full CUDA
    # graphs: a wrong option ends the start there.

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        parse_options(extra_config)
        return False

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: Any) -> str | None:
        if vllm_config.kv_transfer_config.kv_connector == NAME:
            parse_options(vllm_config.kv_transfer_config.kv_connector_extra_config)
        return None

    def _start_scheduler(self) -> None:
        config, transfer = self._vllm_config, self._vllm_config.kv_transfer_config
        self._client = connect(self._options, "vllm scheduler")
        self._scheduler = SchedulerSide(
            ServerLookups(self._client),
            self._groups,
            self._options,
            workers=config.parallel_config.world_size,
            loads=transfer.is_kv_consumer,
            stores=transfer.is_kv_producer,
            unread=bool(self._unread),
            event_block_size=event_block_size(config, self._kv_cache_config),
            adapters=AdapterNames(config.parallel_config.world_size, by_path=caches_adapters_by_path(vllm.__version__)),
            weights=engine_weights(config, self._options),
        )

    def _start(self, what: str, start: Callable[[], None]) -> None:
        """Passes on the errors of this framework, which concern this engine; any other error leaves the engine without
        a cache."""
        try:
            start()
        except KVFrameworkError:
            raise
        except Exception as error:  # noqa: BLE001
            self.errors.note(what, error)
            self.shutdown()

    def _count_error(self) -> None:
        side = self._scheduler or self._worker
        if side is not None:
            side.tally.count("errors")

    @property
    def requires_kv_delivery(self) -> bool:
        return False

    # The worker's side.

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        if self._unread:
            return
        self._start("the worker's side", lambda: self._start_worker(kv_caches))

    # vLLM since 0.33 calls these two around the sleep of an engine, whose blocks lose their memory.

    @harmless()
    def unregister_kv_caches(self) -> None:
        if self._instance is not None:
            self._instance.detach()

    @harmless()
    def restore_kv_caches(self) -> None:
        if self._instance is not None:
            self._instance.attach_again()

    def _start_worker(self, kv_caches: dict[str, torch.Tensor]) -> None:
        config, caches = self._vllm_config, self._kv_cache_config
        tells = hasattr(KVConnectorBase_V1, "unregister_kv_caches")
        check_sleep(config.model_config, tells=tells, transport=self._options.transport)
        parallel = config.parallel_config
        place = place_of(parallel, caches)
        facts, own = model_of(config), {"model": self._options.model, "weights": self._options.weights}
        self._named = Named(facts, identify(facts, **own), **own)
        updates = WeightUpdates(config, begins=self._weights_change, ends=self._weights_changed)
        updates.watch(resolve_obj_by_qualname(parallel.worker_cls))
        self._client = connect(self._options, f"vllm worker {parallel.rank}")
        self._instance = AttachedInstance(
            self._client,
            self._options,
            identity=self._named.identity,
            part=part_of(config.model_config, parallel, place, self._groups),
            groups=self._groups,
            form=self._form_of(kv_caches),
            rank=place.rank,
            world_size=place.world_size,
            num_blocks=caches.num_blocks,
            stage=place.stage,
        )
        worker = WorkerSide(
            self._instance,
            worker=parallel.rank,
            stores=place.stores,
            block_size=0 if only_between_steps(self._groups) else self._groups[0].block_size,
            adapters=adapters_of(config.lora_config),
        )
        self._instance.attach(kv_caches)
        self._worker, self._updates = worker, updates

    @harmless()
    def _weights_change(self) -> None:
        if self._worker is not None:
            self._worker.weights_change()

    @harmless()
    def _weights_changed(self, began: float | None) -> None:
        # Other connectors may go on loading what the old weights have computed: then this engine shares no more.
        if self._worker is None or self._instance is None or self._named is None or self._is_beside_others:
            return
        named, facts = self._named, model_of(self._vllm_config)
        self._worker.weights_changed(self._instance.rename(lambda: named.after_update(facts, began)))

    def _form_of(self, kv_caches: dict[str, torch.Tensor]) -> BlockForm:
        """The form of the blocks. Raises `BadLayout` for form canonical if the blocks are not known to convert
        exactly."""
        config, caches = self._vllm_config, self._kv_cache_config
        if self._options.layout == "opaque":
            first_axis = {name: tensor.shape[0] for name, tensor in kv_caches.items()}
            return OpaqueBlocks(packing_of(config, caches, first_axis, release=self._tried))
        form = CanonicalBlocks(forms_of(config, caches))
        layers = config.compilation_config.static_forward_context
        prove_planes(layers, kv_caches, form.planes(self._groups, kv_caches, caches.num_blocks))
        return form

    @harmless()
    def handle_preemptions(self, kv_connector_metadata: Plan) -> None:
        if self._updates is not None and not self._updates.is_following:
            self.shutdown()
            raise RuntimeError("this vLLM does not report updates of its weights")
        if self._worker is not None:
            self._worker.before_step(kv_connector_metadata.plan)

    @harmless()
    def start_load_kv(self, forward_context: object, **kwargs: Any) -> None:
        if self._worker is not None:
            self._worker.load(self._get_connector_metadata().plan)

    def wait_for_layer_load(self, layer_name: str) -> None:
        return

    def save_kv_layer(self, layer_name: str, kv_layer: object, attn_metadata: object, **kwargs: Any) -> None:
        return

    @harmless()
    def wait_for_save(self) -> None:
        if self._worker is not None:
            self._worker.store(self._get_connector_metadata().plan)

    @harmless(KVConnectorTransferResults)
    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        if self._worker is None or self._instance is None:
            return KVConnectorTransferResults()
        received, failed = self._worker.finished_loads(finished_req_ids)
        self._instance.collect()
        return KVConnectorTransferResults(finished_recving=received, failed_recving=failed)

    @harmless(set)
    def get_block_ids_with_load_errors(self) -> set[int]:
        return self._worker.take_failed_blocks() if self._worker is not None else set()

    @harmless()
    def build_connector_worker_meta(self) -> Report | None:
        report = self._worker.take_report() if self._worker is not None else None
        return Report(report) if report else None

    # The scheduler's side.

    @harmless()
    def bind_kv_cache_manager(self, kv_cache_manager: Any) -> None:
        from vllm.v1.engine.core import EngineCore  # only in the engine core's process

        super().bind_kv_cache_manager(kv_cache_manager)
        self._resets = CacheResets(kv_cache_manager, self._cache_was_reset)
        self._scheduling().names.follow_versions(EngineCore, kv_cache_manager)

    @harmless()
    def _cache_was_reset(self) -> None:
        self._scheduling().cache_was_reset()

    @harmless()
    def on_new_request(self, request: Any) -> None:
        self._scheduling().came(request)

    @harmless(lambda: (0, False), then=lambda self, request, *_: self._scheduling().leave_out(request.request_id))
    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        return self._scheduling().matched_tokens(request, num_computed_tokens)

    @harmless(
        then=lambda self, request, blocks, num_external_tokens: self._scheduling().allocated_in_vain(
            request.request_id, blocks.get_block_ids(), num_external_tokens
        )
    )
    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        self._scheduling().allocated(request, blocks.get_block_ids(), num_external_tokens)

    @harmless(lambda: Plan(StepPlan()), then=lambda self, _output: Plan(self._scheduling().plan_in_doubt()))
    def build_connector_meta(self, scheduler_output: Any) -> Plan:
        tables = scheduler_output.kv_connector_block_state
        return Plan(
            self._scheduling().plan_step(
                scheduler_output.num_scheduled_tokens,
                tables.get_block_ids if tables is not None else lambda _request_id: None,
                _new_blocks(scheduler_output, self._groups),
                tables.boundary_state_offloads if tables is not None else {},
            )
        )

    @harmless()
    def update_connector_output(self, connector_output: Any) -> None:
        meta = connector_output.kv_connector_worker_meta
        if isinstance(meta, Report):
            self._scheduling().heard(meta.report)

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished_all_groups(request, (block_ids,))

    @harmless(lambda: (False, None))
    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        # Blocks that are still read are fenced when they are given to other requests.
        self._scheduling().finished(request)
        return False, None

    @harmless(lambda: False)
    def reset_cache(self) -> bool:
        self._scheduling().reset()
        return True

    @harmless(list)
    def take_events(self) -> Iterable[KVCacheEvent]:
        # vLLM asks once for each step, when it takes in what that has computed.
        self._scheduling().step_ended()
        return [published(event) for event in self._scheduling().events.take()]

    # Both sides.

    @harmless()
    def get_kv_connector_stats(self) -> Counted | None:
        side = self._scheduler or self._worker
        counted = side.tally.take() if side is not None else {}
        return Counted(data=counted) if counted else None

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> Counted:
        return Counted(data=data or {})

    @classmethod
    def build_prom_metrics(
        cls, vllm_config: Any, metric_types: Any, labelnames: list[str], per_engine_labelvalues: dict[int, list[Any]]
    ) -> Shown:
        return Shown(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    def shutdown(self) -> None:
        parts = (self._scheduler, self._worker, self._instance, self._client)
        self._scheduler = self._worker = self._instance = self._client = None
        self._updates = self._resets = None
        for part in parts:
            try:
                if part is not None:
                    part.close()
            except Exception as error:  # noqa: BLE001 - the others still close
                self.errors.note("shutdown", error)

    def _scheduling(self) -> SchedulerSide:
        assert self._scheduler is not None, (
            "vLLM called a scheduler's method on a worker's connector, or after shutdown"
        )
        return self._scheduler


def _connectors(transfer: Any) -> list[Any]:
    """The configuration of this connector, and that of the engine if it is another one, as under vLLM's MultiConnector.
    Only workers see both."""
    engine = getattr(get_current_vllm_config_or_none(), "kv_transfer_config", None)
    return [transfer] if engine is None or engine is transfer else [transfer, engine]


def others_beside(transfer: Any, parallel: Any) -> object:
    """True if the engine has other connectors, which only workers see; for NIXL the claim on its port, to be kept."""
    engine = _connectors(transfer)[-1]
    if "Nixl" in str(engine.kv_connector_extra_config.get("connectors")) and not parallel.rank:
        return claimed(envs.VLLM_NIXL_SIDE_CHANNEL_PORT + parallel.data_parallel_index)
    return engine is not transfer


def check_failure_policy(transfer: Any) -> None:
    """Raise `ConfigFieldError` if vLLM would fail a request whose KV is lost."""
    # Beside other connectors the engine's policy counts.
    for each in _connectors(transfer):
        if each.kv_load_failure_policy != "recompute":
            raise ConfigFieldError(
                f"kv_load_failure_policy is {each.kv_load_failure_policy!r}: requests whose KV is lost would fail",
                where=f"kv_transfer_config of {each.kv_connector}",
                available="recompute",
                hint='set "kv_load_failure_policy": "recompute"',
            )


def connect(options: VllmOptions, name: str) -> KVClient:
    if options.autostart:
        _start_server(options)
    return KVClient(
        options.endpoint or None,
        name=name,
        connect_timeout_s=options.connect_timeout_s,
        deadline_scale=options.deadline_scale,
    )


def _start_server(options: VllmOptions) -> None:
    """Start a server where none runs, by `kvframework run` without an engine: processes that come at once start one.
    Blocks for some seconds. Without a server the engine computes, and the log says why there is none."""
    endpoint = ["--endpoint", options.endpoint] if options.endpoint else []
    command = [sys.executable, "-m", "kvframework", "run", "--l1", options.autostart, *endpoint]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_AUTOSTART_S, check=False, stdin=subprocess.DEVNULL
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        log.warning("the server could not be started: %s", error)
        return
    for line in done.stderr.splitlines():
        log.log(logging.WARNING if done.returncode else logging.INFO, "%s", line)


def adapters_of(lora_config: Any) -> LoadedAdapters | None:
    """The adapters of this engine, whose loads are watched from now on."""
    if lora_config is None:
        return None
    # Where there are no adapters this takes seconds of imports, in vain.
    from vllm.lora.utils import get_adapter_absolute_path
    from vllm.lora.worker_manager import WorkerLoRAManager
    from vllm.platforms import current_platform

    adapters = LoadedAdapters(
        lora_config, resolve=get_adapter_absolute_path, base_uses_last_slot=current_platform.is_cpu()
    )
    adapters.watch(WorkerLoRAManager)
    return adapters


def _new_blocks(scheduler_output: Any, groups: Sequence[GroupFacts]) -> set[int]:
    """The blocks that requests were given since the last step and that will be written."""
    cached = scheduler_output.scheduled_cached_reqs
    given = [(request.block_ids, request.num_computed_tokens) for request in scheduler_output.scheduled_new_reqs]
    for request_id, table, computed in zip(
        cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True
    ):
        # A resumed request is given its whole table, others only their new blocks.
        given.append((table or (), computed if request_id in cached.resumed_req_ids else 0))
    written = {
        block
        for table, computed in given
        for group, ids in zip(groups, table, strict=False)
        for block in ids[computed // group.block_size :]
    }
    # Copies of states go into blocks that need not be in any table.
    return written.union(copy.dst_block_id for copy in scheduler_output.kv_cache_block_copies or ())


def event_block_size(vllm_config: Any, kv_cache_config: Any) -> int:
    """The tokens of each of vLLM's block hashes, 0 if events are off."""
    events = vllm_config.kv_events_config
    if events is None or not events.enable_kv_cache_events:
        return 0
    # vLLM before 0.32 does not keep it in the configuration.
    configured = getattr(kv_cache_config, "hash_block_size", None)
    return int(configured or resolve_kv_cache_block_sizes(kv_cache_config, vllm_config)[1])
