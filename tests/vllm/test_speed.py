"""What the scheduler's side says of the engine's speed: learned from the steps of vLLM, told with a LOOKUP."""

from __future__ import annotations

import pytest

from kvframework.pricing.prefill import prefill_s
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

    # So does what came earlier and has not begun, asked about or not, unless it waits for its load; what came later
    # does not.
    early, loading, asked, late = (
        FakeRequest(name, list(range(10_000 * number, 10_000 * number + 1024)))
        for number, name in enumerate(("early", "loading", "asked", "late"), 2)
    )
    for request in early, loading, asked, late:
        side.came(request)
    server.pending = 3
    assert side.matched_tokens(loading, 0) == (None, False)
    server.pending = 0
    assert side.matched_tokens(asked, 0) == (0, False)
    before = prefill_s(0, 2048, SPEED, ATTENTION) + prefill_s(0, 1024, SPEED, ATTENTION)
    assert server.speeds[-1] is not None
    assert server.speeds[-1].queued_s == pytest.approx(before, rel=0.05)
    assert side.matched_tokens(early, 0) == (0, False)
    side.allocated(early, [[0]], 0)
    side.finished(loading)
    side.finished(asked)
    assert side.matched_tokens(late, 0) == (0, False)
    assert server.speeds[-1] is not None
    assert server.speeds[-1].queued_s == pytest.approx(before, rel=0.05), "each is counted once"
    for request in early, late:
        side.finished(request)
    assert not side._waiting
