"""The Redis tier behind three real sentinels: the master is found, lost, and found again. Rounds of stores and loads at
a tier that is killed, frozen or replaced meanwhile. A value says over and over whose it is, so that a foreign byte
anywhere in it shows."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from kvframework.api.tier import Outcome, Tier
from kvframework.errors import TierError
from tests.support.redis_sentinel import MASTER, RedisWithSentinels
from tests.support.redis_tier import Opened, get, put, soon
from tests.support.waiting import wait_until

pytestmark = pytest.mark.redis

FOUND, MISSING, STORED = Outcome.FOUND, Outcome.MISSING, Outcome.STORED

PATIENCE_S = 60.0
PASSWORD, SENTINEL_PASSWORD = "for-the-servers", "for-the-sentinels"


@pytest.fixture(scope="module")
def group(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisWithSentinels]:
    directory = tmp_path_factory.mktemp("sentinel")
    with RedisWithSentinels(directory, password=PASSWORD, sentinel_password=SENTINEL_PASSWORD) as group:
        yield group


@pytest.fixture
def on_sentinels(group: RedisWithSentinels, opened: Opened, monkeypatch: pytest.MonkeyPatch) -> Opened:
    """Makes tiers that are closed when the test ends."""
    monkeypatch.setenv("KVF_TEST_PASSWORD", PASSWORD)
    monkeypatch.setenv("KVF_TEST_SENTINEL", SENTINEL_PASSWORD)
    first, *others = [f"127.0.0.1:{each.port}" for each in group.sentinels]
    given = {"nodes": others, "topology": "sentinel", "master_name": MASTER, "password_env": "KVF_TEST_PASSWORD"}
    given |= {"sentinel_password_env": "KVF_TEST_SENTINEL"}
    return lambda url=f"redis://{first}/1", **options: opened(url, **{**given, **options})


def test_the_master_is_found_and_used(group: RedisWithSentinels, on_sentinels: Opened) -> None:
    tier = on_sentinels()
    tier.ping(deadline=soon())
    assert put(tier, b"key", b"value") is STORED
    assert get(tier, b"key", b"none", nbytes=5)[0] == [FOUND, MISSING]
    with group.master.client() as client:
        client.select(1)
        assert client.get("kvf:key") == b"value", "in the database of the url"
    assert tier.delete([b"key"], deadline=soon()) == [Outcome.DELETED]


def test_sentinels_that_are_dead_or_silent_cost_their_share(group: RedisWithSentinels, on_sentinels: Opened) -> None:
    alive = f"127.0.0.1:{group.sentinels[2].port}"
    dead = on_sentinels(url="redis://127.0.0.1:1", nodes=["127.0.0.1:2", alive])
    assert dead.contains([b"key"], deadline=soon()) == [MISSING]
    group.sentinels[0].sigstop()
    try:
        silent = on_sentinels(connections=4)
        assert silent.contains([b"key"], deadline=soon(4.0)) == [MISSING], "it leaves time for the others"
    finally:
        group.sentinels[0].sigcont()
    none = on_sentinels(url="redis://127.0.0.1:1", nodes=["127.0.0.1:2"])
    with pytest.raises(TierError, match=r"the query SENTINEL .*Connection refused") as caught:
        none.contains([b"key"], deadline=soon())
    assert "127.0.0.1:2" in caught.value.where


def test_what_the_sentinels_refuse_is_told(on_sentinels: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    unknown = on_sentinels(master_name="nobody")
    with pytest.raises(TierError, match="does not know the master 'nobody'") as caught:
        unknown.contains([b"key"], deadline=soon())
    assert "master_name" in caught.value.hint
    monkeypatch.setenv("KVF_TEST_SENTINEL", "wr0ng")
    for options in ({}, {"sentinel_password_env": ""}):
        refused = on_sentinels(**options)
        with pytest.raises(TierError, match="refuses the user name or password") as caught:
            refused.ping(deadline=soon())
        assert "wr0ng" not in str(caught.value)


def test_a_master_that_turned_replica_is_left_at_its_first_refusal(
    group: RedisWithSentinels, on_sentinels: Opened
) -> None:
    tier = on_sentinels(connections=3)
    in_threads(lambda: tier.contains([os.urandom(9)] * 300, deadline=soon()), 3)  # connections that will lie idle
    assert put(tier, b"before", b"value") is STORED
    master, replica = group.master, group.replica
    with master.client() as client:
        client.wait(1, 10_000)
        group.sentinels[0].on("SENTINEL", "FAILOVER", MASTER)
        group.await_promotion(replica)
        client.replicaof("127.0.0.1", replica.port)  # as the sentinels do in the end, but they cut connections
    group.await_replica(master)
    with pytest.raises(TierError, match="READONLY"):
        put(tier, b"after", b"value")
    assert put(tier, b"after", b"value") is STORED
    assert get(tier, b"before", b"after", nbytes=5) == ([FOUND, FOUND], [b"value", b"value"])
    with replica.client() as client:
        client.select(1)
        assert client.get("kvf:after") == b"value"
    with master.client() as client:
        assert not [each for each in client.client_list(_type="normal") if each["db"] == "1"], "none was kept"


def in_threads(work: Callable[[], object], count: int) -> None:
    threads = [threading.Thread(target=work) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def test_a_killed_master_is_replaced_and_no_byte_is_wrong(group: RedisWithSentinels, on_sentinels: Opened) -> None:
    with rounds(on_sentinels(), 100_000, call_s=2.0) as progress:
        progress("found")
        victim, heir = group.master, group.replica
        group.set_down_after(500)
        victim.kill9()
        progress("failed")
        group.await_promotion(heir)
        progress("found")
        group.set_down_after()
        group.bring_back(victim)
        progress("found")


@contextmanager
def rounds(tier: Tier, size: int, *, call_s: float, threads: int = 1) -> Iterator[Callable[..., None]]:
    """Run rounds of values of `size` bytes until the block ends; fail then if a byte was wrong. The yielded
    `progress(what, count=3)` waits for so many further rounds in which all was "found", or a call "failed"."""
    counts = {"found": 0, "failed": 0}
    wrong: list[bytes] = []
    done = threading.Event()

    def run(seed: int) -> None:
        turn = 0
        while not done.is_set():
            turn += 1
            keys = [b"%d/%d/%d" % (seed, turn % 3, index) for index in range(4)]
            values = [(b"<%b.%d>" % (key, turn) * size)[:size] for key in keys]
            try:
                tier.put(keys, [[memoryview(value)] for value in values], deadline=soon(call_s))
                outcomes, found = get(tier, *keys, nbytes=size, deadline=soon(call_s))
            except TierError:
                counts["failed"] += 1
                continue
            counts["found"] += outcomes == [Outcome.FOUND] * 4
            for key, value, outcome in zip(keys, found, outcomes, strict=True):
                unit = value[: value.find(b">") + 1]
                right = unit.startswith(b"<%b." % key) and value == (unit * size)[:size]
                if outcome is Outcome.FOUND and not right:
                    wrong.append(unit)

    def progress(what: str, count: int = 3) -> None:
        target = counts[what] + count
        wait_until(lambda: counts[what] >= target, PATIENCE_S, f"rounds {what}")

    running = [threading.Thread(target=run, args=(seed,)) for seed in range(threads)]
    for thread in running:
        thread.start()
    try:
        yield progress
    finally:
        done.set()
        for thread in running:
            thread.join()
    assert not wrong
