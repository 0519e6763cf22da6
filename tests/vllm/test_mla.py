"""Models whose prefill reads no earlier KV, as latent attention (MLA) on a CPU: vLLM switches its prefix caching off,
and the connector promises nothing. Where the user alone has switched it off, hits are right and stay.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvf_vllm.facts import why_unread
from tests.support.lazy import torch
from tests.vllm import rows
from tests.vllm.model import cached, prompt
from tests.vllm.rows import Bench

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900), pytest.mark.filterwarnings("ignore")]

TOKENS = 1281
OPTIONS = {**rows.PATIENT, "kvframework.connect_timeout_s": 60.0}
WARNING = "nothing is loaded or stored: this engine has neither prefix caching nor chunked prefill"


def bench_of(size: str, directory: Path, **engine: Any) -> Bench:
    return Bench(cached(size), directory, prompt(TOKENS, seed=3), 12, OPTIONS, engine)


def asks_of(bench: Bench) -> list[rows.Ask]:
    """All of the prompt, and others that share one chunk, three and five with it."""
    others = [bench.prompt[:shared] + prompt(TOKENS - shared, seed=shared) for shared in (256, 768, 1280)]
    return [bench.ask(), *(rows.Ask(each, tokens=bench.new_tokens) for each in others)]


def test_mla_on_a_cpu_computes_every_prompt_and_says_why(tmp_path: Path) -> None:
    bench = bench_of("mla", tmp_path)
    cold = bench.run(None, *asks_of(bench))
    with rows.server_for() as server:
        (stored,) = bench.run(server, bench.ask())
        answers = bench.run(server, *asks_of(bench))
        assert server.status()["l1"]["objects"] == 0
    assert [each.tokens for each in answers] == [each.tokens for each in cold]
    assert [(each.cached, each.computed) for each in answers] == [(0, TOKENS)] * len(answers)
    assert answers[0].counters["kvframework:miss_requests|reason=no_prefix_caching"] == 1
    assert stored.log.count(WARNING) == answers[0].log.count(WARNING) == 1


def test_without_prefix_caching_of_the_users_own_choice_hits_are_right(tmp_path: Path) -> None:
    """With hits from one chunk on, in steps of less than the prompt."""
    bench = bench_of("tiny", tmp_path, enable_prefix_caching=False, max_num_batched_tokens=512)
    cold = bench.run(None, *asks_of(bench))
    with rows.server_for() as server:
        bench.run(server, bench.ask())
        answers = bench.run(server, *asks_of(bench))
    assert [each.tokens for each in answers] == [each.tokens for each in cold]
    assert [each.computed for each in answers] == [1, TOKENS - 256, TOKENS - 768, 1]
    assert "vLLM loads and stores no KV" not in answers[0].log


@pytest.fixture
def environment() -> Iterator[None]:
    """vLLM's configuration sets variables for its processes."""
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)


# What the user gives, whether the processor has AMX, and the beginning of the reason.
DECISIONS: list[tuple[str, dict[str, Any], bool, str]] = [
    ("mla", {}, False, "this engine has neither"),
    ("mla", {"enable_prefix_caching": True, "enable_chunked_prefill": True}, False, "this engine has neither"),
    ("mla", {}, True, ""),
    ("mla", {"enable_prefix_caching": False}, True, ""),
    ("mla", {"attention_backend": "CPU_MLA"}, True, "this engine has neither"),
    ("tiny", {}, False, ""),
    ("tiny", {"enable_prefix_caching": False}, False, ""),
    ("tiny", {"enable_chunked_prefill": False}, False, ""),
    # Nothing tells this choice of the user's from vLLM's.
    ("tiny", {"enable_prefix_caching": False, "enable_chunked_prefill": False}, False, "this engine has neither"),
    ("tiny", {"runner": "pooling", "convert": "embed", "pooler_config": "MEAN"}, False, "this engine has neither"),
]


@pytest.mark.usefixtures("environment")
@pytest.mark.parametrize(("size", "given", "amx", "reason"), DECISIONS)
def test_what_vllm_decides_is_followed(
    monkeypatch: pytest.MonkeyPatch, size: str, given: dict[str, Any], amx: bool, reason: str
) -> None:
    """vLLM's own configuration: with AMX its latent attention reads earlier KV, also in a prefill."""
    from vllm.config import PoolerConfig
    from vllm.engine.arg_utils import EngineArgs

    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: amx)
    if "pooler_config" in given:
        given = {**given, "pooler_config": PoolerConfig(seq_pooling_type=given["pooler_config"])}
    config = EngineArgs(
        model=str(cached(size)), max_model_len=4096, max_num_batched_tokens=4096, skip_tokenizer_init=True, **given
    ).create_engine_config()
    assert why_unread(config).startswith(reason)
    assert bool(why_unread(config)) == bool(reason)


@pytest.mark.usefixtures("environment")
def test_a_batch_invariant_engine_without_prefix_caching_loads_nothing() -> None:
    """Some of vLLM's attention backends switch it off for that."""
    from vllm.engine.arg_utils import EngineArgs

    config = EngineArgs(model=str(cached("tiny")), enable_prefix_caching=False, skip_tokenizer_init=True)
    assert "batch-invariant" in why_unread(config.create_engine_config(), invariant=True)
