"""One SGLang engine in this process: answers prompts and tells what it saw as one JSON line each on stdout.

Run as `python -m tests.sglang.engine` with an `Order` as JSON on stdin; stderr has SGLang's log.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tests.sglang.standins import everything

# Also in the processes that SGLang starts: they import this module first.
everything.install()


@dataclass
class Ask:
    """One request, answered before the next. `wait_file`: waits until it is there, after announcing on stdout that it
    waits. `settle_s`: seconds in which its pages may get to the server before the next request."""

    prompt: list[int]
    tokens: int = 12
    wait_file: str = ""
    flush: bool = False
    salt: str = ""
    lora: str = ""
    update: str = ""


@dataclass
class Order:
    model: str
    asks: list[Ask]
    engine: dict[str, Any] = field(default_factory=dict)
    # SGLang's extra config of the storage backend; empty: no hierarchical cache.
    storage: dict[str, Any] = field(default_factory=dict)


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
    return given | order.engine


def storage_of(endpoint: str, **options: Any) -> dict[str, Any]:
    return {
        "backend_name": "kvframework",
        "module_path": "kvf_sglang.storage",
        "class_name": "KvFrameworkStorage",
        "kvframework.endpoint": endpoint,
        **options,
    }


def main() -> None:
    given = json.loads(sys.stdin.read())
    order = Order(**{**given, "asks": [Ask(**ask) for ask in given["asks"]]})
    events, sys.stdout = os.fdopen(os.dup(1), "w"), sys.stderr
    os.dup2(2, 1)

    def tell(**fields: Any) -> None:
        events.write(json.dumps(fields) + "\n")
        events.flush()

    import sglang

    engine = sglang.Engine(**settings_of(order))
    tell(event="ready")
    try:
        for ask in order.asks:
            if ask.wait_file:
                tell(event="waiting")
                deadline = time.monotonic() + 300
                while not Path(ask.wait_file).exists():
                    assert time.monotonic() < deadline
                    time.sleep(0.05)
            if ask.flush:
                engine.flush_cache()
            if ask.update:
                tell(event="updated", answer=str(engine.update_weights_from_disk(ask.update)))
            more: dict[str, Any] = {"lora_path": [ask.lora]} if ask.lora else {}
            begun = time.perf_counter()
            answer = engine.generate(
                input_ids=[ask.prompt],
                sampling_params={"temperature": 0.0, "max_new_tokens": ask.tokens, "ignore_eos": True},
                **more,
            )[0]
            info = answer["meta_info"]
            tell(
                event="answer",
                tokens=answer["output_ids"],
                cached=info.get("cached_tokens"),
                details=info.get("cached_tokens_details") or {},
                wall=time.perf_counter() - begun,
            )
    finally:
        with contextlib.suppress(Exception):
            engine.shutdown()


def encode(order: Order) -> str:
    return json.dumps(asdict(order))


if __name__ == "__main__":
    main()
