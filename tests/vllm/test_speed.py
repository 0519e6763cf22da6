"""What the scheduler's side says of the engine's speed: learned from the steps of vLLM, told with a LOOKUP."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvf_vllm.search import Waiting
from kvframework.pricing import EngineSpeed, prefill_s
from tests.vllm.stand_ins import Clock, FakeRequest, FakeServer, computed, scheduler

SPEED, ATTENTION, STEP = 10_000.0, 4096.0, 64


def test_an_engine_says_how_fast_it_is_once_it_knows() -> None:
    server, clock = FakeServer(), Clock()
    side = scheduler(server, clock=clock)
    for number in range(6):
        request = FakeRequest(f"r{number}", list(range(number * 4096, number * 4096 + 16 * STEP)))
        assert side.matched_tokens(request, 0) == (0, False)
        side.allocated(request, [[0]], 0)
        while request.num_computed_tokens < request.num_tokens:
            clock.now += 0.001
            began, first = clock.now, request.num_computed_tokens
            computed(side, request, STEP)
            clock.now = began + prefill_s(first, first + STEP, SPEED, ATTENTION)
            side.step_ended()
        side.finished(request)
        clock.now += 1.0
    assert server.speeds[0] is None
    speed = server.speeds[-1]
    assert speed is not None
    assert speed.tokens_per_s == pytest.approx(SPEED, rel=0.02)
    assert speed.attention_tokens == pytest.approx(ATTENTION, rel=0.1)
    assert speed.queued_s == 0.0

    # What the prompts before it have still to compute comes before the next one.
    waiting = FakeRequest("w", list(range(2048)))
    side.matched_tokens(waiting, 0)
    side.allocated(waiting, [[0]], 0)
    side.matched_tokens(FakeRequest("next", list(range(9000, 9128))), 0)
    speed = server.speeds[-1]
    assert speed is not None
    assert speed.queued_s == pytest.approx(prefill_s(0, 2048, SPEED, ATTENTION), rel=0.05)

    # So does what has come and was not asked for yet, until it is, or has ended.
    others = [FakeRequest(f"o{number}", list(range(10_000 * number, 10_000 * number + 1024))) for number in range(3)]
    for other in others:
        side.came(other)
    side.matched_tokens(FakeRequest("another", list(range(9000, 9128))), 0)
    speed = server.speeds[-1]
    assert speed is not None
    waiting_s = prefill_s(0, 2048, SPEED, ATTENTION) + 3 * prefill_s(0, 1024, SPEED, ATTENTION)
    assert speed.queued_s == pytest.approx(waiting_s, rel=0.05)
    side.finished(others[0])
    side.matched_tokens(others[1], 0)
    side.came(others[1])
    speed = server.speeds[-1]
    assert speed is not None
    waiting_s -= 2 * prefill_s(0, 1024, SPEED, ATTENTION)
    assert speed.queued_s == pytest.approx(waiting_s, rel=0.05)


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 9)), max_size=20), st.sampled_from([0.0, 5.0]))
def test_what_waits_is_the_sum_of_what_came_and_has_not_gone(events: list[tuple[str, int]], attention: float) -> None:
    waiting, model = Waiting(), dict[str, int]()
    for name, tokens in events:
        if tokens:
            waiting.came(name, tokens)
            model[name] = tokens
        else:
            waiting.gone(name)
            model.pop(name, None)
    speed = waiting.behind(EngineSpeed(2.0, attention, 1.0))
    assert len(waiting) == len(model)
    assert speed.queued_s == pytest.approx(1.0 + sum(prefill_s(0, each, 2.0, attention) for each in model.values()))
