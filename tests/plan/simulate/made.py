"""A made trace: conversations that go on soon, old ones that come back late, and prompts that begin alike."""

from __future__ import annotations

import random

from kvf_plan.trace.form import Request
from tests.plan.planning.traces import MadeTrace

# Conversations that go on do so within as many requests; those that come back do so after at least as many.
SOON, LATE = 5, 40


def made_trace(number: int, chunk_tokens: int, seed: int = 1, every_s: float = 0.5) -> MadeTrace:
    """Make so many requests of about eight chunks, the last of which is not full."""
    chance = random.Random(seed)
    fresh = 0
    prompts: list[list[int]] = []
    requests = []
    for index in range(number):
        kind = chance.random()
        before: list[int] = []
        if kind < 0.4 and prompts:
            before = prompts[-chance.randint(1, min(SOON, len(prompts)))]
        elif kind < 0.7 and len(prompts) > LATE:
            before = prompts[chance.randrange(len(prompts) - LATE)]
        elif kind < 0.8 and prompts:
            before = prompts[-1][:2]
        before = before[:12]
        new = chance.randint(1, 8)
        prompt = [*before, *range(fresh, fresh + new)]
        fresh += new
        prompts.append(prompt)
        tokens = len(prompt) * chunk_tokens + chance.randrange(chunk_tokens)
        requests.append(Request(index * every_s, tokens, 0, prompt))
    return MadeTrace(requests, chunk_tokens)
