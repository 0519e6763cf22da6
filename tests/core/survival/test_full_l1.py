"""L1 is full: a STORE evicts what may go, or says what it dropped. What it said is stored is a hit, with its bytes.

Bursts of several clients, drawn at random, against one server that has room for a fraction of them.
"""

from __future__ import annotations

import random

import pytest

from kvframework.wire import messages as m
from tests.core.tiers.engine import Engine
from tests.core.tiers.prompts import CHUNK_TOKENS, Prompt, prompt
from tests.support.server_process import ServerProcess, server_fixture

# Objects of 32 KiB for one model and of 80 KiB for the other: 51 or 20 of them, and holes between them.
CAPACITY = "1664KiB"
HIDDEN = (8, 20)
PATIENCE_S = 20.0


server = server_fixture(capacity=CAPACITY, scope="module")


@pytest.fixture
def chance(seed: int) -> random.Random:
    return random.Random(seed)


class Holder(Engine):
    """Keeps the ticket of each load, and writes what no other model has."""

    def __init__(self, endpoint: str, instance_id: int, hidden: int) -> None:
        # Engines of one hidden size are one model, so that they share prompts.
        super().__init__(endpoint, instance_id=instance_id, hidden=hidden, answer_s=PATIENCE_S)
        self.tickets: list[m.LookupReply] = []

    def content(self, digest: bytes, nbytes: int) -> bytes:
        return super().content(self.namespace + digest, nbytes)

    def load(self, prompt: Prompt) -> int:
        """Looks up and loads the hit; the chunks."""
        reply = self.look_up(prompt)
        chunks = reply.hit_tokens // CHUNK_TOKENS
        if chunks:
            assert self.retrieve(prompt, chunks), "a ticket pins it"
            self.tickets.append(reply)
        return chunks

    def free_all_but(self, count: int) -> None:
        while len(self.tickets) > count:
            self.free(self.tickets.pop(0))


def prompts(chance: random.Random) -> list[Prompt]:
    """A tree of prompts: many share a beginning, some do not fit L1 at all."""
    made: list[list[int]] = [[]]
    for number in range(60):
        start = chance.choice(made)
        start = start[: chance.randint(0, len(start))] if chance.random() < 0.5 else []
        length = chance.choice([1, 2, 5, 12, 30, 70])
        made.append([*start, *(1000 + number * 100 + at for at in range(length))])
    return [prompt(segments) for segments in made[1:]]


def test_bursts_beyond_the_capacity(server: ServerProcess, chance: random.Random) -> None:
    with (
        Holder(server.endpoint, 1, HIDDEN[0]) as one,
        Holder(server.endpoint, 2, HIDDEN[0]) as two,
        Holder(server.endpoint, 3, HIDDEN[1]) as three,
    ):
        engines = (one, two, three)
        tree = prompts(chance)
        stored = dropped = 0
        for _ in range(400):
            engine, asked = chance.choice(engines), chance.choice(tree)
            outcome = engine.store(asked)
            assert outcome.stored + outcome.present + outcome.dropped == len(asked)
            assert outcome.in_flight == 0
            # Whatever was dropped lies behind whatever was stored.
            loaded = engine.load(asked)
            if outcome.dropped:  # what is present may lie behind it
                assert outcome.stored <= loaded <= outcome.stored + outcome.present
            else:
                assert loaded == len(asked)
            stored += outcome.stored
            dropped += outcome.dropped
            engine.free_all_but(chance.choice([0, 0, 1, 4]))
        l1 = one.client.status()["l1"]
        assert l1["counters"]["stored"] == stored
        assert l1["counters"]["dropped"] == dropped
        assert stored > 500 < l1["evictions"]
        assert dropped > 100
        for engine in engines:
            engine.free_all_but(0)
        after = one.client.status()["l1"]
        assert (after["pins"], after["write_leases"], after["pin_leases"]) == (0, 0, 0)
        assert after["used_bytes"] + after["free_bytes"] == after["capacity_bytes"]
