"""`[tenants.NAME] load_bandwidth`: the bucket never gives more than its rate, and a server limits that tenant alone."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvframework.api.keys import CacheKey, tenant_digest
from kvframework.pricing import BURST_S, MOST_LOADS, WAIT_S, LoadRate
from kvframework.wire import messages as m
from tests.core.registry.fake_distributions import install
from tests.core.tiers import slowed_tier
from tests.support.server_process import ServerProcess
from tests.support.waiting import wait_until
from tests.support.wire_client import WireClient, key_for

CHUNK, CHUNKS = 256, 40
CHUNK_BYTES = CHUNK * 128
SALTS = ("of the slow", "of the quick", "")


@given(st.floats(1, 1e12), st.lists(st.tuples(st.floats(0, 10), st.floats(0, 5)), max_size=30))
def test_no_span_of_time_gets_more_than_its_rate_and_a_burst(rate: float, asked: list[tuple[float, float]]) -> None:
    """Each of `asked` comes so long after the one before it and wants so many seconds of the rate."""
    bucket, now, loads = LoadRate(rate), 0.0, list[tuple[float, float]]()
    for pause, wanted in asked:
        now += pause
        room = bucket.room(now)
        assert room <= rate * (BURST_S + WAIT_S) * (1 + 1e-9)
        nbytes = min(wanted * rate, room)
        if nbytes > 0:
            begin = bucket.take(nbytes, now)
            assert begin - now <= WAIT_S - nbytes / rate + 1e-6, "its last byte waits for no longer than that"
            loads.append((begin, nbytes))
    for begin, _ in loads:
        since = max(begin, 0.0)
        later = [(max(at, 0.0), nbytes) for at, nbytes in loads if at >= begin]
        for end, _ in later:
            given = sum(min(nbytes, max(end - at, 0.0) * rate) for at, nbytes in later)
            assert given <= (end - since + BURST_S) * rate * (1 + 1e-6) + 1e-6


TENANTS = [f"tenants.{salt[7:]}.salts=['{tenant_digest(salt)}']" for salt in SALTS[:2]]


@pytest.fixture
def server(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[ServerProcess]:
    disk = ("l2.0.use=filesystem", f"l2.0.path={tmp_path / 'l2'}", "server.chunk_size=256")
    with ServerProcess(*TENANTS, *disk, f"tenants.slow.load_bandwidth={request.param}") as process:
        yield process


def filled(client: WireClient) -> dict[str, CacheKey]:
    registered, tokens = client.register(), list(range(CHUNK * CHUNKS))
    keys = {salt: key_for(registered, tokens, cache_salt=salt) for salt in SALTS}
    for key in keys.values():
        client.store(key, b"k")
    wait_until(lambda: not any(tier["write_pending"] for tier in client.status()["l2"]), what="the writes to L2")
    return keys


@pytest.mark.parametrize("server", ["32KiB/s"], indirect=True)
@pytest.mark.parametrize("cleared", [False, True])
def test_a_hit_of_l1_or_of_a_tier_is_cut_at_what_the_tenant_may_load(server: ServerProcess, cleared: bool) -> None:
    """The first hit gets a burst and what comes within a wait, 3 s of the rate; the others get what has come."""
    with server.client() as client:
        slow, quick, plain = filled(client).values()
        if cleared:
            client.call("CLEAR", m.Clear())
        began, hits = time.monotonic(), [client.hit(slow) for _ in range(5)]
        assert hits[0] == 3 * CHUNK
        assert sum(hits) / CHUNK * CHUNK_BYTES <= (time.monotonic() - began + BURST_S + WAIT_S) * (32 << 10)
        assert [client.hit(key) for key in (quick, quick, plain)] == [CHUNK * CHUNKS] * 3
        status = client.status()
        assert status["lookups"]["misses"]["bandwidth"] == 5
        limited = {name: row["limited"] for name, row in status["use"]["tenants"].items()}
        assert limited == {"slow": 5, "quick": 0, "other": 0}
        record = next(each for each in client.call("RECENT", m.Recent()).records if each.reason)
        assert (record.tenant, record.detail) == ("slow", "the tenant loads at most 32.0 KiB/s")


@pytest.mark.parametrize("server", ["32KiB/s"], indirect=True)
def test_a_load_without_a_lookup_is_charged_to_the_tenant(server: ServerProcess) -> None:
    """It is given whole, and the tenant then loads nothing for longer than half a minute."""
    with server.client() as client:
        slow, quick, _ = filled(client).values()
        loaded = [client.retrieve(key) for key in (slow, slow, quick, quick)]
        assert [found is not None for found in loaded] == [True, False, True, True]
        assert "loads at most 32.0 KiB/s" in client.prepare_retrieve(slow).reason
        assert client.hit(slow) == 0
        status = client.status()
        assert status["use"]["tenants"]["slow"]["limited"] == 3
        record = next(each for each in client.call("RECENT", m.Recent()).records if each.reason)
        assert (record.request, record.outcome, record.reason) == ("RETRIEVE", "miss", "bandwidth")


def test_what_a_lookup_paid_for_is_copied_once() -> None:
    rate = LoadRate(100.0, lasts_s=10.0)
    rate.take(250.0, 0.0)
    assert rate.room(0.0) == 50.0
    assert rate.may_copy(250.0, 0.0)
    rate.copied(200.0)
    assert (rate.room(0.0), rate.paid) == (50.0, 50.0), "a load that was paid for"
    rate.copied(150.0)
    assert (rate.room(0.0), rate.paid) == (-50.0, 0.0), "half a load that was not"
    assert not rate.may_copy(1.0, 0.0)
    assert rate.may_copy(1.0, 1.0)
    for second in range(100):
        rate.take(100.0, float(second))
    assert rate.paid == 100.0 * (10.0 + BURST_S + WAIT_S), "no more than lookups of a ticket's lifetime"


@pytest.mark.parametrize("server", ["512KiB/s"], indirect=True)
def test_loads_from_l2_wait_for_their_time(server: ServerProcess) -> None:
    with server.client() as client, server.client() as other:
        slow, quick, _ = filled(client).values()
        client.call("CLEAR", m.Clear())
        began = time.monotonic()
        reply = client.lookup(slow)
        assert other.hit(quick) == CHUNK * CHUNKS
        quick_s = time.monotonic() - began
        assert client.settled(reply).hit_tokens == CHUNK * CHUNKS
        slow_s = time.monotonic() - began
        least_s = CHUNKS // 16 * 16 * CHUNK_BYTES / (512 << 10) - BURST_S
        assert slow_s >= least_s > 0.9
        assert quick_s < slow_s, "no one waits for the tenant's bucket but the tenant"


def test_a_tenants_loads_leave_room_for_those_of_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No load ends here: the tier is slow for longer than the test takes."""
    install(tmp_path, "slowed-kvf", {"tier.slowed": slowed_tier.__name__})
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}")
    seconds = tmp_path / "seconds"
    seconds.write_text("0")
    tier = ("l2.0.use=slowed", f"l2.0.seconds={seconds}", "l2.0.timeout_s=600")
    with ServerProcess(*TENANTS, *tier, "tenants.slow.load_bandwidth=100GB/s") as server, server.client() as client:
        registered = client.register()
        slow = [key_for(registered, [number] * CHUNK, cache_salt=SALTS[0]) for number in range(MOST_LOADS + 1)]
        quick = key_for(registered, [1] * CHUNK, cache_salt=SALTS[1])
        for key in (*slow, quick):
            client.store(key, b"k")
        wait_until(lambda: not client.status()["l2"][0]["write_pending"], what="the writes to the tier")
        client.call("CLEAR", m.Clear())
        seconds.write_text("300")
        assert [client.lookup(key).pending for key in slow] == [*[True] * MOST_LOADS, False]
        assert client.lookup(quick).pending, "another tenant still loads"
        assert client.status()["lookups"]["misses"]["bandwidth"] == 1
        server.kill9()
