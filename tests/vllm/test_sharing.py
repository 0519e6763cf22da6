"""vLLM and transformers behind one server: what one has computed the other continues, and what differs never mixes."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.vllm import hf_engine, rows
from tests.vllm.model import cached, prompt
from tests.vllm.rows import Answer, Bench

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1800)]

CHUNKS = 8 * rows.CHUNK
# Both engines leave what is no whole chunk to be computed.
PROMPT = CHUNKS + 52
NAMES = {"model_name": "tiny-llama", "weights": "seed-1234"}
CANONICAL = {
    "kvframework.layout": "canonical",
    "kvframework.model": NAMES["model_name"],
    "kvframework.weights": NAMES["weights"],
}


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    directory = tmp_path_factory.mktemp("sharing")
    return Bench(cached("tiny"), directory, prompt(PROMPT, seed=7), 16, CANONICAL)


@pytest.fixture(scope="module")
def cold(bench: Bench) -> Answer:
    return rows.cold(bench)


def transformers_answers(bench: Bench, endpoint: str, **changes: Any) -> hf_engine.Answer:
    options = {"endpoint": endpoint, **NAMES, **changes.pop("options", {})}
    options = {name: value for name, value in options.items() if value}
    return hf_engine.run(hf_engine.Order(str(bench.model), bench.prompt, bench.new_tokens, options, **changes))


def vllm_answers(bench: Bench, server: Any, **options: str) -> Answer:
    given = {f"kvframework.{name}": value for name, value in options.items()}
    return replace(bench, options={**bench.options, **given}).run(server, bench.ask())[0]


@pytest.mark.engine_feature("vLLM", "other engines")
def test_transformers_continues_what_vllm_has_computed(bench: Bench, cold: Answer) -> None:
    with rows.server_for() as server:
        stored = vllm_answers(bench, server)
        assert (stored.tokens, stored.computed) == (cold.tokens, PROMPT)
        found = transformers_answers(bench, server.endpoint)
        assert (found.tokens, found.hit) == (cold.tokens, CHUNKS)
        # If it were not the KV that decides, this would be no proof.
        assert transformers_answers(bench, server.endpoint, spoil=True).tokens != cold.tokens
        assert transformers_answers(bench, server.endpoint, options={"weights": "seed-1235"}).hit == 0
        assert transformers_answers(bench, server.endpoint, options={"weights": None}).hit == 0
        assert transformers_answers(bench, server.endpoint, dtype="bfloat16").hit == 0


@pytest.mark.engine_feature("vLLM", "other engines")
def test_vllm_continues_what_transformers_has_computed(bench: Bench, cold: Answer) -> None:
    with rows.server_for() as server:
        stored = transformers_answers(bench, server.endpoint)
        assert (stored.tokens, stored.hit, stored.saved) == (cold.tokens, 0, CHUNKS)
        found = vllm_answers(bench, server)
        assert (found.tokens, found.cached, found.computed) == (cold.tokens, CHUNKS, PROMPT - CHUNKS)
        assert found.counters["kvframework:loaded_tokens"] == CHUNKS
        assert vllm_answers(bench, server, weights="").computed == PROMPT


@pytest.mark.skipif("KVF_VLLM_OTHER" not in os.environ, reason="names no interpreter with another release of vLLM")
def test_engines_of_two_releases_share_blocks_of_attention(bench: Bench) -> None:
    """Whether they share depends on the release of transformers, too: it describes the model."""
    here = replace(bench, options={"kvframework.model": "m", "kvframework.weights": "w"})
    there = replace(here, python=os.environ["KVF_VLLM_OTHER"])
    cold = rows.cold(here)
    with rows.server_for() as server:
        assert there.run(server, there.ask())[0].tokens == cold.tokens
        found, wrong = here.run(server, here.ask(), here.ask(reset=True), connector="WrongKvFromTheSecondLoadOn")
        assert (found.tokens, found.cached) == (cold.tokens, CHUNKS)
        assert wrong.tokens != cold.tokens


def test_a_model_with_sliding_windows_is_canonical_for_vllm_too(bench: Bench, tmp_path: Path) -> None:
    window = Bench(cached("window"), tmp_path, prompt(PROMPT, seed=3), 16, CANONICAL)
    stored, loaded = rows.store_and_load(window)
    assert stored.tokens == loaded.tokens
    assert (stored.computed, loaded.computed) == (PROMPT, PROMPT - CHUNKS)


def test_an_order_of_elements_that_is_not_known_stops_the_engines_start(bench: Bench) -> None:
    """fp8 keys and values depend on scales that no other engine has."""
    quantised = replace(bench, engine={"kv_cache_dtype": "fp8"})
    with rows.server_for() as server, pytest.raises(AssertionError) as refused:
        quantised.run(server, quantised.ask())
    log = str(refused.value)
    if "FP8 KV cache" in log and "AVX-512" in log:
        pytest.skip("vLLM itself has no fp8 on this machine")
    assert 'kvframework.layout is "canonical", but it is CPU_ATTN/' in log
    assert 'leave kvframework.layout at "opaque"' in log


SHARDS = 4


def of_size(one: Bench, server: Any, size: int, **fields: Any) -> Answer:
    """Of a new engine of `size` workers. What another size computes may differ in its last bits: few tokens, which do
    not."""
    split = replace(one, engine={"tensor_parallel_size": size}, cores="|".join(map(str, range(size))), **fields)
    return split.run(server, split.ask())[0]


@pytest.mark.parametrize(("stored", "loaded"), [(2, 1), (1, 2)])
def test_an_engine_of_another_size_continues_what_one_has_computed(bench: Bench, stored: int, loaded: int) -> None:
    with rows.server_for(f"server.tp_lcm={SHARDS}") as server:
        first = of_size(bench, server, stored)
        assert first.computed == PROMPT
        with server.client() as client:
            assert client.status()["l1"]["objects"] == SHARDS * CHUNKS // rows.CHUNK
        found = of_size(bench, server, loaded)
        assert (found.computed, found.tokens) == (PROMPT - CHUNKS, first.tokens)
        there = transformers_answers(bench, server.endpoint)
        assert (there.hit, there.tokens) == (CHUNKS, first.tokens)
        # If it were not the KV that decides, this would be no proof.
        assert transformers_answers(bench, server.endpoint, spoil=True).tokens != first.tokens
        # A third engine, of the size that stored, reads its own.
        assert of_size(bench, server, stored).computed == PROMPT - CHUNKS


def test_without_the_setting_sizes_share_nothing(bench: Bench) -> None:
    with rows.server_for() as server:
        assert of_size(bench, server, 1).computed == PROMPT
        assert of_size(bench, server, 2).computed == PROMPT
