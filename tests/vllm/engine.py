"""One vLLM engine in this process: answers prompts and tells what it saw as one JSON line each on stdout.

Run as `python -m tests.vllm.engine JSON`; the argument says all, see `Order`. stderr has vLLM's log.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tests.support.lazy import torch

# What is told to the connectors of `tests.vllm.faults` by the environment.
STEPS = "KVF_TEST_STEPS"
SERVER_PID = "KVF_TEST_SERVER_PID"
# A folder: `halted` is there once a copy halts, which goes on once `over` is there.
HALTED = "KVF_TEST_HALTED"


@dataclass
class Ask:
    """One request, answered before the next. `reset`: drops vLLM's own prefix cache first, `forget`: the connector's
    too. `embeds`: the seed of embeddings that stand for the prompt; `pool`: the answer is an embedding. `wait_file`:
    waits until it is there, after announcing on stdout that it waits. `adapters`: the prompt is asked once for each of
    them in one batch, [name, number, path] or [] for none, and the answers stand one behind the other. `update`: the
    weights become those of a folder first, [how, folder, version or nothing], see `tests.vllm.updates`; `settle`: waits
    until the connector serves again; `logprobs`: those of the tokens are told too."""

    prompt: list[int]
    tokens: int = 32
    reset: bool = False
    forget: bool = False
    embeds: int = 0
    pool: bool = False
    params: dict[str, Any] = field(default_factory=dict)
    salt: str = ""
    wait_file: str = ""
    adapters: list[list[Any]] = field(default_factory=lambda: [[]])
    update: list[str] = field(default_factory=list)
    settle: bool = False
    logprobs: bool = False


@dataclass
class Order:
    model: str
    asks: list[Ask]
    # vLLM's `kv_transfer_config`; empty: no connector.
    transfer: dict[str, Any] = field(default_factory=dict)
    engine: dict[str, Any] = field(default_factory=dict)


def ordered() -> tuple[Order, Callable[..., None]]:
    """The order of this process, from its argument or for `-` from stdin, and what tells of it: a JSON line on stdout.
    Whatever a library or a child process prints goes to the log."""
    given = json.loads(sys.stdin.read() if sys.argv[1] == "-" else sys.argv[1])
    order = Order(**{**given, "asks": [Ask(**ask) for ask in given["asks"]]})
    events, sys.stdout = os.fdopen(os.dup(1), "w"), sys.stderr
    os.dup2(2, 1)

    def tell(**fields: Any) -> None:
        events.write(json.dumps(fields) + "\n")
        events.flush()

    return order, tell


def main() -> None:
    order, tell = ordered()
    started = time.perf_counter()
    llm = make_engine(order)
    from vllm.lora.request import LoRARequest

    from vllm import SamplingParams

    tell(event="ready", seconds=time.perf_counter() - started)
    for ask in order.asks:
        if ask.wait_file:
            tell(event="waiting")
            deadline = time.monotonic() + 1200
            while not os.path.exists(ask.wait_file):
                assert time.monotonic() < deadline
                time.sleep(0.05)
        if ask.update:
            _update(llm, *ask.update)
        if ask.reset or ask.forget:
            llm.reset_prefix_cache(reset_connector=ask.forget)
        if ask.settle:
            _settle(llm)
        extra = {"extra_args": {"kv_transfer_params": ask.params}} if ask.params else {}
        params = SamplingParams(
            temperature=0.0,
            max_tokens=ask.tokens,
            ignore_eos=True,
            detokenize=False,
            logprobs=0 if ask.logprobs else None,
            **extra,
        )
        prompt = {"prompt_token_ids": ask.prompt, **({"cache_salt": ask.salt} if ask.salt else {})}
        if ask.embeds:
            prompt = {"prompt_embeds": _embeddings(order, ask)}
        before, steps = counters(), _steps()
        begun = time.perf_counter()
        if ask.pool:
            pooled = llm.embed([prompt], use_tqdm=False)[0].outputs.embedding
            wall, after = time.perf_counter() - begun, counters()
            bits = [int(value * (1 << 20)) for value in pooled]
            tell(
                event="answer", tokens=bits, cached=0, ttft=0.0, wall=wall, computed=-1, counters=_since(before, after)
            )
            continue
        outputs = llm.generate(
            [prompt] * len(ask.adapters),
            params,
            use_tqdm=False,
            lora_request=[LoRARequest(*each) if each else None for each in ask.adapters],
        )
        output = outputs[0]
        wall = time.perf_counter() - begun
        after = counters()
        tell(
            event="answer",
            tokens=[token for each in outputs for token in each.outputs[0].token_ids],
            cached=sum(each.num_cached_tokens or 0 for each in outputs),
            ttft=output.metrics.first_token_latency if output.metrics else None,
            wall=wall,
            computed=sum(_steps()[len(steps) :]) - (ask.tokens - 1),
            counters=_since(before, after),
            logprobs=_logprobs(outputs) if ask.logprobs else [],
        )
    llm.llm_engine.engine_core.shutdown()


def _update(llm: Any, how: str, folder: str, version: str = "") -> None:
    """Each way in which vLLM changes the weights of a running engine, and what `finish_weight_update` of its
    asynchronous engine does with a version."""
    if how == "reload":
        llm.collective_rpc("reload_weights", kwargs={"weights_path": folder})
    elif how == "load_weights":
        llm.collective_rpc("load_weights_of", args=(folder,))
    else:
        llm.collective_rpc("start_weight_update")
        llm.collective_rpc("update_weights", args=({"folder": folder},))
        llm.collective_rpc("finish_weight_update")
    if version:
        llm.llm_engine.set_weight_version(version)


def _settle(llm: Any) -> None:
    """Asks prompts that are too short for any hit until the connector says that this is the reason."""
    from vllm import SamplingParams

    reason = "kvframework:miss_requests|reason=too_short"
    before, deadline = counters().get(reason, 0), time.monotonic() + 120
    while counters().get(reason, 0) == before:
        assert time.monotonic() < deadline, "the connector does not serve again"
        llm.generate([{"prompt_token_ids": [7] * 9}], SamplingParams(max_tokens=1, detokenize=False), use_tqdm=False)


def _logprobs(outputs: list[Any]) -> list[float]:
    answers = [each.outputs[0] for each in outputs]
    return [step[token].logprob for each in answers for token, step in zip(each.token_ids, each.logprobs, strict=True)]


def make_engine(order: Order) -> Any:
    from vllm import LLM

    return LLM(**settings_of(order))


def settings_of(order: Order) -> dict[str, Any]:
    settings: dict[str, Any] = {
        "model": order.model,
        "dtype": "float32",
        "max_model_len": 8192,
        "enforce_eager": True,
        "kv_cache_memory_bytes": 1 << 29,
        "skip_tokenizer_init": True,
        "disable_log_stats": False,
        **order.engine,
    }
    if order.transfer:
        settings["kv_transfer_config"] = order.transfer
    return settings


def kvframework_transfer(endpoint: str, options: dict[str, Any], connector: str) -> dict[str, Any]:
    """`connector` is "module:class"."""
    module, name = connector.split(":")
    return {
        "kv_connector": name,
        "kv_connector_module_path": module,
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"kvframework.endpoint": endpoint, **options},
    }


def _steps() -> list[int]:
    """The tokens that each step has computed so far, as `tests.vllm.faults.Watched` writes them down."""
    path = Path(os.environ.get(STEPS, ""))
    return [int(line) for line in path.read_text().split()] if path.is_file() else []


def _embeddings(order: Order, ask: Ask) -> Any:
    """[tokens, hidden size] of noise."""
    hidden = json.loads(Path(order.model, "config.json").read_text())["hidden_size"]
    return torch.randn(len(ask.prompt), hidden, generator=torch.Generator().manual_seed(ask.embeds))


def _since(before: dict[str, float], after: dict[str, float]) -> dict[str, float]:
    return {name: after[name] - before.get(name, 0) for name in after if after[name] != before.get(name, 0)}


def counters() -> dict[str, float]:
    """What `/metrics` would show: counters, gauges, and the sums of histograms, by name and labels."""
    from prometheus_client import REGISTRY

    found: dict[str, float] = {}
    for family in REGISTRY.collect():
        for sample in family.samples:
            if sample.name.endswith(("_created", "_bucket", "_count")):
                continue
            labels = {key: text for key, text in sample.labels.items() if key not in ("model_name", "engine")}
            name = sample.name.removesuffix("_total").removesuffix("_sum")
            name += "".join(f"|{key}={text}" for key, text in sorted(labels.items()))
            found[name] = found.get(name, 0) + sample.value
    return found


def encode(order: Order) -> str:
    return json.dumps(asdict(order))


if __name__ == "__main__":
    main()
