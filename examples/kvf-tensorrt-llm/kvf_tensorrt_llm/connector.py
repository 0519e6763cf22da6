"""`KvFrameworkScheduler` and `KvFrameworkWorker`: what TensorRT-LLM loads by `KvCacheConnectorConfig`.

The worker lives in each rank, the scheduler in rank 0, in the same process as that rank's worker. No failure of the
cache fails a request, except that of a load that was promised: see `start_load_kv`.
"""

from __future__ import annotations

import hashlib
import logging
import secrets
from pathlib import Path
from typing import Any, TypeVar

import torch
from tensorrt_llm._torch.pyexecutor.kv_cache_connector import KvCacheConnectorScheduler, KvCacheConnectorWorker
from tensorrt_llm._utils import mpi_rank

from kvf_tensorrt_llm.plan import Op, Plan, Planner
from kvframework.api.futures import Future
from kvframework.api.transport import LoadOutcome, StoreOutcome
from kvframework.client import KVClient, RequestHashes, WorkerAdapter, digest_files
from kvframework.errors import KVFrameworkError, RequestError

log = logging.getLogger(__name__)

O = TypeVar("O", LoadOutcome, StoreOutcome)  # noqa: E741
LOOKUP_S, TRANSFER_S, CONNECT_S = 2.0, 30.0, 5.0

# The worker of this process, for the scheduler of rank 0: TensorRT-LLM makes both and tells neither of the other.
_here: list[KvFrameworkWorker] = []


class KvFrameworkWorker(KvCacheConnectorWorker):  # type: ignore[misc]
    """One rank. Raises `RequestError` for a model whose KV it cannot name."""

    def __init__(self, llm_args: Any) -> None:
        super().__init__(llm_args)
        if getattr(llm_args, "pipeline_parallel_size", 1) > 1:
            raise RequestError("pipeline parallelism", available="tensor parallelism", hint="run without the connector")
        self.tokens_per_block = int(llm_args.kv_cache_config.tokens_per_block)
        self.client = KVClient(name="tensorrt-llm", connect_timeout_s=CONNECT_S)
        self.adapter: WorkerAdapter | None = None
        self._revision = _content(Path(str(llm_args.model)))
        _here[:] = [self]

    def register_kv_caches(self, kv_cache_tensor: torch.Tensor) -> None:
        """Register the pool, `[blocks, ...]`."""
        form = "x".join(map(str, kv_cache_tensor.shape[1:]))
        adapter = WorkerAdapter(
            self.client,
            instance_id=secrets.randbits(62),
            model_name="tensorrt-llm",
            revision=self._revision,
            world_size=int(getattr(self._llm_args, "tensor_parallel_size", 1)),
            rank=mpi_rank(),
            layout="opaque",
            layout_options={
                "packing": f"tensorrt-llm/{kv_cache_tensor.dtype}/{form}/{self.tokens_per_block}",
                "block_axis": 0,
            },
        )
        try:
            if not self.client.wait_up(CONNECT_S):
                self.client.raise_down()
            adapter.register_kv_caches({"pool": kv_cache_tensor}, block_size=self.tokens_per_block)
        except KVFrameworkError as error:
            log.warning("runs without a cache: %s", error)
            return
        self.adapter = adapter

    def start_load_kv(self, stream: Any) -> None:
        """Load what the scheduler has promised. Raises `RequestError` if that fails: attention would read blocks that
        were not written."""
        for op in self._plan().loads:
            adapter = self.adapter
            if adapter is None:
                raise RequestError("a load was promised, and this rank has no cache", hint="see its log")
            stream.synchronize()  # nothing may still use the blocks
            future = adapter.submit_retrieve(
                self._request(op), op.start, op.end, [op.block_ids], skip_first_n_tokens=op.skip
            )
            outcome = _ended(future)
            adapter.get_finished()
            if not outcome.ok:
                raise RequestError(f"the load of request {op.request_id} failed: {outcome.reason}")

    def wait_for_layer_load(self, layer_idx: int, stream: Any) -> None:
        """Loads have ended before."""

    def save_kv_layer(self, layer_idx: int, stream: Any) -> None:
        """Blocks are stored whole, with all layers."""

    def wait_for_save(self, stream: Any) -> None:
        """Store the chunks that this step has filled."""
        plan, adapter = self._plan(), self.adapter
        if adapter is None or not plan.stores:
            return
        stream.synchronize()
        for op in plan.stores:
            try:
                _ended(adapter.submit_store(self._request(op), op.start, op.end, [op.block_ids]))
            except KVFrameworkError as error:
                log.warning("request %s was not stored: %s", op.request_id, error)
        adapter.get_finished()

    def get_finished(
        self, finished_gen_req_ids: list[int], started_loading_req_ids: list[int]
    ) -> tuple[list[int], list[int]]:
        """Nothing is under way between steps."""
        return [], []

    def _plan(self) -> Plan:
        metadata = self.get_connector_meta()
        return metadata if isinstance(metadata, Plan) else Plan()

    def _request(self, op: Op) -> RequestHashes:
        registration = self.adapter.registration if self.adapter else None
        assert registration
        return RequestHashes(
            self.client.hasher,
            registration.desc.chunk_tokens,
            request_id=op.request_id,
            cache_salt=op.cache_salt,
            digests=op.digests,
        )


class KvFrameworkScheduler(KvCacheConnectorScheduler):  # type: ignore[misc]
    """The lookups of all ranks, in rank 0."""

    def __init__(self, llm_args: Any) -> None:
        super().__init__(llm_args)
        self._planner: Planner | None = None

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        """Return how many tokens more than those on the device can be loaded, and that it is done within the step."""
        worker = _here[0] if _here else None
        adapter = worker.adapter if worker else None
        if worker is None or adapter is None or adapter.registration is None or _named_by_more_than_tokens(request):
            return 0, False
        tokens = list(request.get_tokens(0))
        try:
            if self._planner is None:
                self._planner = Planner(adapter.scheduler(), worker.tokens_per_block)
            hashes = RequestHashes(
                worker.client.hasher,
                adapter.registration.desc.chunk_tokens,
                request_id=str(request.request_id),
                cache_salt=_salt(request),
            )
            hashes.extend(tokens)
            found = self._planner.begin(request.request_id, hashes, num_computed_tokens, len(tokens), LOOKUP_S)
            return found, False
        except KVFrameworkError as error:
            log.warning("request %s is computed: %s", request.request_id, error)
            return 0, False

    def update_state_after_alloc(self, request: Any, block_ids: list[int]) -> None:
        """The blocks come with the step, too."""

    def build_connector_meta(self, scheduler_output: Any) -> Plan:
        """Return the loads and stores of the next step."""
        whole = Plan()
        planner = self._planner
        if planner is None:
            return whole
        for request in scheduler_output.new_requests:
            # Its computed_position leaves out what is loaded.
            loaded = planner.loading(request.request_id)
            self._add(whole, request, request.computed_position + loaded + request.num_scheduled_tokens)
        for request in scheduler_output.cached_requests:
            self._add(whole, request, request.computed_position + request.num_scheduled_tokens)
        return whole

    def request_finished(self, request: Any, cache_block_ids: list[int]) -> bool:
        """Everything was stored within its step: the blocks are free."""
        if self._planner is not None:
            try:
                self._planner.end(request.request_id)
            except KVFrameworkError as error:
                log.warning("request %s: %s", request.request_id, error)
        return False

    def _add(self, whole: Plan, request: Any, computed_end: int) -> None:
        assert self._planner
        plan = self._planner.step(request.request_id, request.new_tokens, request.new_block_ids, computed_end)
        whole.loads += plan.loads
        whole.stores += plan.stores


def _ended(future: Future[O]) -> O:
    """The outcome. Whatever happens, nothing touches the blocks any more when this returns or raises."""
    try:
        return future.result(TRANSFER_S)
    finally:
        if not future.query():
            future.cancel()
            future.wait()


def _salt(request: Any) -> str:
    """TensorRT-LLM keeps a hash of a request's `cache_salt`."""
    number = getattr(request, "cache_salt_id", None)
    return "" if number is None else str(number)


def _named_by_more_than_tokens(request: Any) -> bool:
    """Adapters, images and prompt tables change KV; their content is not known here. Not every image has a hash."""
    more = ("lora_task_id", "prompt_vocab_size", "multimodal_hashes", "py_multimodal_data")
    return any(getattr(request, name, None) not in (None, [], {}) for name in more)


def _content(model: Path) -> str:
    files = sorted([*model.glob("*.json"), *model.glob("*.safetensors")])
    if not any(file.suffix == ".safetensors" for file in files):
        raise RequestError(f"{model} is no folder with weights", hint="give LLM() the folder of a checkpoint")
    digest = hashlib.blake2b(digest_size=16, person=b"kvf-trtllm")
    for file, found in digest_files(files).items():
        digest.update(f"{file.name}={found.digest}\n".encode())
    return digest.hexdigest()
