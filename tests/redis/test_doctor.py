"""What the doctor tells of a Redis, from a real one: it answers or not, how large it may grow, what it evicts."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.core.doctor.tables import WHERE, ask, ask_a_silent_one, levels
from tests.support.redis_sentinel import MASTER, RedisWithSentinels
from tests.support.redis_server import RedisServer

pytestmark = pytest.mark.redis

SOUND = ("--maxmemory", "64mb", "--maxmemory-policy", "allkeys-lru")
ALL_OK = dict.fromkeys(
    ("plugin.usable", "redis.reachable", "redis.maxmemory", "redis.policy", "redis.persistence"), "ok"
)


def test_one_that_is_set_up_as_a_cache_is_ok(tmp_path: Path) -> None:
    with RedisServer(tmp_path, options=SOUND) as server:
        found = ask("redis", url=server.url)
    assert levels(found) == ALL_OK
    assert f"127.0.0.1:{server.port} answers in" in found["redis.reachable"].fact
    assert "64.0 MiB" in found["redis.maxmemory"].fact
    assert {each.advice for each in found.values()} == {""}


def test_one_as_it_comes_is_warned_of(tmp_path: Path) -> None:
    with RedisServer(tmp_path) as server:
        found = ask("redis", url=server.url)
        assert levels(found) == ALL_OK | {"redis.maxmemory": "warn", "redis.policy": "warn"}
        assert "CONFIG SET maxmemory SIZE" in found["redis.maxmemory"].advice
        assert "allkeys-lru" in found["redis.policy"].advice
        with server.client() as client:
            assert client.dbsize() == 0
            client.config_set("maxmemory-policy", "volatile-lru")
            client.config_set("appendonly", "yes")
        found = ask("redis", url=server.url)
        assert found["redis.policy"].level == "warn"
        assert "ttl_s" in found["redis.policy"].fact
        assert found["redis.persistence"].level == "warn"
        assert ask("redis", url=server.url, ttl_s=60)["redis.policy"].level == "ok"


def test_a_dead_one_fails_and_says_what_to_do(tmp_path: Path) -> None:
    server = RedisServer(tmp_path)
    found = ask("redis", url=server.url)
    assert levels(found) == {"plugin.usable": "ok", "redis.reachable": "fail"}
    assert (
        found["redis.reachable"].fact == f"redis at 127.0.0.1:{server.port}: the query PING failed: Connection refused"
    )
    assert "start Redis" in found["redis.reachable"].advice


def test_a_silent_one_is_not_waited_for(tmp_path: Path) -> None:
    with RedisServer(tmp_path, options=SOUND) as server:
        server.sigstop()
        found = ask_a_silent_one("redis", "redis.reachable", url=server.url)
        server.sigcont()
    assert levels(found) == {"plugin.usable": "ok", "redis.reachable": "fail"}
    assert "did not answer before the" in found["redis.reachable"].fact


def test_a_password_is_needed_and_never_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with RedisServer(tmp_path, unix=True, password="open-sesame", options=SOUND) as server:
        for wrong in ({}, {"password_env": "DOCTOR_WRONG"}):
            monkeypatch.setenv("DOCTOR_WRONG", "close-sesame")
            found = ask("redis", url=server.url, **wrong)
            assert levels(found) == {"plugin.usable": "ok", "redis.reachable": "fail"}
            assert "refuses the user name or password" in found["redis.reachable"].fact
            assert "sesame" not in str(found)
        monkeypatch.setenv("DOCTOR_PASSWORD", "open-sesame")
        found = ask("redis", url=server.url, password_env="DOCTOR_PASSWORD")
        assert levels(found) == ALL_OK
        assert "sesame" not in str(found)


def test_a_config_that_may_not_be_read_is_no_problem(tmp_path: Path) -> None:
    with RedisServer(tmp_path, options=(*SOUND, "--rename-command", "CONFIG", "")) as server:
        found = ask("redis", url=server.url)
    assert levels(found) == ALL_OK


def test_of_a_cluster_the_first_node_that_lives_is_asked(tmp_path: Path) -> None:
    dead = RedisServer(tmp_path)
    with RedisServer(tmp_path, cluster=True, options=SOUND) as living:
        url = dead.url.removesuffix("/0")
        found = ask("redis", url=url, topology="cluster", nodes=[f"127.0.0.1:{living.port}"])
    assert levels(found) == ALL_OK
    assert f"127.0.0.1:{living.port} answers" in found["redis.reachable"].fact


def test_of_a_group_the_master_is_asked(tmp_path: Path) -> None:
    with RedisWithSentinels(tmp_path) as group:
        url = f"redis://127.0.0.1:{group.sentinels[0].port}"
        found = ask("redis", url=url, topology="sentinel", master_name=MASTER)
        assert f"127.0.0.1:{group.master.port} answers" in found["redis.reachable"].fact
        unknown = ask("redis", url=url, topology="sentinel", master_name="nobody")["redis.reachable"]
    assert (unknown.level, "does not know the master 'nobody'" in unknown.fact) == ("fail", True)


def test_options_that_contradict_each_other_are_a_finding() -> None:
    found = ask("redis", url="redis://127.0.0.1", master_name="x")
    assert levels(found) == {"config.field": "fail"}
    assert "topology" in found["config.field"].advice


def test_a_url_that_serve_refuses_is_the_same_finding() -> None:
    found = ask("redis", url="redis://127.0.0.1:eighteen/0")
    assert levels(found) == {"config.field": "fail"}
    assert found["config.field"].where == f"{WHERE}.url"
    assert found["config.field"].advice.startswith("expected: redis://host:6379/0, ")
    assert "; hint: write redis://HOST:PORT/DB; percent-encode a password in url, or" in found["config.field"].advice


def test_one_that_writes_snapshots_is_warned_of(tmp_path: Path) -> None:
    with RedisServer(tmp_path, options=SOUND) as server, server.client() as client:
        client.config_set("save", "3600 1 300 100")
        found = ask("redis", url=server.url)
    assert levels(found) == ALL_OK | {"redis.persistence": "warn"}
    assert found["redis.persistence"].fact == ("save is '3600 1 300 100': Redis forks and writes the cache to a disk")
    assert found["redis.persistence"].advice.startswith("CONFIG SET save ''")
