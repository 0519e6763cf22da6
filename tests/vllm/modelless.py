"""vLLM's engine core without a model: its scheduler, block tables, memory and connectors are real, and a step writes
known bytes into the blocks that a model would have written keys and values into.

So any kind of cache can be stored and loaded, also those whose kernels need a GPU.
"""

from __future__ import annotations

import copy
import hashlib
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from tests.support.lazy import torch
from tests.vllm.model import cached

BLOCKS = 512


@dataclass(frozen=True)
class Cache:
    """What a model's layers keep, by layer, and how vLLM lays it out. `engine` are arguments of the engine, `parallel`
    and `caching` what its ParallelConfig and CacheConfig then have: vLLM takes some of it from the model that is not
    there."""

    layers: dict[str, Any]
    layout: str = "LBHNC"
    workers: int = 1
    model: str = "tiny"
    engine: dict[str, Any] = field(default_factory=dict)
    parallel: dict[str, int] = field(default_factory=dict)
    caching: dict[str, Any] = field(default_factory=dict)


@dataclass
class Loaded:
    """The blocks that a request had when its first step began: what was loaded, up to token `end`."""

    end: int
    # By group, the places in the block table that hold a block before `end`.
    places: list[list[int]]
    # Blocks whose bytes are not those that were stored: worker, layer and place in the block table.
    wrong: list[tuple[int, str, int]]


def content(prompt: int, rank: int, layer: str, place: int, nbytes: int) -> torch.Tensor:
    """The bytes that a step writes into the block at `place` of a request's block table."""
    name = f"{prompt}/{rank}/{layer}/{place}".encode()
    seed = int.from_bytes(hashlib.blake2b(name, digest_size=7).digest(), "big")
    return torch.randint(-128, 128, (nbytes,), dtype=torch.int8, generator=torch.Generator().manual_seed(seed))


class _Layer:
    """A layer as far as a connector asks it."""

    def get_attn_backend(self) -> Any:
        return SimpleNamespace(get_name=lambda: "NO_MODEL")


class _Worker:
    """One rank: its memory and its half of the connector."""

    def __init__(self, config: Any, rank: int, kv_cache_config: Any) -> None:
        from vllm.config import set_current_vllm_config
        from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
        from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
        from vllm.v1.worker.utils import allocate_kv_cache

        self.rank = rank
        self.config = copy.deepcopy(config)
        self.config.parallel_config.rank = rank
        self.kv_cache_config = kv_cache_config
        layout = self.config.cache_config.get_resolved_kv_cache_layout()
        self.memory = allocate_kv_cache(kv_cache_config, torch.device("cpu"), layout)
        self.config.compilation_config.static_forward_context = {name: _Layer() for name in self.memory}
        with set_current_vllm_config(self.config):
            self.connector: Any = KVConnectorFactory.create_connector(
                self.config, KVConnectorRole.WORKER, kv_cache_config
            )
            self.connector.register_kv_caches(self.memory)
        # As after the load of a model, from whose calls updates of its weights would be seen.
        self.connector._updates._worker = self

    def block(self, layer: str, block: int) -> torch.Tensor:
        memory = self.memory[layer][block]
        return memory.view(torch.int8)

    def write(self, layer: str, block: int, prompt: int, place: int) -> None:
        memory = self.block(layer, block)
        memory.copy_(content(prompt, self.rank, layer, place, memory.numel()).view(memory.shape))

    def is_right(self, layer: str, block: int, prompt: int, place: int) -> bool:
        memory = self.block(layer, block)
        return bool(torch.equal(memory.flatten(), content(prompt, self.rank, layer, place, memory.numel())))


def _executor() -> type:
    from vllm.v1.executor.abstract import Executor
    from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput

    class Workers(Executor):  # type: ignore[misc]
        cache: Cache
        scheduler: Any = None

        def _init_executor(self) -> None:
            self.workers: list[_Worker] = []
            self.loaded: dict[str, Loaded] = {}
            self.computed: dict[str, int] = {}

        def collective_rpc(self, method: Any, *_arguments: Any, **_named: Any) -> list[Any]:
            answers = {
                "get_kv_cache_spec": self.cache.layers,
                "get_supported_kv_cache_layouts": [self.cache.layout],
                "determine_available_memory": 1 << 40,
                "get_supported_tasks": ("generate",),
            }
            return [answers.get(method)] * self.cache.workers

        def initialize_from_config(self, kv_cache_configs: list[Any]) -> None:
            config = self.vllm_config
            self.workers = [_Worker(config, rank, each) for rank, each in enumerate(kv_cache_configs)]

        def compile_or_warm_up_model(self) -> None: ...
        def check_health(self) -> None: ...
        def get_kv_connector_handshake_metadata(self) -> list[None]:
            return [None] * self.cache.workers

        def execute_model(self, scheduler_output: Any, non_block: bool = False) -> Any:
            outputs = [self._step(worker, scheduler_output) for worker in self.workers]
            output = self.kv_output_aggregator.aggregate(outputs, 0)
            answer: Future[Any] = Future()
            answer.set_result(output)
            return answer if non_block else output

        def _step(self, worker: _Worker, plan: Any) -> Any:
            connector, output = worker.connector, KVConnectorOutput()
            # Each worker's own, as in processes.
            metadata = copy.deepcopy(plan.kv_connector_metadata)
            connector.handle_preemptions(metadata)
            connector.bind_connector_metadata(metadata)
            for each in plan.kv_cache_block_copies or ():
                for layer in worker.memory:
                    worker.block(layer, each.dst_block_id).copy_(worker.block(layer, each.src_block_id))
            connector.start_load_kv(None)
            starts = {each.req_id: each.num_computed_tokens for each in plan.scheduled_new_reqs}
            cached_requests = plan.scheduled_cached_reqs
            starts |= dict(zip(cached_requests.req_ids, cached_requests.num_computed_tokens, strict=True))
            for request_id, tokens in plan.num_scheduled_tokens.items():
                self._compute(worker, request_id, starts[request_id], tokens)
            connector.wait_for_save()
            results = connector.get_transfer_results(plan.finished_req_ids)
            output.finished_recving, output.failed_recving = results.finished_recving, results.failed_recving
            output.invalid_block_ids = connector.get_block_ids_with_load_errors()
            output.kv_connector_worker_meta = connector.build_connector_worker_meta()
            connector.clear_connector_metadata()
            names = list(plan.num_scheduled_tokens)
            sampled = [[7] if self._ends(name) else [] for name in names]
            where = {name: index for index, name in enumerate(names)}
            return ModelRunnerOutput(names, where, sampled, kv_connector_output=output)

        def _ends(self, request_id: str) -> bool:
            request = self.scheduler.requests[request_id]
            return bool(request.num_computed_tokens >= request.num_tokens)

        def _compute(self, worker: _Worker, request_id: str, start: int, tokens: int) -> None:
            prompt = int(request_id.split("-")[0])
            tables = self.scheduler.kv_cache_manager.get_block_ids(request_id)
            if request_id not in self.loaded:
                self.loaded[request_id] = Loaded(start, [[] for _ in tables], [])
            first = start == self.loaded[request_id].end
            dcp = self.vllm_config.parallel_config.decode_context_parallel_size
            for index, (group, table) in enumerate(zip(worker.kv_cache_config.kv_cache_groups, tables, strict=True)):
                spec = group.kv_cache_spec
                size = spec.block_size * (dcp if spec.dcp_sharded else 1)
                if not spec.prefix_cacheable:
                    continue
                if first:
                    self._compare(worker, request_id, index, table, -(-start // size))
                for place in range(start // size, -(-(start + tokens) // size)):
                    if table[place]:
                        for layer in group.layer_names:
                            worker.write(layer, table[place], prompt, place)

        def _compare(self, worker: _Worker, request_id: str, index: int, table: Sequence[int], end: int) -> None:
            loaded, prompt = self.loaded[request_id], int(request_id.split("-")[0])
            loaded.places[index] = [place for place in range(end) if table[place]]
            for layer in worker.kv_cache_config.kv_cache_groups[index].layer_names:
                loaded.wrong += [
                    (worker.rank, layer, place)
                    for place in loaded.places[index]
                    if not worker.is_right(layer, table[place], prompt, place)
                ]

        def shutdown(self) -> None:
            for worker in self.workers:
                worker.connector.shutdown()

    return Workers


class Engine:
    """An engine core with the connector `KvFrameworkOffloading`."""

    def __init__(self, cache: Cache, endpoint: str, extra: dict[str, Any], change: Callable[[Any], None]) -> None:
        from vllm.engine.arg_utils import EngineArgs
        from vllm.v1.engine.core import EngineCore

        from kvf_vllm import transfer_config

        transfer = transfer_config(
            {"kvframework.endpoint": endpoint, "kvframework.deadline_scale": 50.0, **extra},
            connector="KvFrameworkOffloading",
        )
        arguments: dict[str, Any] = {
            "dtype": "float32",
            "max_model_len": 1024,
            "block_size": 16,
            "num_gpu_blocks_override": BLOCKS,
            "async_scheduling": False,
            **cache.engine,
        }
        if cache.workers > 1:
            arguments |= {"tensor_parallel_size": cache.workers, "distributed_executor_backend": "mp"}
        config = EngineArgs(
            model=str(cached(cache.model)), skip_tokenizer_init=True, kv_transfer_config=transfer, **arguments
        ).create_engine_config()
        # What vLLM's CPU platform switches off where its kernels are missing: here none run.
        config.cache_config.enable_prefix_caching = True
        config.scheduler_config.enable_chunked_prefill = True
        for part, facts in ((config.parallel_config, cache.parallel), (config.cache_config, cache.caching)):
            for name, value in facts.items():
                setattr(part, name, value)
        change(config)
        kind = type("Workers", (_executor(),), {"cache": cache})
        self.core = EngineCore(config, kind, log_stats=False)
        self.executor = self.core.model_executor
        self.executor.scheduler = self.core.scheduler
        self._asked = 0

    @property
    def connector(self) -> Any:
        return self.core.scheduler.get_kv_connector()

    def answer(self, prompt: int, tokens: Sequence[int], most: int = 2) -> Loaded:
        name, deadline = self.ask(prompt, tokens, most), time.monotonic() + 120
        while self.core.scheduler.has_requests():
            assert time.monotonic() < deadline, "the request does not end"
            self.core.step()
        return self.executor.loaded[name]

    def ask(self, prompt: int, tokens: Sequence[int], most: int = 2) -> str:
        """Add a request, for the next step; returns its name."""
        from vllm.v1.engine import EngineCoreRequest

        from vllm import SamplingParams

        self._asked += 1
        name = f"{prompt}-{self._asked}"
        parameters = SamplingParams(max_tokens=most, ignore_eos=True)
        parameters.update_from_generation_config({})
        request = EngineCoreRequest(name, list(tokens), None, parameters, None, time.time(), None, None, None)
        self.core.add_request(*self.core.preprocess_add_request(request))
        return name

    def settle(self) -> None:
        stores, deadline = self.connector._manager.stores, time.monotonic() + 60
        while stores._under_way or stores._held:
            assert time.monotonic() < deadline, "stores do not end"
            self.answer(0, [1, 2, 3], most=1)


@contextmanager
def engine(
    cache: Cache,
    endpoint: str,
    extra: dict[str, Any] | None = None,
    change: Callable[[Any], None] = lambda _config: None,
) -> Iterator[Engine]:
    made = Engine(cache, endpoint, extra or {}, change)
    try:
        yield made
    finally:
        made.core.shutdown()
