"""The facts about models and GPUs have sources, and the engines made of them the published numbers."""

from __future__ import annotations

import pytest

from kvf_plan.errors import PlanError
from kvf_plan.planning.catalogue import catalogue, engine, engine_of
from kvf_plan.simulation.requests import Spread, spread
from kvframework.pricing import EngineSpeed


def test_everything_has_a_source() -> None:
    known = catalogue()
    for each in (*known.models.values(), *known.gpus.values(), *known.speeds):
        assert each.source.startswith("https://")
    for speed in known.speeds:
        assert speed.note
        assert speed.model in known.models
        assert speed.gpu in known.gpus
    pairs = [(speed.model, speed.gpu) for speed in known.speeds]
    assert len(pairs) == len(set(pairs))


@pytest.mark.parametrize(
    ("model", "nbytes"),
    [
        ("llama-3-8b", 131072),
        ("llama-3-70b", 327680),
        ("qwen3-32b", 262144),
        ("deepseek-v3", 70272),
        ("gpt-oss-120b", 73728),
    ],
)
def test_the_kv_of_a_token(model: str, nbytes: int) -> None:
    assert catalogue().models[model].bytes_per_token == nbytes


def test_a_measured_speed_is_that_of_its_prompts() -> None:
    known = engine("llama-3-70b", "h100")
    assert (known.gpus, known.basis) == (2, "measured")
    assert EngineSpeed(known.tokens_per_s, known.attention_tokens).prefill_s(0, 5000) == pytest.approx(
        0.40677, rel=1e-3
    )


def test_more_gpus_than_published_are_assumed_to_be_as_fast_each() -> None:
    two, four = engine("llama-3-70b", "h100"), engine("llama-3-70b", "h100", 4)
    assert four.tokens_per_s == 2 * two.tokens_per_s
    assert four.basis == "assumed"
    assert "2 times the speed of 2 h100" in four.note


def test_a_pair_that_nobody_published_is_assumed() -> None:
    known = engine("llama-3-8b", "a100")
    assert (known.basis, known.gpus) == ("assumed", 1)
    assert known.tokens_per_s == pytest.approx(0.4 * 312e12 / (2 * 8.03e9))
    assert "40% of the peak" in known.note


def test_attention_is_counted_by_operations() -> None:
    # 2 x 8.03e9 operations a token of weights, 4 x 32 layers x 4096 of a token's attention to another.
    assert engine("llama-3-8b", "h100").attention_tokens == pytest.approx(2 * 8.03e9 / (4 * 32 * 4096))


def test_an_unknown_name_is_an_error_with_a_near_one() -> None:
    with pytest.raises(PlanError, match="did you mean 'llama-3-8b'") as error:
        engine("llama3-8b", "h100")
    assert "deepseek-v3" in error.value.available
    with pytest.raises(PlanError, match="--prefill"):
        engine("llama-3-8b", "tpu")


def test_your_numbers_go_before_the_catalogues() -> None:
    mine = engine_of("llama-3-8b", "h100", 0, 9000.0, 0.0, 1 << 16)
    assert (mine.tokens_per_s, mine.attention_tokens, mine.bytes_per_token) == (9000.0, 0.0, 65536)
    assert mine.basis == "yours"
    alone = engine_of("", "", 0, 9000.0, None, 1 << 16)
    assert (alone.tokens_per_s, alone.attention_tokens, alone.gpus) == (9000.0, 0.0, 1)
    for given in (
        ("", "", 0, 9000.0, None, None),
        ("llama-3-8b", "", 0, None, None, None),
        ("", "", 0, -1.0, None, 1024),
    ):
        with pytest.raises(PlanError):
            engine_of(*given)  # type: ignore[arg-type]


def test_a_spread_of_nothing_is_nothing() -> None:
    assert spread([]) == Spread(0.0, 0.0, 0.0, 0.0)
    assert spread(range(1, 101)) == Spread(50.5, 51, 90, 99)  # type: ignore[arg-type]
