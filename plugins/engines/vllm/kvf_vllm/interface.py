"""The part of vLLM's interface that the connector follows, and its fingerprint: what it implements, calls and reads,
with parameters and fields, out of vLLM's source. Nothing of vLLM is imported or run."""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

_CONNECTOR = "distributed/kv_transfer/kv_connector"
# By file: classes or functions, and of a class the names that count; () for all of its fields.
FOLLOWED: dict[str, dict[str, tuple[str, ...]]] = {
    f"{_CONNECTOR}/v1/base.py": {
        "KVConnectorBase_V1": (
            "__init__",
            "bind_connector_metadata",
            "bind_kv_cache_manager",
            "build_connector_meta",
            "build_connector_worker_meta",
            "build_kv_connector_stats",
            "build_prom_metrics",
            "get_block_ids_with_load_errors",
            "get_kv_connector_stats",
            "get_num_new_matched_tokens",
            "get_required_kvcache_layout",
            "get_transfer_results",
            "handle_preemptions",
            "register_kv_caches",
            "request_finished",
            "requires_kv_delivery",
            "requires_piecewise_for_cudagraph",
            "reset_cache",
            "save_kv_layer",
            "shutdown",
            "start_load_kv",
            "take_events",
            "update_connector_output",
            "update_state_after_alloc",
            "wait_for_layer_load",
            "wait_for_save",
        ),
        "KVConnectorTransferResults": (),
        "KVConnectorWorkerMetadata": ("aggregate",),
        "SupportsHMA": ("request_finished_all_groups",),
    },
    f"{_CONNECTOR}/v1/metrics.py": {
        "KVConnectorPromMetrics": ("__init__", "observe"),
        "KVConnectorStats": ("aggregate", "data", "is_empty", "reduce", "reset"),
    },
    f"{_CONNECTOR}/factory.py": {"KVConnectorFactory": ("register_connector",)},
    "distributed/kv_events.py": {"BlockRemoved": (), "BlockStored": ()},
    "config/parallel.py": {"ParallelConfig": ("worker_cls",)},
    "v1/core/kv_cache_manager.py": {"KVCacheManager": ("reset_prefix_cache",)},
    "v1/core/sched/output.py": {
        "CachedRequestData": ("new_block_ids", "num_computed_tokens", "req_ids", "resumed_req_ids"),
        "KVConnectorBlockState": ("boundary_state_offloads", "get_block_ids"),
        "NewRequestData": ("block_ids", "num_computed_tokens"),
        "SchedulerOutput": (
            "kv_connector_block_state",
            "num_scheduled_tokens",
            "scheduled_cached_reqs",
            "scheduled_new_reqs",
        ),
    },
    "v1/kv_cache_interface.py": {
        "AttentionSpec": (),
        "FullAttentionSpec": (),
        "KVCacheConfig": ("kv_cache_groups", "kv_cache_layout", "kv_tp_replicas", "num_blocks"),
        "KVCacheGroupSpec": (),
        "MLAAttentionSpec": (),
        "MambaSpec": (),
        "SlidingWindowSpec": (),
    },
    "v1/worker/gpu/model_runner.py": {"GPUModelRunner": ("get_draft_model", "get_model", "reload_weights")},
    "v1/worker/gpu_model_runner.py": {"GPUModelRunner": ("get_draft_model", "get_model", "reload_weights")},
    "v1/worker/gpu_worker.py": {
        "Worker": (
            "_weight_update_active",
            "compile_or_warm_up_model",
            "finish_weight_update",
            "get_draft_model",
            "get_model",
            "load_model",
            "reload_weights",
            "start_draft_weight_update",
            "start_weight_update",
            "update_weights",
        )
    },
    "v1/request.py": {
        "Request": (
            "all_token_ids",
            "block_hashes",
            "cache_salt",
            "kv_transfer_params",
            "lora_request",
            "mm_features",
            "num_computed_tokens",
            "num_tokens",
            "pooling_params",
            "prompt_embeds",
            "resumable",
            "skip_reading_prefix_cache",
            "trace_headers",
        )
    },
}


def fingerprint_of(package: Path) -> str:
    """The fingerprint of the vLLM whose package lies in this folder, "" if it cannot be read."""
    try:
        found = {file: _followed(package / file, classes) for file, classes in FOLLOWED.items()}
    except (OSError, ValueError, SyntaxError, RecursionError):
        return ""
    return hashlib.blake2b(json.dumps(found, sort_keys=True).encode(), digest_size=16).hexdigest()


def installed_fingerprint() -> str:
    """That of the vLLM in this environment."""
    spec = importlib.util.find_spec("vllm")
    return fingerprint_of(Path(spec.origin).parent) if spec is not None and spec.origin else ""


def _followed(file: Path, classes: Mapping[str, Sequence[str]]) -> dict[str, dict[str, list[str]]]:
    """By class and name: its form, in all the ways in which it is defined."""
    found: dict[str, dict[str, list[str]]] = {}
    for node in ast.parse(file.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ClassDef) and node.name in classes:
            names = classes[node.name]
            forms = found[node.name] = {"": [ast.unparse(base) for base in node.bases]}
            for name, form in sorted(_members(node, fields_only=not names)):
                if name in names or not names:
                    forms.setdefault(name, []).append(form)
    return found


def _members(node: ast.ClassDef, *, fields_only: bool) -> Iterator[tuple[str, str]]:
    """The names of a class, each with its parameters, or its type; what is only assigned in a method has neither."""
    for each in node.body:
        if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name):
            yield each.target.id, ast.unparse(each.annotation)
        elif isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef) and not fields_only:
            kinds = "".join(f"@{ast.unparse(kind)} " for kind in each.decorator_list)
            # Types and defaults of parameters are reworded between releases.
            yield each.name, f"{kinds}({', '.join(_parameters(each.args))})"
            if each.name == "__init__":
                yield from ((name, "") for name in sorted(_assigned(each)))


def _parameters(arguments: ast.arguments) -> Iterator[str]:
    yield from (each.arg for each in (*arguments.posonlyargs, *arguments.args))
    yield "*" + (arguments.vararg.arg if arguments.vararg else "")
    yield from sorted(each.arg for each in arguments.kwonlyargs)
    yield "**" + (arguments.kwarg.arg if arguments.kwarg else "")


def _assigned(method: ast.FunctionDef | ast.AsyncFunctionDef) -> set[str]:
    """The attributes that a method sets on its object."""
    return {
        node.attr
        for node in ast.walk(method)
        if isinstance(node, ast.Attribute)
        and isinstance(node.ctx, ast.Store)
        and isinstance(node.value, ast.Name)
        and node.value.id == "self"
    }
