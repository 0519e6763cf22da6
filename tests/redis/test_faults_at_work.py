"""Redis is killed, frozen, and holds what nobody stored: a miss at worst, never a wrong byte, no store that fails, no
LOOKUP that waits."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import pytest

from kvframework.storage.namespaces import record_key
from kvframework.wire import messages as m
from tests.core.tiers.damage import KINDS, damage_in_redis
from tests.core.tiers.engine import Engine
from tests.core.tiers.engines import SMALL_L1, Engines
from tests.core.tiers.nodes import await_count, await_rest, await_state, await_written, count, tier
from tests.core.tiers.prompts import Prompt, object_key, overlapping, prompt
from tests.support.redis_server import RedisServer
from tests.support.server_process import ServerProcess
from tests.support.waiting import wait_until

pytestmark = pytest.mark.redis

PREFIX = b"kvf:"
TIMEOUT_S = 2.0
# A LOOKUP that waited for Redis would take TIMEOUT_S at least.
BOUND_S = TIMEOUT_S / 2


@dataclass(frozen=True)
class Keeper:
    """An engine whose prompt is in L1 and stays there, since its ticket pins it."""

    engine: Engine
    prompt: Prompt

    def asks(self, times: int = 20) -> None:
        for _ in range(times):
            reply = self.engine.look_up(self.prompt)
            assert not reply.pending
            assert reply.hit_tokens == len(self.prompt) * 256
            assert self.engine.retrieve(self.prompt, len(self.prompt))
            self.engine.free(reply)
        assert self.engine.slowest_lookup_s < BOUND_S


@pytest.fixture
def nodes(redis: RedisServer) -> Iterator[list[ServerProcess]]:
    settings = ("l2.0.use=redis", f"l2.0.url={redis.url}", f"l2.0.timeout_s={TIMEOUT_S}", "server.ticket_s=1800")
    with ExitStack() as stack:
        yield [stack.enter_context(ServerProcess(*settings, capacity=SMALL_L1)) for _ in range(2)]


@contextmanager
def keeper(node: ServerProcess, number: int) -> Iterator[Keeper]:
    own = prompt([10**7 + 10 * number + chunk for chunk in range(4)])
    with Engine(node.endpoint, instance_id=number) as engine:
        engine.store(own)
        assert engine.look_up(own).hit_tokens == len(own) * 256
        yield Keeper(engine, own)


@pytest.mark.parametrize("rounds", [1, pytest.param(20, marks=[pytest.mark.slow, pytest.mark.timeout(1800)])])
def test_faults_of_redis_harm_nobody(redis: RedisServer, nodes: list[ServerProcess], seed: int, rounds: int) -> None:
    chance = random.Random(f"{seed}/faults")
    endpoints = [node.endpoint for node in (*nodes, *nodes)]
    with ExitStack() as stack:
        keepers = [stack.enter_context(keeper(node, number)) for number, node in enumerate(nodes)]
        clients = [each.engine.client for each in keepers]
        engines = stack.enter_context(Engines(endpoints, seed=seed))
        keys = [
            PREFIX + object_key(keepers[0].engine.namespace, digest)
            for digest in sorted({digest for each in overlapping(seed) for digest in each.digests})
        ]

        def working() -> None:
            """All engines have stored and loaded something since."""
            engines.check()
            before = [(count(client, "hits"), count(client, "stored")) for client in clients]
            for client, (hits, stored) in zip(clients, before, strict=True):
                await_count(client, "hits", hits + 20)
                await_count(client, "stored", stored + 1)

        working()
        for fault in chance.sample(["damage", "damage", "kill", "stall"] * rounds, 4 * rounds):
            if fault == "damage":
                _damage_some(redis, keys, chance, 40)
            elif fault == "kill":
                redis.kill9()
                for client in clients:
                    await_state(client, "down")
                for each in keepers:
                    each.asks()
                redis.restart()
            else:
                redis.sigstop()
                try:
                    for client in clients:
                        await_state(client, "down")
                    for each in keepers:
                        each.asks()
                finally:
                    redis.sigcont()
            for client in clients:
                await_state(client, "closed")
            working()
        _damage_some(redis, keys, chance, 40)
        wait_until(lambda: sum(count(client, "corrupt") for client in clients) > 0, 60, "damage that is found")

        reports = engines.stop()
        assert all(report.rounds > 10 and report.chunks_checked > 0 for report in reports)
        assert max(report.slowest_lookup_s for report in reports) < BOUND_S
        fresh = prompt([10**8, 10**8 + 1])
        assert keepers[0].engine.store(fresh).stored == len(fresh)
        await_written(clients[0])
        assert keepers[1].engine.load(fresh) == len(fresh)
        for each in keepers:
            each.asks(1)
            each.engine.client.call("END_SESSION", m.EndSession())
            await_rest(each.engine.client)


def test_each_kind_of_damage_is_a_miss_is_counted_and_is_deleted(
    redis: RedisServer, nodes: list[ServerProcess], seed: int
) -> None:
    chance = random.Random(f"{seed}/damage")
    # In each prompt one chunk is damaged; what is before it stays a hit.
    prompts = {kind: prompt([1000 * number + chunk for chunk in range(6)]) for number, kind in enumerate(KINDS)}
    with Engine(nodes[0].endpoint) as here, Engine(nodes[1].endpoint) as there, redis.client() as client:
        for each in prompts.values():
            here.store(each)
        await_written(here.client)
        for kind, each in prompts.items():
            at = chance.randrange(1, 5)
            keys = [PREFIX + object_key(here.namespace, digest) for digest in each.digests]
            assert damage_in_redis(client, kind, keys[at], keys[5], chance)
            before = count(there.client, "corrupt")
            wrong = 2 if kind == "swapped" else 1
            assert there.load(each) == at, kind
            assert count(there.client, "corrupt") - before == wrong, kind
            assert not client.exists(keys[at]), kind
            assert there.store(each).stored == wrong, kind
            await_written(there.client)
            here.clear()
            assert here.load(each) == len(each), f"{kind}: it was stored again"
        assert tier(there.client)["state"] == "closed", "what is damaged is no failure of the tier"


def test_a_damaged_namespace_record_is_a_miss(redis: RedisServer, nodes: list[ServerProcess]) -> None:
    own = prompt([1, 2, 3])
    with Engine(nodes[0].endpoint) as here, nodes[1].client() as unregistered, redis.client() as client:
        here.store(own)
        await_written(here.client)
        record = PREFIX + record_key(here.namespace)
        value = client.get(record)
        assert isinstance(value, bytes)
        client.set(record, value[:100] + bytes([value[100] ^ 1]) + value[101:])
        assert here.settled(here.look_up(own)).hit_tokens == 768
        reply = unregistered.lookup(here.key(own))
        wait_until(lambda: count(unregistered, "corrupt") == 1, what="the damage to be counted")
        assert reply.hit_tokens == 0
        wait_until(lambda: not client.exists(record), what="the end of the damaged record")
        with Engine(nodes[1].endpoint, instance_id=2) as there:
            assert there.load(own) == len(own), "who registers needs no record"


def _damage_some(redis: RedisServer, keys: Sequence[bytes], chance: random.Random, number: int) -> None:
    with redis.client() as client:
        for _ in range(number):
            kind, (key, other) = chance.choice(KINDS), chance.sample(keys, 2)
            damage_in_redis(client, kind, key, other, chance)
