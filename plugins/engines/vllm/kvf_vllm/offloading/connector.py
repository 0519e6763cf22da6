"""`KvFrameworkOffloading`: vLLM's own offloading connector over the server's arena. vLLM creates one of each role, in
the scheduler's process and in every worker's.

All refusals happen at the engine's start; later no failure of the cache reaches the engine.
"""

from __future__ import annotations

import hashlib
import logging
import secrets
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

from vllm.distributed.kv_events import KVCacheEvent
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
)
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.canonical_mapping import canonical_format_id
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import OffloadingConnectorMetadata, TransferJob
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import OffloadingConnectorScheduler
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector
from vllm.platforms import current_platform
from vllm.utils.import_utils import resolve_obj_by_qualname
from vllm.v1.kv_offload.base import GPULoadStoreSpec, OffloadingWorker

import vllm
from kvf_vllm.adapters import AdapterNames, LoadedAdapters
from kvf_vllm.connector import (
    KvFrameworkConnector,
    adapters_of,
    check_failure_policy,
    connect,
    event_block_size,
    others_beside,
    published,
)
from kvf_vllm.facts import model_of, packing_of, place_of, why_unread
from kvf_vllm.identity import Named, identify
from kvf_vllm.offloading.checks import check_room, refusals
from kvf_vllm.offloading.copies import Slot, order_of
from kvf_vllm.offloading.manager import ArenaManager
from kvf_vllm.offloading.messages import Laid, StepPlan, StepReport
from kvf_vllm.offloading.metrics import BothCounted, BothShown
from kvf_vllm.offloading.spec import ArenaSpec
from kvf_vllm.offloading.tracked import Group
from kvf_vllm.offloading.worker import CpuWorker, ServedArena, WorkerSide
from kvf_vllm.options import caches_adapters_by_path, check_offloading, check_version, parse_options
from kvf_vllm.registration import join_log
from kvf_vllm.weights import CacheResets, WeightUpdates, engine_weights
from kvframework.api.layout import MAX_PACKING
from kvframework.client import ErrorNotes, KVClient, OpaqueInstance, OpaqueObjects, harmless
from kvframework.errors import BadLayout, ConfigFieldError, KVFrameworkError
from vllm import envs

if TYPE_CHECKING:
    import torch

    from kvf_vllm.step_messages import Served

log = logging.getLogger(__name__)

# The order of bytes in an object.
ERA = "vllm-offload1"
# How long a step takes that has nothing to do but to hear of stores.
IDLE_S = 0.0005


class KvFrameworkOffloading(OffloadingConnector):  # type: ignore[misc]
    """See `OffloadingConnector`. Raises `VersionMismatch`, `ConfigFieldError`, `BadLayout` or `TransportMismatch` for
    an engine that it cannot serve; a server that does not run costs recompute only."""

    _cache_hit_source = KvFrameworkConnector._cache_hit_source

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        self._release = check_version(vllm.__version__)
        check_offloading(vllm.__version__, on_cpu=bool(current_platform.is_cpu()))
        join_log("vllm")
        if self._release:
            log.warning("vLLM %s is untested with models; only its classes are tested", vllm.__version__)
        KVConnectorBase_V1.__init__(self, vllm_config, role, kv_cache_config)
        transfer = vllm_config.kv_transfer_config
        self._options = parse_options(transfer.kv_connector_extra_config)
        _check_options(self._options)
        check_failure_policy(transfer)
        self.errors = ErrorNotes(self._count_error)
        self._unread = why_unread(vllm_config, invariant=bool(getattr(envs, "VLLM_BATCH_INVARIANT", False)))
        self._spec = ArenaSpec(
            vllm_config,
            kv_cache_config,
            manager=lambda _spec: self._manager,
            worker=lambda _spec, caches: self._copies(caches),
        )
        self._canonical_layout = self._spec.is_canonical
        self._arena = ServedArena()
        self._client: KVClient | None = None
        self._updates: WeightUpdates | None = None
        self._resets: CacheResets | None = None
        self._named: Named | None = None
        self._slot_bytes = 0
        # Blocks that loads fill within the step that is planned now, by job.
        self._within: dict[int, list[int]] = {}
        self._is_beside_others = others_beside(transfer, vllm_config.parallel_config)
        self.connector_scheduler: Any = None
        self.connector_worker: Any = None
        if role == KVConnectorRole.SCHEDULER:
            self._start_scheduler(transfer)
        else:
            adapters = adapters_of(vllm_config.lora_config) or LoadedAdapters()
            self.connector_worker = WorkerSide(self._spec, vllm_config, kv_cache_config, self._arena, adapters)

    # vLLM asks these two before it makes a connector: a wrong option ends the start there.

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        _check_options(parse_options(extra_config))
        return False

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: Any) -> str | None:
        transfer = vllm_config.kv_transfer_config
        if transfer.kv_connector == cls.__name__:
            cls.requires_piecewise_for_cudagraph(transfer.kv_connector_extra_config)
        return cast("str | None", super().get_required_kvcache_layout(vllm_config))

    def _count_error(self) -> None:
        side = self.connector_worker or getattr(self, "_manager", None)
        if side is not None:
            side.tally.count("errors")

    # The scheduler's side.

    def _start_scheduler(self, transfer: Any) -> None:
        config = self._vllm_config
        if self._unread:
            log.warning("vLLM loads and stores no KV: %s", self._unread)
        workers = config.parallel_config.world_size
        self._manager = ArenaManager(
            self._options,
            self._register,
            unit_tokens=self._spec.unit_tokens,
            workers=workers,
            loads=bool(transfer.is_kv_consumer),
            stores=bool(transfer.is_kv_producer),
            unread=bool(self._unread),
            adapters=AdapterNames(workers, by_path=caches_adapters_by_path(vllm.__version__)),
            weights=engine_weights(config, self._options),
            event_block_size=event_block_size(config, self._kv_cache_config),
            within_step=self._within_step(),
        )
        with refusals():
            self.connector_scheduler = OffloadingConnectorScheduler(self._spec, config, self._kv_cache_config)
        groups = [_group(each) for each in self.connector_scheduler.config.kv_group_configs]
        engine, planned = self._manager.engine, self.connector_scheduler.config
        engine.groups, engine.align = groups, self.connector_scheduler._mamba_align_size
        engine.tail = planned.tokens_per_hash if getattr(planned, "supports_partial_tail", False) else 0
        self._client = connect(self._options, "vllm scheduler")
        chunks = [(group.tokens, group.window) for group in groups]
        try:
            self._client.wait_up(self._options.connect_timeout_s)
            largest = self._spec.slots * self._spec.slot_bytes
            check_room(self._client, largest, chunks, config.model_config.max_model_len)
        except BaseException:
            self._client.close()
            raise

    def _within_step(self) -> tuple[int, int] | None:
        """Return the tokens of a block and the bytes of a worker's chunk, if loads may be within steps. vLLM accepts
        reports of failed blocks only where it has one group of them."""
        kinds = [type(spec).__name__ for each in self._kv_cache_config.kv_cache_groups for spec in [each.kv_cache_spec]]
        if kinds in (["FullAttentionSpec"], ["MLAAttentionSpec"]):
            return self._spec.tokens_per_block[0], self._spec.slot_bytes
        if self._options.load == "sync":
            raise ConfigFieldError(
                f"'sync' is not possible: this model has {len(kinds)} KV cache groups, {', '.join(kinds)}",
                where="kvframework.load",
                available="auto, async",
                hint="loads within a step need a model with one group of full attention",
            )
        return None

    @harmless()
    def bind_kv_cache_manager(self, kv_cache_manager: Any) -> None:
        from vllm.v1.engine.core import EngineCore  # only in the engine core's process

        super().bind_kv_cache_manager(kv_cache_manager)
        self._resets = CacheResets(kv_cache_manager, lambda: self._manager.cache_was_reset())
        self._manager.names.follow_versions(EngineCore, kv_cache_manager)

    @harmless()
    def on_new_request(self, request: Any) -> None:
        super().on_new_request(request)
        self._manager.came(request)

    @harmless(lambda: (0, False))
    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        if not self._manager.ask(request, num_computed_tokens):
            return None, False
        matched: tuple[int | None, bool] = super().get_num_new_matched_tokens(request, num_computed_tokens)
        within = self._manager.within_step(request, matched[0]) if matched[0] else 0
        return (within, False) if within else matched

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        self._manager.allocated(request, num_external_tokens)
        if num_external_tokens and self._manager.is_within_step(request.request_id):
            self._load_within(request.request_id, blocks, num_external_tokens)
        else:
            super().update_state_after_alloc(request, blocks, num_external_tokens)

    def _load_within(self, request_id: str, blocks: Any, tokens: int) -> None:
        """Plan a load within the step. vLLM's own plan takes blocks that have a hash for loaded, as they have here; and
        it would not store a request that is being loaded. It hears of this one only if it fails."""
        scheduler, per_chunk = self.connector_scheduler, self._spec.blocks_per_chunk
        status, (group,) = scheduler._req_status[request_id], scheduler.config.kv_group_configs
        first = status.num_locally_computed_tokens // group.tokens_per_block
        ids = [each.block_id for each in blocks.blocks[group.group_idx][first:][: tokens // group.tokens_per_block]]
        end = -(-(first + len(ids)) // per_chunk)
        (state,) = status.group_states
        state.next_stored_chunk_idx = end
        places = self._manager.prepare_load(state.offload_keys[first // per_chunk : end], status.req_context)
        job_id = scheduler._generate_job_id()
        target = GPULoadStoreSpec(ids, group_sizes=[len(ids)], block_indices=[first])
        scheduler._current_batch_load_jobs[job_id] = TransferJob(request_id, places, target)
        # Stores that still read these blocks end first.
        scheduler._current_batch_allocated_block_ids.update(ids)
        self._within[job_id] = ids

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        # Whatever fails here, the workers learn which blocks are to be loaded before they are read.
        within, self._within = self._within, {}
        plan, names = self._plan(scheduler_output), self._manager.names
        if plan is None:
            # The step writes KV all the same.
            names.planned(writes=True)
            plan = StepPlan({}, {}, step=names.step, updates=names.weights.updates)
        plan.within = within
        return plan

    @harmless()
    def _plan(self, scheduler_output: Any) -> StepPlan | None:
        manager, scheduled = self._manager, scheduler_output.num_scheduled_tokens
        names, instance, plan = manager.names, manager.engine.instance, StepPlan({}, {})
        # vLLM's plan costs some microseconds for each running request, and nearly all steps have no job.
        if has_news := manager.begin_step(scheduled) or self._has_news(scheduler_output):
            planned: OffloadingConnectorMetadata = super().build_connector_meta(scheduler_output)
            plan = StepPlan(planned.load_jobs, planned.store_jobs, planned.jobs_to_flush)
        elif not scheduled and (self.connector_scheduler._jobs or manager.stores.are_open):
            # vLLM steps on until all stores have ended; what ends them needs the processor.
            time.sleep(IDLE_S)
        plan.store_jobs = manager.stores.give_out(plan.store_jobs, plan.jobs_to_flush or ())
        if instance is not None and (has_news or plan.store_jobs):
            plan.arena, plan.slot_bytes = instance.ticket, self._slot_bytes
        names.planned(writes=bool(scheduled or plan.load_jobs))
        plan.step, plan.updates = names.step, names.weights.updates
        return plan

    def _has_news(self, output: Any) -> bool:
        """Whether a request begins, ends or gets blocks in this step, or jobs are to be given out with it."""
        cached, tables, planned = (
            output.scheduled_cached_reqs,
            output.kv_connector_block_state,
            self.connector_scheduler,
        )
        requests = output.scheduled_new_reqs or output.finished_req_ids or output.preempted_req_ids
        blocks = output.kv_cache_block_copies or any(cached.new_block_ids) or planned._current_batch_allocated_block_ids
        jobs = planned._current_batch_load_jobs or planned._current_batch_jobs_to_flush
        return bool(requests or blocks or jobs or (tables is not None and tables.boundary_state_offloads))

    def get_external_cache_hit_sources(self, request: Any, num_external_tokens: int) -> Any:
        return KVConnectorBase_V1.get_external_cache_hit_sources(self, request, num_external_tokens)

    @harmless()
    def update_connector_output(self, connector_output: Any) -> None:
        report = connector_output.kv_connector_worker_meta
        if report is None and not connector_output.failed_recving:
            return
        if isinstance(report, StepReport):
            self._manager.heard(report)
        for request_id in connector_output.failed_recving or ():
            self._manager.load_failed(request_id)
        super().update_connector_output(connector_output)

    request_finished = harmless(lambda: (False, None))(OffloadingConnector.request_finished)
    request_finished_all_groups = harmless(lambda: (False, None))(OffloadingConnector.request_finished_all_groups)
    reset_cache = harmless(lambda: False)(OffloadingConnector.reset_cache)

    @harmless(list)
    def take_events(self) -> Sequence[KVCacheEvent]:
        return [published(event) for event in self._manager.take_announcements()]

    def _register(self, names: Sequence[Served]) -> OpaqueInstance:
        """Register objects by the names of all workers' blocks, the first stage's first."""
        spec, parallel = self._spec, self._spec.config.parallel
        laid = [each for each in names if isinstance(each, Laid)]
        identity, packing = laid[0].identity, "+".join((ERA, *dict.fromkeys(each.packing for each in laid)))
        if len(packing) > MAX_PACKING:
            digest = hashlib.blake2b(packing.encode(), digest_size=8, person=b"kvf-vllm-pack").hexdigest()
            packing = f"{packing[: MAX_PACKING - 17]}+{digest}"
        # Stages of a pipeline may hold more layers than others.
        self._slot_bytes = max(each.slot_bytes for each in laid)
        facts: tuple[object, ...] = ()
        if not spec.is_canonical:
            facts = (
                spec.slots,
                [each.slot_bytes for each in laid],
                parallel.tp_size,
                parallel.pp_size,
                parallel.dcp_size,
                parallel.pcp_size,
            )
        chunks = [
            (tokens, each.group_id) for tokens, each in zip(spec.tokens_per_chunk, spec.config.groups, strict=True)
        ]
        assert self._client is not None
        objects = OpaqueObjects(
            instance_id=secrets.randbits(62),
            model_name=identity.model_name,
            object_bytes=[spec.slots * self._slot_bytes] * len(spec.config.groups),
            unit_tokens=self._manager.engine.tail or spec.unit_tokens,
            packing=packing,
            revision=f"{identity.revision}+{facts}+{chunks}",
            quantization=identity.quantization,
            model_dtype=identity.dtype,
        )
        return OpaqueInstance(self._client, objects)

    # The worker's side.

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        super().register_kv_caches(kv_caches)
        if self._unread:
            return
        config, options, worker = self._vllm_config, self._options, self.connector_worker
        first_axis = {name: tensor.shape[0] for name, tensor in kv_caches.items()}
        try:
            facts, own = model_of(config), {"model": options.model, "weights": options.weights}
            self._named = Named(facts, identify(facts, **own), **own)
            form = canonical_format_id(self._kv_cache_config.kv_cache_layout) if self._spec.is_canonical else ""
            packing = packing_of(config, self._kv_cache_config, first_axis, release=self._release, canonical=form)
            packing += "/" + order_of(self._kv_cache_config, kv_caches, canonical=self._spec.is_canonical)
            identity = self._named.identity
            stage = place_of(config.parallel_config, self._kv_cache_config).stage
            laid = Laid(
                identity.model_name, b"", self._spec.unit_tokens, 1, stage, (), identity, packing, self._spec.slot_bytes
            )
            self._updates = WeightUpdates(config, begins=self._weights_change, ends=self._weights_changed)
            self._updates.watch(resolve_obj_by_qualname(config.parallel_config.worker_cls))
        except KVFrameworkError:
            raise
        except Exception as error:  # noqa: BLE001 - of whatever kind, the engine goes without a cache
            self.errors.note("the worker's side", error)
            return
        worker.take_part(laid)

    @harmless()
    def _weights_change(self) -> None:
        self.connector_worker.weights_change()

    @harmless()
    def _weights_changed(self, began: float | None) -> None:
        # Other connectors may go on loading what the old weights have computed: then this engine shares no more.
        if self._named is None or self._is_beside_others:
            return
        named, facts = self._named, model_of(self._vllm_config)
        self.connector_worker.weights_changed(lambda: named.after_update(facts, began))

    @harmless()
    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        if self._updates is not None and not self._updates.is_following:
            log.error("vLLM loads and stores no KV: this vLLM does not report updates of its weights")
            self._updates = None
            self.connector_worker.take_part(None)
        super().handle_preemptions(kv_connector_metadata)

    def _copies(self, kv_caches: Any) -> OffloadingWorker:
        spec = self._spec
        slot = Slot(kv_caches, spec.blocks_per_chunk, 0, canonical=spec.is_canonical)
        planned = spec.slot_bytes * (spec.slots if spec.is_canonical else 1)
        if slot.nbytes > planned:
            raise BadLayout(f"the blocks of a chunk have {slot.nbytes} bytes", available=f"{planned} as planned")
        if spec.slots > 1 and not spec.is_canonical:
            self.connector_worker.slot = slot
        if current_platform.is_cpu():
            return CpuWorker(slot, self._arena)
        from kvf_vllm.offloading.gpu import GpuWorker

        return GpuWorker(kv_caches, slot, self._arena)

    start_load_kv = harmless()(OffloadingConnector.start_load_kv)
    build_connector_worker_meta = harmless()(OffloadingConnector.build_connector_worker_meta)

    def wait_for_save(self) -> None:
        """See `WorkerSide`: what this step has computed is stored with the next one."""

    @harmless(KVConnectorTransferResults)
    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        worker = self.connector_worker
        _, received = worker.get_finished(finished_req_ids)
        failed, worker.failed_loads = worker.failed_loads, set()
        return KVConnectorTransferResults(finished_recving=received, failed_recving=failed)

    def get_block_ids_with_load_errors(self) -> set[int]:
        return set(self.connector_worker.take_failed_blocks())

    # Both sides.

    @harmless()
    def get_kv_connector_stats(self) -> BothCounted | None:
        side, scheduler = self.connector_worker or self._manager, self.connector_scheduler
        counts, theirs = side.tally.take(), scheduler.get_stats() if scheduler is not None else None
        return BothCounted.of(counts, theirs) if counts or theirs is not None else None

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> BothCounted:
        return BothCounted(data=data or {})

    @classmethod
    def build_prom_metrics(
        cls, vllm_config: Any, metric_types: Any, labelnames: list[str], per_engine_labelvalues: dict[int, list[Any]]
    ) -> BothShown:
        return BothShown(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    def shutdown(self) -> None:
        super().shutdown()
        if self._client is not None:
            self._client.close()


def _group(group: Any) -> Group:
    window = group.sliding_window_size_in_chunks
    return Group(
        group.group_idx,
        group.tokens_per_chunk,
        group.hashes_per_chunk,
        0 if window is None else window * group.tokens_per_chunk,
        ends_hits=bool(group.requires_cow_source),
    )


def _check_options(options: Any) -> None:
    """Raise `ConfigFieldError` for an option that means nothing here."""
    for name, only in (("layout", "opaque"), ("transport", "auto"), ("transport_options", {})):
        if getattr(options, name) != only:
            raise ConfigFieldError(
                f"kvframework.{name} is {getattr(options, name)!r}",
                where="kv_connector_extra_config",
                available=f"{only!r}: vLLM moves the bytes itself",
                hint="leave it out, or use KvFrameworkConnector",
            )
