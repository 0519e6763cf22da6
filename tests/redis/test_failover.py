"""The Redis tier on a real cluster whose masters die, freeze and come back."""

from __future__ import annotations

import threading
import time

import pytest

from kvframework.api.tier import Outcome
from kvframework.errors import TierError
from tests.support.redis_cluster import RedisCluster
from tests.support.redis_tier import Opened, get, keys_of_every_master, soon
from tests.support.waiting import wait_until

pytestmark = pytest.mark.redis

FOUND, MISSING, STORED = Outcome.FOUND, Outcome.MISSING, Outcome.STORED
DELETED, FAILED = Outcome.DELETED, Outcome.FAILED

PATIENCE_S = 60.0
# A deadline that only a call which waits for a server that does not answer could use up.
LONG_S = 60.0


def test_keys_of_a_dead_master_fail_and_no_others(cluster: RedisCluster, on_cluster: Opened) -> None:
    tier, keys = on_cluster(), keys_of_every_master(cluster)
    parts = [[memoryview(key)] for key in keys]
    assert tier.put(list(keys), parts, deadline=soon()) == [STORED] * len(keys)
    victim = cluster.master_of(8000)
    replica = cluster.replica_of(victim)
    cluster.on(victim, "WAIT", 1, 10_000)
    with cluster.killed(victim):
        started = time.monotonic()
        for _ in range(3):
            outcomes, found = get(tier, *keys, nbytes=72, deadline=soon(LONG_S))
            assert outcomes == [FAILED if server is victim else FOUND for server in keys.values()]
            assert all(value == key for key, value, each in zip(keys, found, outcomes, strict=True) if each is FOUND)
        tier.ping(deadline=soon())
        lost = [key for key, server in keys.items() if server is victim]
        with pytest.raises(TierError, match="Connection refused"):
            tier.contains(lost, deadline=soon(LONG_S))
        assert time.monotonic() - started < LONG_S, "no call waits for the dead"
        cluster.on(replica, "CLUSTER", "FAILOVER", "TAKEOVER")
        cluster.await_promotion(replica)
        wait_until(lambda: FAILED not in get(tier, *keys, nbytes=72)[0], PATIENCE_S, "that the replica is found")
        assert get(tier, *keys, nbytes=72) == ([FOUND] * len(keys), list(keys))
    assert tier.delete(list(keys), deadline=soon()) == [DELETED] * len(keys)


def test_a_frozen_master_costs_one_deadline_and_no_other_keys(
    cluster: RedisCluster, on_cluster: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    patient, eager, victim = on_cluster(), on_cluster(), cluster.master_of(100)
    # Its keys stand in the middle, so that those of another master come before and of another after them.
    keys = keys_of_every_master(cluster)
    others = [key for key, server in keys.items() if server is not victim]
    victims = [key for key, server in keys.items() if server is victim]
    keys = {key: keys[key] for key in (others[0], *victims, *others)}
    parts = [[memoryview(key)] for key in keys]
    for tier in (patient, eager):
        assert tier.put(list(keys), parts, deadline=soon()) == [STORED] * len(keys)
    expected = [FAILED if server is victim else FOUND for server in keys.values()]
    victim.sigstop()
    try:
        monkeypatch.setattr("kvf_redis.cluster._REST_S", 60.0)
        assert get(patient, *keys, nbytes=72, deadline=soon(0.5))[0] == expected
        started = time.monotonic()
        assert get(patient, *keys, nbytes=72, deadline=soon(LONG_S))[0] == expected
        assert time.monotonic() - started < LONG_S, "it is left alone for a while"
        monkeypatch.setattr("kvf_redis.cluster._REST_S", 0.1)
        assert get(eager, *keys, nbytes=72, deadline=soon(0.5))[0] == expected
    finally:
        victim.sigcont()
    wait_until(lambda: FAILED not in get(eager, *keys, nbytes=72)[0], PATIENCE_S, "that the master is used again")
    assert get(eager, *keys, nbytes=72) == ([FOUND] * len(keys), list(keys))
    assert eager.delete(list(keys), deadline=soon()) == [DELETED] * len(keys)


def test_closing_ends_a_call_that_waits_for_a_frozen_master(cluster: RedisCluster, on_cluster: Opened) -> None:
    tier, victim = on_cluster(), cluster.master_of(100)
    keys = list(keys_of_every_master(cluster, 1))
    assert tier.contains(keys, deadline=soon()) == [MISSING] * 3
    ended: list[object] = []

    def ask() -> None:
        try:
            ended.append(tier.contains(keys, deadline=soon(60)))
        except TierError as error:
            ended.append(error.fact)

    thread = threading.Thread(target=ask)
    victim.sigstop()
    try:
        thread.start()
        thread.join(0.3)
        assert thread.is_alive()
        tier.close()
        thread.join(10)
        assert not thread.is_alive()
    finally:
        victim.sigcont()
    (outcomes,) = ended  # the others had answered
    assert isinstance(outcomes, list)
    assert sorted(each.name for each in outcomes) == ["FAILED", "MISSING", "MISSING"]
    with pytest.raises(TierError, match="the tier is closed"):
        tier.contains(keys, deadline=soon())
