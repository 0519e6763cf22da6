"""Redis stalls, dies, refuses, talks garbage and holds corrupt values while eight engine processes store and load.

Every engine checks each byte that it loads and times each LOOKUP; see `tests.core.tiers.engines`. Each kind of
damage by itself: `tests/redis/test_tier.py`.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import pytest

from kvf_dev.testing.faults import FaultProxy
from kvframework.wire import messages as m
from tests.core.tiers.damage import KINDS, damage_in_redis
from tests.core.tiers.engine import Engine
from tests.core.tiers.engines import SMALL_L1, Engines
from tests.core.tiers.nodes import await_count, await_rest, await_state, await_written, count, tier
from tests.core.tiers.prompts import Prompt, object_key, overlapping, prompt
from tests.support.redis_server import RedisServer
from tests.support.server_process import ServerProcess
from tests.support.waiting import wait_until
from tests.support.wire_client import WireClient

pytestmark = [pytest.mark.redis, pytest.mark.timeout(300)]

CLIENTS = 8
TIMEOUT_S = 2.0
# A LOOKUP that waited for Redis would take TIMEOUT_S at least.
BOUND_S = TIMEOUT_S / 2
# Of the wire, with its amount, and whether the tier cannot be used at all meanwhile.
WIRE = {
    "garbage": ("flip", 7.0, True),
    "some garbage": ("flip", 5000.0, False),
    "cut": ("cut", 20_000.0, False),
    "refuse": ("refuse", None, True),
    "stall": ("stall", None, True),
}
FAULTS = [*WIRE, "kill", "damage"]


@pytest.mark.parametrize("rounds", [1, pytest.param(20, marks=[pytest.mark.slow, pytest.mark.timeout(3600)])])
def test_no_fault_of_redis_harms_eight_clients(redis: RedisServer, seed: int, rounds: int) -> None:
    chance = random.Random(f"{seed}/eight")
    faults = [fault for _ in range(rounds) for fault in chance.sample(FAULTS, len(FAULTS))]
    own = prompt([10**7 + chunk for chunk in range(4)])
    digests = sorted({digest for each in overlapping(seed) for digest in each.digests})
    with ExitStack() as stack:
        proxy = stack.enter_context(FaultProxy(("127.0.0.1", redis.port)))
        url = f"redis://127.0.0.1:{proxy.port}/0"
        settings = ("l2.0.use=redis", f"l2.0.url={url}", f"l2.0.timeout_s={TIMEOUT_S}", "server.ticket_s=1800")
        server = stack.enter_context(ServerProcess(*settings, capacity=SMALL_L1))
        keeper = stack.enter_context(Engine(server.endpoint))
        keeper.store(own)
        assert keeper.look_up(own).hit_tokens == len(own) * 256, "and its ticket keeps it in L1"
        packed = [b"kvf:" + object_key(keeper.namespace, digest) for digest in digests]
        engines = stack.enter_context(Engines([server.endpoint] * CLIENTS, seed=seed))

        await_work(engines, keeper.client)
        for fault in faults:
            boot = keeper.client.status()["server"]["boot_id"]
            begin(fault, redis, proxy, packed, chance)
            if fault == "kill" or (fault in WIRE and WIRE[fault][2]):
                await_state(keeper.client, "down")
                assert tier(keeper.client)["last_error"], fault
            elif fault in WIRE:
                wait_until(lambda: sum(proxy.injected.values()) > 0, 60, "a fault that takes place")
            asks(keeper, own)
            engines.check()
            end(fault, redis, proxy)
            await_state(keeper.client, "closed")
            await_work(engines, keeper.client)
            assert keeper.client.status()["server"]["boot_id"] == boot

        reports = engines.stop()
        assert len(reports) == CLIENTS
        assert all(report.rounds > 5 for report in reports)
        assert sum(report.chunks_checked for report in reports) > 0
        assert max(report.slowest_lookup_s for report in reports) < BOUND_S
        assert count(keeper.client, "corrupt") > 0, "damage was found"
        fresh = prompt([10**8, 10**8 + 1])
        assert keeper.store(fresh).stored == len(fresh)
        await_written(keeper.client)
        keeper.client.call("END_SESSION", m.EndSession())
        keeper.clear()
        assert keeper.load(fresh) == len(fresh), "it was written to Redis again"
        await_rest(keeper.client)
        assert "Traceback" not in server.log


def begin(fault: str, redis: RedisServer, proxy: FaultProxy, keys: Sequence[bytes], chance: random.Random) -> None:
    proxy.injected.clear()
    if fault in WIRE:
        kind, amount, _ = WIRE[fault]
        proxy.inject(kind, amount)
    elif fault == "kill":
        redis.kill9()
    else:
        with redis.client() as client:
            for _ in range(60):
                damage_in_redis(client, chance.choice(KINDS), *chance.sample(keys, 2), chance)


def end(fault: str, redis: RedisServer, proxy: FaultProxy) -> None:
    if fault in WIRE:
        proxy.heal()
    elif fault == "kill":
        redis.restart()


def asks(keeper: Engine, own: Prompt, times: int = 20) -> None:
    """What L1 has is a hit at once, whatever Redis does."""
    for _ in range(times):
        reply = keeper.look_up(own)
        assert not reply.pending
        assert reply.hit_tokens == len(own) * 256
        assert keeper.retrieve(own, len(own))
        keeper.free(reply)
    assert keeper.slowest_lookup_s < BOUND_S


def await_work(engines: Engines, client: WireClient) -> None:
    """Values have been written to Redis and loaded from it since."""
    engines.check()
    before: dict[str, Any] = {name: count(client, name) for name in ("hits", "stored")}
    await_count(client, "hits", before["hits"] + 20)
    await_count(client, "stored", before["stored"] + 1)
    engines.check()
