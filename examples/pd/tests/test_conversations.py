"""Conversations through a prefiller and a decoder behind vLLM's router: NIXL moves each prompt, both engines store, and
the next turn finds what either of them has computed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from pair import CHUNK, Answer, Engine, Pair, answered, nixl_tokens, ours_tokens, pair

from kvf_vllm.registration import CONNECTORS
from tests.support.waiting import wait_until
from tests.vllm.model import prompt

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(2400)]

COUNT = 50
NEW = 8


@dataclass
class Conversation:
    prompt: list[int]
    answers: list[Answer] = field(default_factory=list)

    def next(self, number: int) -> list[int]:
        return [*self.prompt, *self.answers[0].tokens, *prompt(40, seed=5000 + number)]


def conversations() -> list[Conversation]:
    """Five share their first two chunks; some end just before a chunk does, so that the answer fills it."""
    return [
        Conversation(prompt(2 * CHUNK, seed=100 + number // 5) + prompt(120 + number % 16, seed=1000 + number))
        for number in range(COUNT)
    ]


@pytest.fixture(scope="module", params=CONNECTORS)
def both(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[Pair]:
    with pair(tmp_path_factory.mktemp("pd"), str(request.param)) as running:
        yield running


@pytest.mark.engine_feature("vLLM", "prefill and decode")
def test_fifty_conversations_have_the_tokens_of_one_engine(both: Pair, tmp_path: Path) -> None:
    cold = Engine(tmp_path, None, 0)
    talks = conversations()
    try:
        cold.start()
        cold.wait()
        wanted = [cold.ask(talk.prompt, max_tokens=NEW).tokens for talk in talks]
        with both.router() as front:
            for talk in talks:
                talk.answers.append(answered(front, talk.prompt, max_tokens=NEW))
            assert [talk.answers[0].tokens for talk in talks] == wanted
            # By NIXL, and no token a second time through the cache. The router's answer names the prefiller's hits.
            assert nixl_tokens(both.decode)
            # Half of the second turns find the blocks of both engines; the others find what the cache has.
            for number, talk in enumerate(talks):
                if number == COUNT // 2:
                    for engine in (both.prefill, both.decode):
                        engine.post("/reset_prefix_cache")
                talk.answers.append(answered(front, talk.next(number), max_tokens=NEW))
        assert ours_tokens(both.decode) == 0
        assert nixl_tokens(both.prefill) == 0
        wanted = [cold.ask(talk.next(number), max_tokens=NEW).tokens for number, talk in enumerate(talks)]
        assert [talk.answers[1].tokens for talk in talks] == wanted
        wait_until(lambda: nothing_held(both), 120, "the end of all leases")
    finally:
        cold.kill()


def test_the_decoder_loads_from_the_cache_what_no_prefiller_has_computed_for_it(both: Pair) -> None:
    """A request that comes without a prefiller, as when none is there."""
    tokens = prompt(3 * CHUNK + 1, seed=77)
    first = both.prefill.ask(tokens)
    before = nixl_tokens(both.decode)
    second = both.decode.ask(tokens)
    assert (second.tokens, second.hit) == (first.tokens, 3 * CHUNK)
    assert (ours_tokens(both.decode), nixl_tokens(both.decode) - before) == (3 * CHUNK, 0)


def nothing_held(both: Pair) -> bool:
    """No block is in use in either engine: the decoder's word has freed those of each prompt."""
    return all(engine.metrics().get("vllm:kv_cache_usage_perc", 1.0) == 0 for engine in (both.prefill, both.decode))
