"""vLLM of one and of two tensor-parallel workers, and transformers, behind one server with `tp_lcm`: what any of them
has computed the others continue."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.vllm import rows
from tests.vllm.rows import Answer, Bench
from tests.vllm.test_sharing import CHUNKS, PROMPT, bench, transformers_answers  # noqa: F401 - a fixture

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1800)]

SHARDS = 4


def answers(one: Bench, server: Any, size: int, **fields: Any) -> Answer:
    """Of a new engine of `size` workers. What another size computes may differ in its last bits: few tokens, which do
    not."""
    split = replace(one, engine={"tensor_parallel_size": size}, cores="|".join(map(str, range(size))), **fields)
    return split.run(server, split.ask())[0]


@pytest.mark.parametrize(("stored", "loaded"), [(2, 1), (1, 2)])
def test_an_engine_of_another_size_continues_what_one_has_computed(bench: Bench, stored: int, loaded: int) -> None:  # noqa: F811
    with rows.server_for(f"server.tp_lcm={SHARDS}") as server:
        first = answers(bench, server, stored)
        assert first.computed == PROMPT
        with server.client() as client:
            assert client.status()["l1"]["objects"] == SHARDS * CHUNKS // rows.CHUNK
        found = answers(bench, server, loaded)
        assert (found.computed, found.tokens) == (PROMPT - CHUNKS, first.tokens)
        there = transformers_answers(bench, server.endpoint)
        assert (there.hit, there.tokens) == (CHUNKS, first.tokens)
        # If it were not the KV that decides, this would be no proof.
        assert transformers_answers(bench, server.endpoint, spoil=True).tokens != first.tokens
        # A third engine, of the size that stored, reads its own.
        assert answers(bench, server, stored).computed == PROMPT - CHUNKS


def test_without_the_setting_sizes_share_nothing(bench: Bench) -> None:  # noqa: F811
    with rows.server_for() as server:
        assert answers(bench, server, 1).computed == PROMPT
        assert answers(bench, server, 2).computed == PROMPT
