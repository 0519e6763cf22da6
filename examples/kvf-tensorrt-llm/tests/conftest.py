"""Stand-ins for the modules of TensorRT-LLM that the connector imports, in the words of its release 1.2."""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from types import ModuleType
from typing import Any


class KvCacheConnectorWorker(ABC):
    def __init__(self, llm_args: Any) -> None:
        self._llm_args = llm_args
        self._metadata: object = None

    def bind_connector_meta(self, metadata: object) -> None:
        self._metadata = metadata

    def get_connector_meta(self) -> object:
        return self._metadata

    @abstractmethod
    def register_kv_caches(self, kv_cache_tensor: Any) -> None: ...
    @abstractmethod
    def start_load_kv(self, stream: Any) -> None: ...
    @abstractmethod
    def wait_for_layer_load(self, layer_idx: int, stream: Any) -> None: ...
    @abstractmethod
    def save_kv_layer(self, layer_idx: int, stream: Any) -> None: ...
    @abstractmethod
    def wait_for_save(self, stream: Any) -> None: ...
    @abstractmethod
    def get_finished(self, finished_gen_req_ids: Any, started_loading_req_ids: Any) -> Any: ...


class KvCacheConnectorScheduler(ABC):
    def __init__(self, llm_args: Any) -> None:
        self._llm_args = llm_args

    @abstractmethod
    def build_connector_meta(self, scheduler_output: Any) -> Any: ...
    @abstractmethod
    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> Any: ...
    @abstractmethod
    def request_finished(self, request: Any, cache_block_ids: Any) -> Any: ...
    @abstractmethod
    def update_state_after_alloc(self, request: Any, block_ids: Any) -> None: ...


def _module(name: str, **content: object) -> None:
    made = ModuleType(name)
    made.__dict__.update(content)
    sys.modules[name] = made


for _package in ("tensorrt_llm", "tensorrt_llm._torch", "tensorrt_llm._torch.pyexecutor"):
    _module(_package)
_module("tensorrt_llm._utils", mpi_rank=lambda: 0)
_module(
    "tensorrt_llm._torch.pyexecutor.kv_cache_connector",
    KvCacheConnectorWorker=KvCacheConnectorWorker,
    KvCacheConnectorScheduler=KvCacheConnectorScheduler,
)
