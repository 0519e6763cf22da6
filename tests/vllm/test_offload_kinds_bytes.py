"""Every byte of each kind of cache that vLLM has, stored and loaded through both halves of `KvFrameworkOffloading` and
a real server. vLLM's own classes group and lay out the blocks and its scheduler plans the steps; no model runs."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from kvframework.client import OpaqueInstance
from tests.support.server_process import ServerProcess, server_fixture
from tests.vllm.model import prompt
from tests.vllm.modelless import Cache, engine

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600), pytest.mark.filterwarnings("ignore")]

TOKENS, WINDOW, LEAST = 700, 100, 448


def kind(name: str, layers: int = 2, *, prefix: str = "layer", **facts: Any) -> dict[str, Any]:
    import torch
    from vllm.v1 import kv_cache_interface as vllms

    common = {"block_size": 16, "num_kv_heads": 4, "head_size": 32, "dtype": torch.float32}
    return {f"{prefix}.{layer}": getattr(vllms, name)(**common | facts) for layer in range(layers)}


def full(layers: int) -> dict[str, Any]:
    return kind("FullAttentionSpec", layers, prefix="full")


def latent(name: str, layers: int, *, prefix: str = "latent", **facts: Any) -> dict[str, Any]:
    return kind(name, layers, prefix=prefix, num_kv_heads=1, head_size=72, **facts)


def states(**facts: Any) -> dict[str, Any]:
    import torch
    from vllm.v1 import kv_cache_interface as vllms

    spec = vllms.MambaSpec(
        block_size=32,
        shapes=((4, 64), (4, 8, 16)),
        dtypes=(torch.float32, torch.float32),
        page_size_padded=32 * 4 * 64 * 4,
        mamba_cache_mode="align",
        **facts,
    )
    return {f"state.{layer}": spec for layer in range(4)} | kind("FullAttentionSpec", 2, prefix="full", block_size=32)


def hybrid(**facts: Any) -> Cache:
    return Cache(states(**facts), engine={"block_size": 32}, caching={"mamba_cache_mode": "align"})


def as_deepseek_v4() -> dict[str, Any]:
    """Latents of several sizes, compressed ones, and windows, packed one behind the other in each block."""
    return (
        latent("MLAAttentionSpec", 2, prefix="all", tokens_per_state=4, block_size=64)
        | latent("SlidingWindowMLASpec", 3, prefix="window", sliding_window=WINDOW)
        | kind("MLAAttentionSpec", 1, prefix="index", num_kv_heads=1, head_size=32, tokens_per_state=4, block_size=64)
    )


CACHES: dict[str, Callable[[], Cache]] = {
    "FullAttentionSpec": lambda: Cache(full(4)),
    "MLAAttentionSpec": lambda: Cache(latent("MLAAttentionSpec", 4)),
    "SlidingWindowSpec": lambda: Cache(full(2) | kind("SlidingWindowSpec", 4, sliding_window=WINDOW)),
    "SlidingWindowMLASpec": lambda: Cache(as_deepseek_v4(), layout="BLHNC"),
    "ChunkedLocalAttentionSpec": lambda: Cache(
        full(2) | kind("ChunkedLocalAttentionSpec", 6, attention_chunk_size=192)
    ),
    "SinkFullAttentionSpec": lambda: Cache(kind("SinkFullAttentionSpec", 4, sink_len=16)),
    "RSWASpec": lambda: Cache(kind("RSWASpec", 4, rswa_window=64)),
    "HiddenStateCacheSpec": lambda: Cache(
        full(2)
        | kind("SlidingWindowSpec", 2, sliding_window=WINDOW)
        | latent("HiddenStateCacheSpec", 1, prefix="hidden")
    ),
    "MambaSpec": hybrid,
    # The step that ends a prompt stores the state within it, too.
    "MambaSpec, checkpoints": lambda: hybrid(num_prefill_checkpoint_blocks=1, prefill_checkpoint_alignment=1),
    "CircularBufferSpec": lambda: Cache(full(2) | kind("CircularBufferSpec", 2, prefix="ring")),
    "FullAttentionSpec, TP 2": lambda: Cache(full(4), workers=2),
    "FullAttentionSpec, DCP 2": lambda: Cache(full(4), workers=2, parallel={"decode_context_parallel_size": 2}),
    "MLAAttentionSpec, PCP 2": lambda: Cache(
        latent("MLAAttentionSpec", 4),
        workers=2,
        parallel={"tensor_parallel_size": 1, "prefill_context_parallel_size": 2},
    ),
}


server = server_fixture(capacity="256MiB")


@pytest.fixture
def sinks(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM 0.32 itself gives the manager of sinks an argument that it does not take, so no such model starts there."""
    from vllm.v1.core.single_type_kv_cache_manager import SinkFullAttentionManager

    made = SinkFullAttentionManager.__init__
    if "needs_kv_cache_zeroing" in made.__code__.co_varnames:
        return

    def init(self: Any, *arguments: Any, needs_kv_cache_zeroing: bool = False, **named: Any) -> None:
        made(self, *arguments, **named)

    monkeypatch.setattr(SinkFullAttentionManager, "__init__", init)


@pytest.mark.parametrize("name", CACHES)
def test_every_byte_comes_back(name: str, server: ServerProcess, sinks: None) -> None:
    cache, tokens = CACHES[name](), prompt(TOKENS, seed=5)
    with engine(cache, server.endpoint) as first:
        stored = first.answer(1, tokens)
        first.settle()
    with engine(cache, server.endpoint) as second:
        loaded = second.answer(1, tokens)
        groups = second.core.scheduler.kv_cache_config.kv_cache_groups
    assert name.split(",")[0] in {type(spec).__name__ for spec in cache.layers.values()}
    assert stored.end == 0
    assert loaded.end >= LEAST
    assert not loaded.wrong
    for group, places in zip(groups, loaded.places, strict=True):
        assert bool(places) == group.kv_cache_spec.prefix_cacheable


def test_a_hit_ends_within_a_block(server: ServerProcess) -> None:
    """vLLM hands on the state at a prompt's last hash once the next token is computed."""
    cache, tokens = CACHES["MambaSpec"](), prompt(TOKENS, seed=6)
    cache.engine["prefix_match_unit"] = 16
    with engine(cache, server.endpoint) as first:
        first.answer(1, tokens, most=4)
        first.settle()
    with engine(cache, server.endpoint) as second:
        loaded = second.answer(1, tokens)
    assert (loaded.end, loaded.wrong) == (688, [])
    assert all(688 // 32 in places for places in loaded.places)


@pytest.mark.parametrize("name", ["SlidingWindowMLASpec", "ChunkedLocalAttentionSpec"])
def test_a_byte_that_is_wrong_is_seen(name: str, server: ServerProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    from kvf_vllm.offloading import worker

    cache, tokens, right = CACHES[name](), prompt(TOKENS, seed=5), worker.move
    with engine(cache, server.endpoint) as first:
        first.answer(1, tokens)
        first.settle()

    def move(runs: Any, arena: Any, *, storing: bool) -> None:
        right(runs, arena, storing=storing)
        if not storing:
            ctypes.c_ubyte.from_address(int(runs.engine[-1]) + 7).value ^= 1

    monkeypatch.setattr(worker, "move", move)
    with engine(cache, server.endpoint) as second:
        loaded = second.answer(1, tokens)
    assert len(loaded.wrong) == 1


def test_a_step_is_counted_whose_plan_fails(server: ServerProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    with engine(CACHES["FullAttentionSpec"](), server.endpoint) as one:
        names = one.connector._manager.names
        one.answer(1, [1, 2, 3])
        steps = names.step
        monkeypatch.setattr(one.connector.connector_scheduler, "build_connector_meta", None)
        one.answer(2, [4, 5, 6], most=1)
        assert names.step > steps


def test_vllm_plans_only_steps_that_may_have_a_job(server: ServerProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    with engine(CACHES["FullAttentionSpec"](), server.endpoint) as one:
        planned, connector = 0, one.connector
        plan, ends = connector.connector_scheduler.build_connector_meta, []
        prepare = connector._manager.prepare_store

        def counted(output: Any) -> Any:
            nonlocal planned
            planned += 1
            return plan(output)

        def prepared(keys: Any, context: Any) -> Any:
            ends.append(one.core.scheduler.requests["1-1"].num_tokens if one.core.scheduler.requests else None)
            return prepare(keys, context)

        monkeypatch.setattr(connector.connector_scheduler, "build_connector_meta", counted)
        monkeypatch.setattr(connector._manager, "prepare_store", prepared)
        one.answer(1, prompt(TOKENS - 300, seed=8), most=300)
    # The prompt, each chunk of 64 tokens in the step that completes it, and none at the end.
    assert ends == [400, *range(448, 700, 64)]
    # With the blocks of 16 tokens that the request gets, its begin and its end.
    assert planned < 300 / 16 * 2


def test_a_store_begins_behind_the_step_that_computes_it_however_early_its_places_are_known(
    server: ServerProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache, tokens, prepare = CACHES["FullAttentionSpec"](), prompt(TOKENS, seed=7), OpaqueInstance.prepare_store

    def answered(self: OpaqueInstance, *arguments: Any) -> Any:
        planning = prepare(self, *arguments)
        planning.result(10)
        return planning

    monkeypatch.setattr(OpaqueInstance, "prepare_store", answered)
    with engine(cache, server.endpoint) as first:
        first.answer(1, tokens)
        first.settle()
    with engine(cache, server.endpoint) as second:
        loaded = second.answer(1, tokens)
    assert (loaded.end >= LEAST, loaded.wrong) == (True, [])


@pytest.mark.parametrize("layout", ["LBHNC", "BLHNC"])
def test_engines_that_order_layers_otherwise_share_nothing(layout: str, server: ServerProcess) -> None:
    cache, tokens = Cache(full(4), layout), prompt(TOKENS, seed=5)
    turned = replace(cache, layers=dict(reversed(cache.layers.items())))
    with engine(cache, server.endpoint) as first:
        first.answer(1, tokens)
        first.settle()
    with engine(turned, server.endpoint) as second:
        other = second.answer(1, tokens)
    with engine(cache, server.endpoint) as third:
        same = third.answer(1, tokens)
    assert (other.end, other.wrong) == (0, [])
    assert same.end >= LEAST
    assert not same.wrong
