"""The Redis tier on a real cluster of three masters and three replicas: slots that move, and masters that die."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import pytest

import redis
from kvf_dev.testing.tier import TierConformance
from kvf_redis import cluster as clusters
from kvf_redis.cluster import Cluster, slot_of
from kvf_redis.commands import Ping
from kvf_redis.connect import NoAnswer
from kvf_redis.resp import Place
from kvframework.api.tier import Outcome, TierEntry
from kvframework.errors import TierError
from tests.support.processes import send
from tests.support.redis_cluster import RedisCluster
from tests.support.redis_server import RedisServer
from tests.support.redis_tier import Opened, get, key_in, keys_of_every_master, open_redis_tier, put, soon
from tests.support.tcp_peer import TcpPeer
from tests.support.waiting import wait_until

FOUND, MISSING, STORED = Outcome.FOUND, Outcome.MISSING, Outcome.STORED
DELETED, FAILED = Outcome.DELETED, Outcome.FAILED

PATIENCE_S = 60.0


def redirections(cluster: RedisCluster) -> dict[str, int]:
    """How many MOVED and ASK were answered since the last `reset`."""
    counts = {"MOVED": 0, "ASK": 0}
    for server in cluster.running:
        with server.client() as client:
            for name, stat in client.info("errorstats").items():
                kind = name.removeprefix("errorstat_")
                if kind in counts:
                    counts[kind] += stat["count"]
    return counts


def reset(cluster: RedisCluster) -> None:
    for server in cluster.running:
        cluster.on(server, "CONFIG", "RESETSTAT")


@pytest.mark.redis
class TestOnACluster(TierConformance):
    use = "redis"
    examples = 10

    @pytest.fixture
    def tier_options(self, cluster: RedisCluster) -> Mapping[str, object]:
        return {"url": cluster.running[0].url, "topology": "cluster", "nodes": cluster.nodes}


@pytest.mark.redis
def test_each_key_is_asked_of_its_master_at_once(cluster: RedisCluster, on_cluster: Opened) -> None:
    tier, keys = on_cluster(), list(keys_of_every_master(cluster))
    values = {key: os.urandom(1000 + index * 997) for index, key in enumerate(keys)}
    reset(cluster)
    parts = [[memoryview(value)] for value in values.values()]
    assert tier.put(keys, parts, deadline=soon()) == [STORED] * len(keys)
    outcomes, found = get(tier, *keys, nbytes=max(map(len, values.values())))
    assert outcomes == [FOUND] * len(keys)
    assert all(found[index].startswith(value) for index, value in enumerate(values.values()))
    tier.ping(deadline=soon())
    assert redirections(cluster) == {"MOVED": 0, "ASK": 0}
    assert tier.delete(keys, deadline=soon()) == [DELETED] * len(keys)


@pytest.mark.redis
def test_every_master_is_listed_and_a_lost_one_is_no_empty_one(cluster: RedisCluster, on_cluster: Opened) -> None:
    tier, keys = on_cluster(prefix="listed:"), [os.urandom(72) for _ in range(200)]
    large = os.urandom(300_000)
    parts = [[memoryview(value)] for value in (large, *[b"value"] * 199)]
    assert tier.put(keys, parts, deadline=soon()) == [STORED] * 200
    found = list(tier.scan(deadline=soon()))
    assert sorted(found, key=lambda entry: entry.key) == sorted(
        (TierEntry(key, len(large) if key == keys[0] else 5, None) for key in keys), key=lambda entry: entry.key
    )
    master = next(filter(cluster.is_master, cluster.running))
    send(master.pid, signal.SIGSTOP)
    try:
        with pytest.raises(TierError):
            list(tier.scan(deadline=soon(1.0)))
    finally:
        os.kill(master.pid, signal.SIGCONT)
    fresh = on_cluster(prefix="listed:")
    assert fresh.delete(keys, deadline=soon()) == [DELETED] * 200
    assert list(fresh.scan(deadline=soon())) == []


@pytest.mark.redis
@pytest.mark.parametrize("names", ["no nodes", "first node is dead", "replica", "hostname"])
def test_one_member_that_lives_is_enough_to_find_all(cluster: RedisCluster, on_cluster: Opened, names: str) -> None:
    keys = list(keys_of_every_master(cluster, 1))
    replica = next(each for each in cluster.running if not cluster.is_master(each))
    options: dict[str, Any] = {
        "no nodes": {"nodes": []},
        "first node is dead": {"url": "redis://127.0.0.1:1", "nodes": [f"127.0.0.1:{cluster.running[0].port}"]},
        "replica": {"url": replica.url, "nodes": []},
        "hostname": {"url": f"redis://localhost:{replica.port}", "nodes": []},
    }[names]
    tier = on_cluster(**options)
    assert tier.contains(keys, deadline=soon()) == [MISSING] * 3


@pytest.mark.redis
def test_no_member_at_all_is_a_tier_error_that_says_why(on_cluster: Opened) -> None:
    tier = on_cluster(url="redis://127.0.0.1:1", nodes=["127.0.0.1:2"])
    for call in (lambda: tier.contains([b"key"], deadline=soon()), lambda: tier.ping(deadline=soon())):
        with pytest.raises(TierError, match=r"the query CLUSTER SLOTS failed: Connection refused"):
            call()


@pytest.mark.redis
def test_a_server_that_is_no_member_says_so(on_cluster: Opened, tmp_path_factory: pytest.TempPathFactory) -> None:
    with RedisServer(tmp_path_factory.mktemp("single")) as single:
        with pytest.raises(TierError, match="the server refuses the login, the database or the command") as caught:
            on_cluster(url=single.url, nodes=[]).contains([b"key"], deadline=soon())
        assert "topology" in caught.value.hint


@pytest.mark.redis
def test_a_member_that_is_taken_for_a_single_server_says_so(cluster: RedisCluster) -> None:
    tier = open_redis_tier(cluster.master_of(0).url)
    with pytest.raises(TierError, match="MOVED") as caught:
        tier.put([key_in(16000)], [[memoryview(b"value")]], deadline=soon())
    assert 'topology = "cluster"' in caught.value.hint
    tier.close()


@pytest.mark.redis
def test_a_user_with_the_listed_commands_can_do_all(
    cluster: RedisCluster, on_cluster: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVF_TEST_PASSWORD", "s3cret é")
    for server in cluster.running:
        rights = "+get +set +exists +unlink +expire +ping +asking +cluster|slots +scan +strlen"
        cluster.on(server, "ACL", "SETUSER", "cache", "on", "reset")
        cluster.on(server, "ACL", "SETUSER", "cache", "on", ">s3cret é", "~acl:*", *rights.split())
    tier = on_cluster(username="cache", password_env="KVF_TEST_PASSWORD", prefix="acl:", ttl_s=50)
    slot = 77
    source = cluster.master_of(slot)
    key, value = key_in(slot, prefix=b"acl:"), os.urandom(300_000)
    with cluster.migrating(slot, source, cluster.other_than(source)):
        assert put(tier, key, value) is STORED
        assert get(tier, key, nbytes=len(value)) == ([FOUND], [value])
        tier.touch([key], deadline=soon())
        tier.ping(deadline=soon())
        assert tier.delete([key], deadline=soon()) == [DELETED]
    listed = os.urandom(72)
    assert put(tier, listed, value) is STORED
    assert list(tier.scan(deadline=soon())) == [TierEntry(listed, len(value), None)]
    assert tier.delete([listed], deadline=soon()) == [DELETED]
    other = on_cluster(username="cache", password_env="KVF_TEST_PASSWORD", prefix="elsewhere:")
    with pytest.raises(TierError, match="NOPERM") as caught:
        other.contains([b"key"], deadline=soon())
    assert "README" in caught.value.hint
    for server in cluster.running:
        cluster.on(server, "ACL", "DELUSER", "cache")


# Slots that move


@pytest.mark.redis
def test_a_slot_that_has_moved_is_followed_once(cluster: RedisCluster, on_cluster: Opened) -> None:
    tier, slot = on_cluster(), 500
    source = cluster.master_of(slot)
    target = cluster.other_than(source)
    here, there = key_in(slot), key_in(501)
    assert put(tier, there, b"stays") is STORED
    cluster.move(slot, source, target)
    reset(cluster)
    assert tier.contains([there, here], deadline=soon()) == [FOUND, MISSING]
    assert redirections(cluster)["MOVED"] == 1
    assert put(tier, here, b"value" * 1000) is STORED
    assert get(tier, here, there, nbytes=5000)[0] == [FOUND, FOUND]
    assert redirections(cluster)["MOVED"] == 1, "the map was updated"
    assert cluster.on(target, "EXISTS", b"kvf:" + here) == 1
    assert tier.delete([here, there], deadline=soon()) == [DELETED, DELETED]
    cluster.move(slot, target, source)
    assert tier.contains([here], deadline=soon()) == [MISSING]


@pytest.mark.redis
def test_a_batch_is_whole_and_right_at_every_step_of_a_migration(cluster: RedisCluster, on_cluster: Opened) -> None:
    tier, slot = on_cluster(), 1234
    source = cluster.master_of(slot)
    target = cluster.other_than(source)
    keys = [key_in(slot, serial) for serial in range(6)] + list(keys_of_every_master(cluster, 2))
    values = {key: os.urandom(50_000) for key in keys}

    def all_is_found() -> None:
        outcomes, found = get(tier, *keys, nbytes=50_000)
        assert outcomes == [FOUND] * len(keys)
        assert found == list(values.values())
        assert tier.contains(keys, deadline=soon()) == [FOUND] * len(keys)

    assert tier.put(keys, [[memoryview(each)] for each in values.values()], deadline=soon()) == [STORED] * len(keys)
    with cluster.migrating(slot, source, target):
        reset(cluster)
        for key in keys[:3]:
            cluster.on(source, "MIGRATE", "127.0.0.1", target.port, b"kvf:" + key, 0, 10_000)
            all_is_found()
        assert redirections(cluster)["ASK"] > 0
        assert redirections(cluster)["MOVED"] == 0, "ASK leaves the map as it is"
        values[keys[5]] = os.urandom(50_000)
        fresh = key_in(slot, 99)
        pairs = {keys[5]: values[keys[5]], fresh: b"new"}
        assert tier.put(list(pairs), [[memoryview(each)] for each in pairs.values()], deadline=soon()) == [STORED] * 2
        all_is_found()
        with pytest.raises(redis.ResponseError, match=str(target.port)):  # what is new is stored where the slot goes
            cluster.on(source, "EXISTS", b"kvf:" + fresh)
        for key in keys[3:6]:
            cluster.on(source, "MIGRATE", "127.0.0.1", target.port, b"kvf:" + key, 0, 10_000)
        cluster.move(slot, source, target)
    all_is_found()
    assert get(tier, fresh, nbytes=3) == ([FOUND], [b"new"])
    assert tier.delete([*keys, fresh], deadline=soon()) == [DELETED] * (len(keys) + 1)
    cluster.move(slot, target, source)


@pytest.mark.redis
@pytest.mark.parametrize("full_coverage", ["yes", "no"])
def test_a_slot_that_nobody_serves_fails_its_keys(
    cluster: RedisCluster, on_cluster: Opened, full_coverage: str
) -> None:
    tier, slot = on_cluster(), 2345
    lost, other = key_in(slot), key_in(9999)
    assert tier.contains([lost, other], deadline=soon()) == [MISSING, MISSING]
    owner = cluster.master_of(slot)
    cluster.set_everywhere("cluster-require-full-coverage", full_coverage)
    try:
        for server in cluster.running:
            with suppress(redis.ResponseError):  # one that has heard of it already
                cluster.on(server, "CLUSTER", "DELSLOTS", slot)
        if full_coverage == "yes":
            info = lambda server: cluster.on(server, "CLUSTER", "INFO")  # noqa: E731
            wait_until(lambda: all(b"state:fail" in _bytes(info(each)) for each in cluster.running), PATIENCE_S)
            with pytest.raises(TierError, match=r"CLUSTERDOWN|no master of the cluster serves the key's slot"):
                tier.contains([lost, other], deadline=soon())
        else:
            assert tier.contains([lost, other], deadline=soon()) == [FAILED, MISSING]
            with pytest.raises(TierError, match=r"CLUSTERDOWN|no master of the cluster serves the key's slot"):
                tier.contains([lost], deadline=soon())
    finally:
        for server in (owner, *(each for each in cluster.running if each is not owner)):
            with suppress(redis.ResponseError):  # a replica learns it from its master
                cluster.on(server, "CLUSTER", "SETSLOT", slot, "NODE", cluster.id_of(owner))
        cluster.set_everywhere("cluster-require-full-coverage", "no")
    wait_until(lambda: tier.contains([lost, other], deadline=soon()) == [MISSING, MISSING], PATIENCE_S)


def _bytes(reply: object) -> bytes:
    assert isinstance(reply, bytes)
    return reply


class Liar(TcpPeer):
    """A member that serves every slot, as it says, and then answers `script` to every command for a key."""

    def __init__(self, script: bytes) -> None:
        super().__init__()
        self.script = script
        self.asked = 0

    def serve(self, sock: socket.socket) -> None:
        slots = b"*1\r\n*3\r\n:0\r\n:16383\r\n*2\r\n$9\r\n127.0.0.1\r\n:%d\r\n" % self.port
        with sock:
            sock.settimeout(0.05)
            while not self.stopping:
                with suppress(TimeoutError):
                    received = sock.recv(1 << 16)
                    if not received:
                        return
                    if b"SLOTS" in received:
                        sock.sendall(slots)
                    elif b"SETINFO" in received:
                        sock.sendall(b"+OK\r\n")
                    else:
                        self.asked += 1
                        sock.sendall(
                            b"+OK\r\n" * received.count(b"ASKING")
                            + self.script % {b"port": self.port, b"slot": slot_of(b"kvf:key")}
                        )


@pytest.mark.parametrize(
    ("script", "said"),
    [
        (b"-MOVED %(slot)d 127.0.0.1:%(port)d\r\n", "MOVED|the cluster redirected the keys too often"),
        (b"-ASK %(slot)d 127.0.0.1:%(port)d\r\n", "ASK|the cluster redirected the keys too often"),
        (b"-MOVED %(slot)d 127.0.0.1:1\r\n", "Connection refused"),
        (b"-ASK %(slot)d 127.0.0.1:1\r\n", "Connection refused"),
        (b"-MOVED 0\r\n", "MOVED 0"),
        (b"-TRYAGAIN Multiple keys\r\n", "TRYAGAIN"),
        (b"-CLUSTERDOWN The cluster is down\r\n", "CLUSTERDOWN"),
        (b"-LOADING Redis is loading\r\n", "LOADING"),
        (b"HTTP/1.1 400\r\n", "unexpected reply"),
    ],
)
def test_what_leads_nowhere_ends_as_a_tier_error(script: bytes, said: str) -> None:
    with Liar(script) as peer:
        tier = open_redis_tier(f"redis://127.0.0.1:{peer.port}", topology="cluster")
        with pytest.raises(TierError, match=said):
            tier.contains([b"key"], deadline=soon())
        assert peer.asked <= 10
        tier.close()


class Starved:
    """Stands for a node and for the clock: its calls end half a second later, whatever their deadline, without an
    answer, as those of a process that is not scheduled do."""

    now = 100.0
    calls = 0

    def monotonic(self) -> float:
        return self.now

    def carry(self, _commands: object, _deadline: float) -> TierError:
        self.calls += 1
        self.now += 0.5
        return NoAnswer("before", where="here")


def test_only_a_node_that_had_time_to_answer_rests(monkeypatch: pytest.MonkeyPatch) -> None:
    starved, place = Starved(), Place("127.0.0.1", 1)
    connector: Any = None
    cluster = Cluster(connector, [place], 1, where="here")
    monkeypatch.setattr(clusters, "time", starved)
    monkeypatch.setattr(cluster, "_node", lambda _place: starved)
    for lasts, calls in ((0.001, 1), (0.001, 2), (10.0, 3), (10.0, 3)):
        with pytest.raises(TierError, match="before" if starved.calls < calls else "did not answer recently"):
            cluster.run_at(place, Ping(), starved.now + lasts)
        assert starved.calls == calls
