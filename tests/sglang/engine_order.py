"""What an engine process of the tests is asked to do. Imports nothing of SGLang."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass
class Ask:
    """One request, answered before the next. First waits for `wait_file`, after announcing it on stdout; then `flush`
    drops SGLang's own cache, `clear` the storage's, and `update` is a folder from which new weights are loaded."""

    prompt: list[int]
    tokens: int = 12
    wait_file: str = ""
    flush: bool = False
    clear: bool = False
    update: str = ""
    salt: str = ""


@dataclass
class Order:
    """`hold_file`: after its answers the engine lives until it is there, so that what it stores gets to the server."""

    model: str
    asks: list[Ask]
    engine: dict[str, Any] = field(default_factory=dict)
    # SGLang's extra config of the storage backend; empty: no hierarchical cache.
    storage: dict[str, Any] = field(default_factory=dict)
    hold_file: str = ""
    # The same options for the external linker instead.
    linker: dict[str, Any] = field(default_factory=dict)


def settings_of(order: Order) -> dict[str, Any]:
    given: dict[str, Any] = {
        "model_path": order.model,
        "device": "cpu",
        "dtype": "float32",
        "attention_backend": "torch_native",
        "sampling_backend": "pytorch",
        "disable_overlap_schedule": True,
        "skip_tokenizer_init": True,
        "skip_server_warmup": True,
        "page_size": 64,
        "max_total_tokens": 4096,
        "max_running_requests": 2,
        "chunked_prefill_size": 2048,
        "mem_fraction_static": 0.5,
        "random_seed": 1,
        "enable_cache_report": True,
        "log_level": "info",
    }
    if order.storage:
        given |= {
            "enable_hierarchical_cache": True,
            "hicache_ratio": 2.0,
            "hicache_io_backend": "direct",
            "hicache_mem_layout": "layer_first",
            "hicache_write_policy": "write_through",
            "hicache_storage_backend": "dynamic",
            "hicache_storage_prefetch_policy": "wait_complete",
            "hicache_storage_backend_extra_config": json.dumps(order.storage),
        }
    if order.linker:
        given |= {
            "enable_unified_cache_external_linker": True,
            "unified_cache_external_linker_backend": "dynamic",
            "unified_cache_external_linker_config": order.linker,
        }
    return given | order.engine


def storage_of(endpoint: str, **options: Any) -> dict[str, Any]:
    return {
        "backend_name": "kvframework",
        "module_path": "kvf_sglang.storage",
        "class_name": "KvFrameworkStorage",
        "kvframework.endpoint": endpoint,
        **options,
    }


def linker_of(endpoint: str, module: str = "kvf_sglang.linker", name: str = "KvFrameworkLinker") -> dict[str, Any]:
    return {
        "linker": name,
        "linker_module_path": module,
        "linker_extra_config": {"kvframework.endpoint": endpoint, "kvframework.deadline_scale": 20.0},
    }


def encode(order: Order) -> str:
    return json.dumps(asdict(order))
