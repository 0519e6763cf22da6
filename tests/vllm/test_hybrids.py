"""Models with recurrent layers in vLLM itself: KV and states are loaded together, and the states make the difference.

The prompt ends one token after the hit: a wrong state is forgotten within a hundred tokens, and greedy tokens would be
right without it.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest

from tests.vllm import rows
from tests.vllm.hybrid_models import FAMILIES, make
from tests.vllm.model import make_adapter, prompt
from tests.vllm.rows import Answer, Bench

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1800)]

NEW_TOKENS = 12


def bench_of(family: str, directory: Path, **engine: object) -> Bench:
    """Its prompt is whole chunks and one token."""
    cache = Path(os.environ.get("KVF_VLLM_MODELS", Path(tempfile.gettempdir()) / "kvf-vllm-models"))
    told = FAMILIES[family]
    return Bench(
        make(cache / family, family),
        directory,
        prompt(told.chunks * told.chunk + 1, seed=7),
        NEW_TOKENS,
        {**rows.PATIENT, "kvframework.connect_timeout_s": 60.0},
        {**told.engine, **engine},
    )


def equal(one: Answer, other: Answer) -> int:
    return sum(mine == theirs for mine, theirs in zip(one.tokens, other.tokens, strict=True))


@pytest.fixture(autouse=True)
def _no_images(monkeypatch: pytest.MonkeyPatch) -> None:
    """For Qwen3.5, see there."""
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent / "no_images"))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.engine_feature("vLLM", "hybrid models")
def test_kv_and_states_are_loaded_together(family: str, tmp_path: Path) -> None:
    bench = bench_of(family, tmp_path)
    hit = len(bench.prompt) - 1
    cold = rows.cold(bench)
    with rows.server_for() as server:
        (stored,) = bench.run(server, bench.ask())
        loaded, without = bench.run(server, bench.ask(), bench.ask(reset=True), connector="WithoutStatesTheSecondTime")
    assert (stored.tokens, stored.cached) == (cold.tokens, 0)
    assert stored.counters["kvframework:stored_tokens"] == hit
    assert (equal(loaded, cold), loaded.cached, loaded.computed) == (NEW_TOKENS, hit, 1)
    assert (without.cached, without.computed) == (hit, 1)
    assert equal(without, cold) <= FAMILIES[family].alike_without


def test_states_outlive_the_server(tmp_path: Path) -> None:
    bench = bench_of("qwen3-next", tmp_path)
    answer = rows.load_from_disk(bench)
    assert (answer.tokens, answer.computed) == (rows.cold(bench).tokens, 1)


def test_a_server_that_is_killed_costs_recompute(tmp_path: Path) -> None:
    bench = bench_of("lfm2", tmp_path)
    answer = rows.server_dies(bench, "ServerDiesBeforeLoad")
    assert (answer.tokens, answer.computed) == (rows.cold(bench).tokens, len(bench.prompt))


@pytest.mark.engine_feature("vLLM", "hybrid models")
def test_each_rank_has_states_of_its_own(tmp_path: Path) -> None:
    bench = bench_of("qwen3-next", tmp_path, tensor_parallel_size=2)
    bench.cores = "0|1"
    cold = rows.cold(bench)
    stored, loaded = rows.store_and_load(bench)
    assert stored.tokens == loaded.tokens == cold.tokens
    assert (stored.computed, loaded.computed) == (len(bench.prompt), 1)


def test_states_of_another_size_are_not_found(tmp_path: Path) -> None:
    """The states' dtype decides their size, and that of the attention's blocks beside them."""
    bench = bench_of("granite-4", tmp_path)
    other = bench_of("granite-4", tmp_path, mamba_ssm_cache_dtype="float16")
    with rows.server_for() as server:
        bench.run(server, bench.ask())
        (answer,) = other.run(server, other.ask())
    assert (answer.cached, answer.computed) == (0, len(bench.prompt))
    assert answer.tokens == rows.cold(other).tokens


@pytest.mark.engine_feature("vLLM", "hybrid models")
@pytest.mark.engine_feature("vLLM", "LoRA")
def test_adapters_have_states_of_their_own(tmp_path: Path) -> None:
    """The first request with an adapter computes: a hybrid's loads are made before vLLM has loaded the adapter."""
    bench = bench_of("lfm2", tmp_path, enable_lora=True, max_loras=2, max_lora_rank=8)
    hit = len(bench.prompt) - 1
    style = [["style", 1, str(make_adapter(tmp_path / "style", bench.model, seed=1))]]
    cold, base = bench.run(None, bench.ask(adapters=style), bench.ask())
    assert cold.tokens != base.tokens
    with rows.server_for() as server:
        (stored,) = bench.run(server, bench.ask(adapters=style))
        assert (stored.tokens, stored.cached) == (cold.tokens, 0)
        assert stored.counters["kvframework:miss_requests|reason=lora_not_loaded"] == 1
        assert stored.counters["kvframework:stored_tokens"] == hit
        asks = [
            bench.ask(100, adapters=style),
            bench.ask(adapters=style),
            bench.ask(adapters=style, reset=True),
            bench.ask(reset=True),
        ]
        _, loaded, without, plain = bench.run(server, *asks, connector="WithoutStatesTheSecondTime")
    assert (loaded.tokens, loaded.cached, loaded.computed) == (cold.tokens, hit, 1)
    assert (without.cached, without.computed) == (hit, 1)
    assert without.tokens != cold.tokens
    assert (plain.tokens, plain.cached) == (base.tokens, 0)


def test_a_conversation_goes_on_in_another_engine_as_in_vllms_own_cache(tmp_path: Path) -> None:
    """Its answer passes a chunk's end, where vLLM may keep a state or not."""
    bench = bench_of("lfm2", tmp_path)
    chunk = FAMILIES["lfm2"].chunk
    first = Bench(**{**vars(bench), "prompt": bench.prompt[: 2 * chunk - NEW_TOKENS // 2]})
    with rows.server_for() as server:
        (answer,) = first.run(server, first.ask())
        turn = Bench(**{**vars(bench), "prompt": [*first.prompt, *answer.tokens][: 2 * chunk + 1]})
        (loaded,) = turn.run(server, turn.ask())
    _, own = turn.run(None, first.ask(), turn.ask())
    assert loaded.cached == own.cached >= chunk
    assert loaded.tokens == own.tokens
