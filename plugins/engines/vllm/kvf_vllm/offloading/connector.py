"""`KvFrameworkOffloading`: vLLM's own offloading connector over the server's arena. vLLM creates one of each role, in
the scheduler's process and in every worker's.

All refusals happen at the engine's start; later no failure of the cache reaches the engine.
"""

from __future__ import annotations

import logging
import secrets
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
)
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import OffloadingConnectorScheduler
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector
from vllm.platforms import current_platform
from vllm.utils.import_utils import resolve_obj_by_qualname
from vllm.v1.kv_offload.base import OffloadingWorker

import vllm
from kvf_vllm.adapters import AdapterNames, LoadedAdapters
from kvf_vllm.connector import adapters_of, check_failure_policy, connect
from kvf_vllm.facts import check_sleep, model_of, packing_of, why_unread
from kvf_vllm.identity import identify
from kvf_vllm.offloading.copies import Slot
from kvf_vllm.offloading.manager import ArenaManager, Group
from kvf_vllm.offloading.messages import StepPlan, StepReport
from kvf_vllm.offloading.spec import ArenaSpec
from kvf_vllm.offloading.worker import CpuWorker, ServedArena, WorkerSide
from kvf_vllm.options import caches_adapters_by_path, check_version, parse_options
from kvf_vllm.registration import join_log
from kvf_vllm.weights import WeightUpdates
from kvframework.client import ErrorNotes, KVClient, OpaqueInstance, OpaqueObjects, harmless
from kvframework.errors import BadLayout, ConfigFieldError, KVFrameworkError
from vllm import envs

if TYPE_CHECKING:
    import torch

log = logging.getLogger(__name__)

# The order of bytes in an object.
ERA = "vllm-offload1"


class KvFrameworkOffloading(OffloadingConnector):  # type: ignore[misc]
    """See `OffloadingConnector`. Raises `VersionMismatch`, `ConfigFieldError`, `BadLayout` or `TransportMismatch` for
    an engine that it cannot serve; a server that does not run costs recompute only."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        self._release = check_version(vllm.__version__)
        join_log("vllm")
        KVConnectorBase_V1.__init__(self, vllm_config, role, kv_cache_config)
        transfer = vllm_config.kv_transfer_config
        self._options = parse_options(transfer.kv_connector_extra_config)
        _check_options(self._options)
        check_failure_policy(transfer)
        self.errors = ErrorNotes()
        self._unread = why_unread(vllm_config, invariant=bool(getattr(envs, "VLLM_BATCH_INVARIANT", False)))
        self._spec = ArenaSpec(
            vllm_config,
            kv_cache_config,
            manager=lambda _spec: self._manager,
            worker=lambda _spec, caches: self._copies(caches),
        )
        self._canonical_layout = False
        self._arena = ServedArena()
        self._client: KVClient | None = None
        self._packings: dict[int, str] = {}
        self._updates: WeightUpdates | None = None
        self.connector_scheduler: Any = None
        self.connector_worker: Any = None
        if role == KVConnectorRole.SCHEDULER:
            self._start_scheduler(transfer)
        else:
            adapters = adapters_of(vllm_config.lora_config) or LoadedAdapters()
            self.connector_worker = WorkerSide(self._spec, vllm_config, kv_cache_config, self._arena, adapters)

    # The scheduler's side.

    def _start_scheduler(self, transfer: Any) -> None:
        config = self._vllm_config
        if self._unread:
            log.warning("nothing is loaded or stored: %s", self._unread)
        self._manager = ArenaManager(
            unit_tokens=self._spec.unit_tokens,
            workers=config.parallel_config.world_size,
            deadline_s=self._options.lookup_deadline_s,
            min_hit_tokens=self._options.min_hit_tokens,
            loads=bool(transfer.is_kv_consumer) and not self._unread,
            stores=bool(transfer.is_kv_producer) and not self._unread,
            adapters=AdapterNames(
                config.parallel_config.world_size,
                by_path=caches_adapters_by_path(vllm.__version__),
            ),
        )
        self.connector_scheduler = OffloadingConnectorScheduler(self._spec, config, self._kv_cache_config)
        self._manager.groups = [_group(each) for each in self.connector_scheduler.config.kv_group_configs]
        self._manager.align = self.connector_scheduler._mamba_align_size
        identity = identify(model_of(config), model=self._options.model, weights=self._options.weights)
        self._identity = identity
        self._client = connect(self._options, "vllm scheduler")

    def on_new_request(self, request: Any) -> None:
        super().on_new_request(request)
        self._manager.came(request)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        if not self._manager.ask(request, num_computed_tokens):
            return None, False
        matched: tuple[int | None, bool] = super().get_num_new_matched_tokens(request, num_computed_tokens)
        return matched

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        plan = super().build_connector_meta(scheduler_output)
        self._manager.places()
        instance = self._manager.instance
        return StepPlan.of(plan, instance.ticket if instance is not None else None)

    def update_connector_output(self, connector_output: Any) -> None:
        report = connector_output.kv_connector_worker_meta
        if isinstance(report, StepReport):
            self._hear(report)
        for request_id in connector_output.failed_recving or ():
            self._manager.load_failed(request_id)
        super().update_connector_output(connector_output)

    @harmless()
    def _hear(self, report: StepReport) -> None:
        self._manager.heard_of_adapters(report.adapters, spoils_base=report.spoils_base)
        self._manager.ended(report.ended, report.failed)
        if not report.packings:
            return
        self._packings |= report.packings
        if "" in self._packings.values():
            self._leave("a worker's weights or memory changed, or it cannot take part")
        elif len(self._packings) == self._vllm_config.parallel_config.world_size and self._manager.instance is None:
            if len(set(self._packings.values())) > 1 or self._client is None:
                self._leave("the engine's workers lay their blocks out differently")
                return
            self._manager.instance = OpaqueInstance(self._client, self._objects(next(iter(self._packings.values()))))
            self._manager.is_expected = False

    def _objects(self, packing: str) -> OpaqueObjects:
        spec, parallel = self._spec, self._spec.config.parallel
        facts = (spec.slots, parallel.tp_size, parallel.pp_size, parallel.dcp_size, parallel.pcp_size)
        chunks = [
            (tokens, each.group_id) for tokens, each in zip(spec.tokens_per_chunk, spec.config.groups, strict=True)
        ]
        identity = self._identity
        return OpaqueObjects(
            instance_id=secrets.randbits(62),
            model_name=identity.model_name,
            object_bytes=[spec.object_bytes] * len(spec.config.groups),
            unit_tokens=spec.unit_tokens,
            packing=f"{ERA}/{packing}"[:128],
            revision=f"{identity.revision}+{facts}+{chunks}",
            quantization=identity.quantization,
            model_dtype=identity.dtype,
        )

    def _leave(self, why: str) -> None:
        """Take part no more: what is loaded or stored from here on might be wrong."""
        manager = self._manager
        if manager.is_left:
            return
        log.error("nothing is loaded or stored from now on: %s", why)
        manager.leave()

    # The worker's side.

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        super().register_kv_caches(kv_caches)
        config = self._vllm_config
        check_sleep(config.model_config, tells=False, transport="vllm's own")
        worker = self.connector_worker
        first_axis = {name: tensor.shape[0] for name, tensor in kv_caches.items()}
        try:
            worker.report_packing(packing_of(config, self._kv_cache_config, first_axis, release=self._release))
            self._updates = WeightUpdates(config, begins=lambda: worker.report_packing(""), ends=lambda _began: None)
            self._updates.watch(resolve_obj_by_qualname(config.parallel_config.worker_cls))
        except KVFrameworkError as error:
            log.warning("nothing is loaded or stored: %s", error)
            worker.report_packing("")

    def _copies(self, kv_caches: Any) -> OffloadingWorker:
        slot = Slot(kv_caches, self._spec.blocks_per_chunk, self._spec.slot_offset)
        if slot.nbytes > self._spec.slot_bytes:
            raise BadLayout(f"blocks of {slot.nbytes} bytes a chunk", available=f"{self._spec.slot_bytes} as planned")
        if current_platform.is_cpu():
            return CpuWorker(slot, self._arena)
        from kvf_vllm.offloading.gpu import GpuWorker

        return GpuWorker(kv_caches, slot, self._arena)

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        worker = self.connector_worker
        _, received = worker.get_finished(finished_req_ids)
        failed, worker.failed_loads = worker.failed_loads, set()
        return KVConnectorTransferResults(finished_recving=received, failed_recving=failed)

    def shutdown(self) -> None:
        super().shutdown()
        if self._client is not None:
            self._client.close()


def _group(group: Any) -> Group:
    """Return the facts of one of vLLM's groups."""
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
    for name, only in (("load", "async"), ("layout", "opaque"), ("transport", "auto"), ("announce_salts", False)):
        if getattr(options, name) != only:
            raise ConfigFieldError(
                f"kvframework.{name} is {getattr(options, name)!r}",
                where="kv_connector_extra_config",
                available=f"{only!r}: vLLM moves the bytes itself",
                hint="leave it out, or use KvFrameworkConnector",
            )
