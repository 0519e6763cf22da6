"""SGLang's modules as far as `kvf_sglang.storage` and `kvf_sglang.linker` import them, for tests without SGLang."""

from __future__ import annotations

import sys
import types
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import pytest


class PoolName(str, Enum):
    KV = "kv"
    MAMBA = "mamba"


class HiCacheStorage:
    pass


@dataclass
class PoolTransferResult:
    kv_hit_pages: int
    extra_pool_hit_pages: dict[str, int]
    restorable_prefix_pages: list[int] | None = None

    @classmethod
    def empty(cls) -> PoolTransferResult:
        return cls(0, {})


@dataclass
class StorageMetrics:
    prefetch_pgs: list[int] = field(default_factory=list)
    backup_pgs: list[int] = field(default_factory=list)
    prefetch_bandwidth: list[float] = field(default_factory=list)
    backup_bandwidth: list[float] = field(default_factory=list)


class UnifiedCacheLinker:
    def record_offload_ready(self) -> list[Any]:
        return []


class LayerWiseLoadCounter:
    def __init__(self, num_layers: int) -> None:
        self.resets = 0

    def reset(self) -> None:
        self.resets += 1


class WeightUpdater:
    """SGLang's updater of weights."""

    def __init__(self) -> None:
        self.updated: list[str] = []

    def update_weights_from_disk(self, path: str) -> str:
        self.updated.append(path)
        return path

    def begin_weight_update(self) -> None: ...
    def load_weights_from_distributed(self) -> None: ...
    def update_weights_from_tensor(self) -> None: ...
    def update_weights_from_ipc(self) -> None: ...


@dataclass
class StorageConfig:
    """`HiCacheStorageConfig`."""

    extra_config: dict[str, Any] | None
    tp_rank: int = 0
    tp_size: int = 1
    pp_rank: int = 0
    pp_size: int = 1
    attn_cp_rank: int = 0
    attn_cp_size: int = 1
    is_mla_model: bool = False
    enable_storage_metrics: bool = True


def install(monkeypatch: pytest.MonkeyPatch, version: str = "0.5.23") -> None:
    """Until the test ends. Modules that imported the fake are forgotten, too."""
    contents: dict[str, dict[str, object]] = {
        "sglang": {"__version__": version},
        "sglang.srt.mem_cache.hicache_storage": {
            "HiCacheStorage": HiCacheStorage,
            "PoolTransferResult": PoolTransferResult,
            "PoolName": PoolName,
        },
        "sglang.srt.mem_cache.unified_cache.unified_cache_linker": {
            "UnifiedCacheLinker": UnifiedCacheLinker,
            "LayerWiseLoadCounter": LayerWiseLoadCounter,
        },
        "sglang.srt.runtime_context": {"get_parallel": lambda: types.SimpleNamespace(attn_tp_rank=0, attn_tp_size=1)},
        "sglang.srt.observability.metrics_collector": {"StorageMetrics": StorageMetrics},
        "sglang.srt.model_executor.model_runner_components.weight_updater": {
            # A class of its own for each test: it is patched.
            "WeightUpdater": type("WeightUpdater", (), dict(vars(WeightUpdater)))
        },
    }
    for name, members in contents.items():
        parts = name.split(".")
        for depth in range(1, len(parts) + 1):
            path = ".".join(parts[:depth])
            if path not in sys.modules or path == name:
                monkeypatch.setitem(sys.modules, path, types.ModuleType(path))
        for member, value in members.items():
            setattr(sys.modules[name], member, value)
    for module in ("kvf_sglang.storage", "kvf_sglang.linker"):
        monkeypatch.delitem(sys.modules, module, raising=False)
