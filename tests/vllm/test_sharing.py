"""vLLM and transformers behind one server: what one has computed the other continues, and what differs never mixes."""

from __future__ import annotations

import os
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.vllm import hf_engine, rows
from tests.vllm.model import make, prompt
from tests.vllm.rows import Answer, Bench

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]

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
    cache = Path(os.environ.get("KVF_VLLM_MODELS", Path(tempfile.gettempdir()) / "kvf-vllm-models"))
    directory = tmp_path_factory.mktemp("sharing")
    return Bench(make(cache / "tiny", "tiny"), directory, prompt(PROMPT, seed=7), 16, CANONICAL)


@pytest.fixture(scope="module")
def cold(bench: Bench) -> Answer:
    """vLLM alone."""
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


@pytest.mark.timeout(1800)
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
    window = Bench(make(bench.model.parent / "window", "window"), tmp_path, prompt(PROMPT, seed=3), 16, CANONICAL)
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
