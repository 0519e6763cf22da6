"""Conversations through a prefiller and a decoder behind vLLM's router: NIXL moves each prompt, both engines store, and
the next turn finds what either of them has computed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest
from pair import CHUNK, Answer, Counts, Engine, Pair, answered, counted, pair

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


@pytest.fixture(scope="module")
def cold(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """An engine without connectors; it starts while the pair does."""
    engine = Engine(tmp_path_factory.mktemp("cold"), None, 0)
    try:
        engine.start()
        yield engine
    finally:
        engine.kill()


@pytest.fixture(scope="module", params=CONNECTORS)
def both(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[Pair]:
    with pair(tmp_path_factory.mktemp("pd"), str(request.param)) as running:
        yield running


class Expected:
    """What both engines find of each prompt: blocks of their own, what any of them has stored, and what NIXL brings."""

    def __init__(self) -> None:
        self._stored: set[tuple[int, ...]] = set()
        self._own: list[set[tuple[int, ...]]] = [set(), set()]
        self.counts = [Counts(0, 0, 0, 0), Counts(0, 0, 0, 0)]

    def reset(self) -> None:
        self._own = [set(), set()]

    def turn(self, tokens: list[int], answer: list[int]) -> None:
        """The prefiller computes one token, the decoder all; the last one of an answer has no KV."""
        for index, known in enumerate((tokens, [*tokens, *answer[:-1]])):
            local = _found(tokens, self._own[index])
            stored = max(_found(tokens, self._stored) - local, 0)
            missing = len(tokens) - local
            new = (
                Counts(local, stored, stored, 0)
                if index == 0
                else Counts(local, missing, 0, -(-missing // CHUNK) * CHUNK)
            )
            self.counts[index] = Counts(*map(sum, zip(self.counts[index], new, strict=True)))
            blocks = {tuple(known[:end]) for end in range(CHUNK, len(known) + 1, CHUNK)}
            self._own[index] |= blocks
            self._stored |= blocks


def _found(tokens: list[int], held: set[tuple[int, ...]]) -> int:
    """The last token is always computed."""
    end = 0
    while end + CHUNK < len(tokens) and tuple(tokens[: end + CHUNK]) in held:
        end += CHUNK
    return end


@pytest.mark.engine_feature("vLLM", "prefill and decode")
def test_fifty_conversations_have_the_tokens_of_one_engine(cold: Engine, both: Pair) -> None:
    cold.wait()
    engines = (both.prefill, both.decode)
    talks, expected = conversations(), Expected()
    wanted = [cold.ask(talk.prompt, max_tokens=NEW).tokens for talk in talks]
    with both.router() as front:
        began = [counted(engine) for engine in engines]

        def since() -> list[Counts]:
            return [counted(engine).since(before) for engine, before in zip(engines, began, strict=True)]

        for talk in talks:
            talk.answers.append(answered(front, talk.prompt, max_tokens=NEW))
            expected.turn(talk.prompt, talk.answers[0].tokens)
        assert [talk.answers[0].tokens for talk in talks] == wanted
        # By NIXL, and no token a second time through the cache.
        assert since() == expected.counts
        # Half of the second turns find the blocks of both engines; the others find what the cache has.
        for number, talk in enumerate(talks):
            if number == COUNT // 2:
                assert since() == expected.counts
                wait_until(lambda: nothing_held(both), 120, "the end of all leases")
                for engine in engines:
                    engine.post("/reset_prefix_cache")
                expected.reset()
            talk.answers.append(answered(front, talk.next(number), max_tokens=NEW))
            expected.turn(talk.next(number), talk.answers[1].tokens)
        assert since() == expected.counts
    # The prefiller has loaded tokens that the decoder has computed, and after the reset the shared chunks, too.
    assert since()[0].ours > COUNT // 5 * CHUNK
    wanted = [cold.ask(talk.next(number), max_tokens=NEW).tokens for number, talk in enumerate(talks)]
    assert [talk.answers[1].tokens for talk in talks] == wanted
    wait_until(lambda: nothing_held(both), 120, "the end of all leases")


def test_the_decoder_loads_from_the_cache_what_no_prefiller_has_computed_for_it(both: Pair) -> None:
    """A request that comes without a prefiller, as when none is there."""
    tokens = prompt(3 * CHUNK + 1, seed=77)
    first = both.prefill.ask(tokens)
    before = counted(both.decode)
    second = both.decode.ask(tokens)
    assert (second.tokens, second.hit) == (first.tokens, 3 * CHUNK)
    assert counted(both.decode).since(before) == Counts(0, 3 * CHUNK, 3 * CHUNK, 0)


def nothing_held(both: Pair) -> bool:
    """No block is in use in either engine: the decoder's word has freed those of each prompt."""
    return all(engine.metrics().get("vllm:kv_cache_usage_perc", 1.0) == 0 for engine in (both.prefill, both.decode))
