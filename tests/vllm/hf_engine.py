"""transformers as the other engine, in a process of its own: answers one prompt and tells what it saw as a JSON line.

Run as `python -m tests.vllm.hf_engine` with an `Order` as JSON on stdin.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict, dataclass, field
from typing import Any

from tests.support.lazy import torch
from tests.support.processes import ran


@dataclass
class Order:
    """`options` are those of `TransformersKV`. `spoil`: what was restored is changed before it is used."""

    model: str
    prompt: list[int]
    tokens: int
    options: dict[str, Any] = field(default_factory=dict)
    dtype: str = "float32"
    spoil: bool = False


@dataclass(frozen=True)
class Answer:
    tokens: list[int]
    hit: int
    saved: int


def run(order: Order) -> Answer:
    """The answer of a new process. Asserts that it ends well."""
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    found = ran(
        sys.executable, "-m", "tests.vllm.hf_engine", input=json.dumps(asdict(order)), env=environment, timeout=600
    )
    return Answer(**json.loads(found.stdout.splitlines()[-1]))


def main() -> None:
    from kvf_transformers import TransformersKV
    from transformers import AutoModelForCausalLM

    order = Order(**json.loads(sys.stdin.read()))
    dtype = getattr(torch, order.dtype)
    model = AutoModelForCausalLM.from_pretrained(order.model, dtype=dtype, local_files_only=True).eval()
    with TransformersKV(model, deadline_scale=20.0, **order.options) as kv:
        restored = kv.restore(order.prompt)
        if order.spoil:
            for layer in restored.cache.layers:
                layer.keys.neg_()
        logits, cache, _ = kv.prefill(order.prompt, restored)
        tokens = list(kv.decode(logits, cache, order.tokens))
        saved = 0 if order.spoil else kv.save(order.prompt, cache).tokens
    print(json.dumps({"tokens": tokens, "hit": restored.hit_tokens, "saved": saved}))


if __name__ == "__main__":
    main()
