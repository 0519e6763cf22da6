"""L1 is full: a STORE evicts what may go, or says what it dropped. What it said is stored is a hit, with its bytes.

Bursts of several clients, drawn at random, against one server that has room for a fraction of them.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest

from kvframework.api.transport import StoreOutcome
from kvframework.wire import messages as m
from tests.support.server_process import ServerProcess
from tests.support.wire_client import WireClient, key_for

CHUNK = 256
# Objects of 32 KiB for one model and of 80 KiB for the other: 51 or 20 of them, and holes between them.
CAPACITY = "1664KiB"
HIDDEN = (8, 20)
PATIENCE_S = 20.0


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    with ServerProcess(capacity=CAPACITY) as process:
        yield process


@pytest.fixture
def chance(seed: int) -> random.Random:
    return random.Random(seed)


@dataclass
class Engine:
    """Stores prompts, and knows what each of their chunks must hold."""

    client: WireClient
    instance_id: int
    hidden: int
    tickets: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        # Engines of one hidden size are one model, so that they share prompts.
        self.registered = self.client.register(self.instance_id, hidden_dim_size=self.hidden)

    def key(self, prompt: list[int], chunks: int | None = None) -> m.CacheKey:
        tokens = [token for token in prompt[:chunks] for _ in range(CHUNK)]
        return key_for(self.registered, tokens)

    def fill(self, prompt: list[int], chunk: int) -> bytes:
        return b"%02d" % self.hidden + b"".join(b"%04d" % token for token in prompt[: chunk + 1])[-30:].rjust(30)

    def store(self, prompt: list[int]) -> StoreOutcome:
        return self.finish(prompt, self.client.prepare_store(self.key(prompt), self.instance_id))

    def finish(self, prompt: list[int], plan: m.StorePlan) -> StoreOutcome:
        """Writes and commits what was prepared; what became of all chunks."""
        found = plan.outcome
        if not plan.lease:
            return found
        for place in plan.ranges:
            only = m.StorePlan(plan.lease, (place,), found)
            self.client.write(only, self.fill(prompt, place.chunk))
        committed: StoreOutcome = self.client.call("COMMIT_STORE", m.LeaseRef(plan.lease)).outcome
        return StoreOutcome(committed.stored, found.present, found.in_flight, found.dropped + committed.dropped)

    def load(self, prompt: list[int]) -> int:
        """Looks up and loads the hit; the chunks. Every byte is checked."""
        reply = self.client.lookup(self.key(prompt))
        chunks = int(reply.hit_tokens) // CHUNK
        if chunks:
            found = self.client.retrieve(self.key(prompt, chunks), self.instance_id)
            assert found is not None, "a ticket pins it"
            length = len(found) // chunks
            for chunk in range(chunks):
                fill = self.fill(prompt, chunk)
                assert found[chunk * length : (chunk + 1) * length] == fill * (length // len(fill))
            self.tickets.append(reply.ticket)
        return chunks

    def free_all_but(self, count: int) -> None:
        while len(self.tickets) > count:
            self.client.call("FREE_LOOKUP_LOCKS", m.TicketRef(self.tickets.pop(0)))


def prompts(chance: random.Random) -> list[list[int]]:
    """A tree of prompts: many share a beginning, some do not fit L1 at all."""
    made: list[list[int]] = [[]]
    for number in range(60):
        start = chance.choice(made)
        start = start[: chance.randint(0, len(start))] if chance.random() < 0.5 else []
        length = chance.choice([1, 2, 5, 12, 30, 70])
        made.append([*start, *(1000 + number * 100 + at for at in range(length))])
    return made[1:]


def test_bursts_beyond_the_capacity(server: ServerProcess, chance: random.Random) -> None:
    with (
        server.client(timeout=PATIENCE_S) as one,
        server.client(timeout=PATIENCE_S) as two,
        server.client(timeout=PATIENCE_S) as three,
    ):
        engines = [Engine(one, 1, HIDDEN[0]), Engine(two, 2, HIDDEN[0]), Engine(three, 3, HIDDEN[1])]
        tree = prompts(chance)
        stored = dropped = 0
        for _ in range(400):
            engine, prompt = chance.choice(engines), chance.choice(tree)
            outcome = engine.store(prompt)
            assert outcome.stored + outcome.present + outcome.dropped == len(prompt)
            assert outcome.in_flight == 0
            # Whatever was dropped lies behind whatever was stored.
            loaded = engine.load(prompt)
            if outcome.dropped:  # what is present may lie behind it
                assert outcome.stored <= loaded <= outcome.stored + outcome.present
            else:
                assert loaded == len(prompt)
            stored += outcome.stored
            dropped += outcome.dropped
            engine.free_all_but(chance.choice([0, 0, 1, 4]))
        l1 = one.status()["l1"]
        assert l1["counters"]["stored"] == stored
        assert l1["counters"]["dropped"] == dropped
        assert stored > 500 < l1["evictions"]
        assert dropped > 100
        for engine in engines:
            engine.free_all_but(0)
        after = one.status()["l1"]
        assert (after["pins"], after["write_leases"], after["pin_leases"]) == (0, 0, 0)
        assert after["used_bytes"] + after["free_bytes"] == after["capacity_bytes"]


def test_a_store_under_way_keeps_the_beginning_that_it_found(server: ServerProcess) -> None:
    """Another's burst between PREPARE and COMMIT may not take away what makes the store a hit."""
    with server.client(timeout=PATIENCE_S) as one, server.client(timeout=PATIENCE_S) as two:
        engine, other = Engine(one, 1, HIDDEN[0]), Engine(two, 2, HIDDEN[0])
        one.call("CLEAR", m.Clear())
        prompt = list(range(10))
        assert engine.store(prompt[:6]).stored == 6
        plan = one.prepare_store(engine.key(prompt), 1)
        assert (plan.outcome.present, len(plan.ranges)) == (6, 4)
        for number in range(60):
            assert other.store([5000 + number]).stored == 1
        assert engine.finish(prompt, plan) == StoreOutcome(stored=4, present=6)
        assert engine.load(prompt) == 10
        engine.free_all_but(0)


def test_what_is_pinned_is_in_nobodys_way_for_longer_than_that(server: ServerProcess) -> None:
    """All of L1 under tickets: a STORE says that it dropped everything, and stores it once they are freed."""
    with server.client(timeout=PATIENCE_S) as client:
        engine = Engine(client, 1, HIDDEN[0])
        client.call("CLEAR", m.Clear())
        room = 0
        while engine.store([7000 + room]).stored:
            assert engine.load([7000 + room]) == 1
            room += 1
        assert room == 52
        assert engine.store([1, 2, 3]) == StoreOutcome(dropped=3)
        assert engine.load([1, 2, 3]) == 0
        assert all(engine.load([7000 + number]) == 1 for number in range(room)), "nothing pinned has gone"
        engine.free_all_but(0)
        assert engine.store([1, 2, 3]) == StoreOutcome(stored=3)
        assert engine.load([1, 2, 3]) == 3
        engine.free_all_but(0)
