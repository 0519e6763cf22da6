"""Quotas and promises in a folder: eight processes that write at once, and a server that is killed and starts again."""

from __future__ import annotations

import os
import time
from pathlib import Path

from kvframework.api.keys import retain_of
from kvframework.api.tier import Outcome, Terms
from tests.quota.test_redis import CHUNK, DAY_S, MIB, SETTINGS, prompt
from tests.quota.writers import TENANT, key_of, open_tier, soon, writing
from tests.support.server_process import ServerProcess
from tests.support.waiting import wait_until
from tests.support.wire_client import key_for

SALT = "planted-salt-of-a-customer"


def held_bytes(folder: Path) -> int:
    """The bytes of values. What a writer replaces is unlinked before its successor is there, so a walk is enough."""
    held = 0
    for place, _, names in os.walk(folder):
        for name in names:
            if len(Path(place).relative_to(folder).parts) == 1 and "." not in name:
                try:
                    held += os.stat(Path(place) / name).st_size
                except FileNotFoundError:
                    continue
    return held


def test_eight_writers_keep_to_a_quota_in_a_shared_folder(tmp_path: Path) -> None:
    most, nbytes = 64 * MIB, 64 << 10
    folder = tmp_path / "l2"
    options = {"path": str(folder), "capacity": 1 << 30, "shared": True}
    open_tier("filesystem", options).close()
    seen = []
    with writing("filesystem", options, most=most, nbytes=nbytes, seconds=8.0) as running:
        while running():
            seen.append(held_bytes(folder))
            time.sleep(0.2)
    seen.append(held_bytes(folder))
    assert max(seen) <= most * 1.02
    assert seen[-1] >= most * 0.95


def test_a_promised_value_makes_no_room_and_keeps_its_time(tmp_path: Path) -> None:
    tier = open_tier("filesystem", {"path": str(tmp_path / "l2"), "capacity": 1 << 30})
    try:
        salt = b"salt-of-a-tenant"
        first, second, third = (key_of(salt) for _ in range(3))
        value = memoryview(bytes(1000))
        for key in (first, second):
            assert tier.admit([Terms(key, TENANT, 2500, 1000)], deadline=soon()) == [Outcome.STORED]
            assert tier.put([key], [[value]], deadline=soon()) == [Outcome.STORED]
        promise = Terms(first, TENANT, 2500, until=time.time() + DAY_S)
        assert tier.admit([promise, Terms(third, TENANT, 2500, until=1.0)], deadline=soon()) == [
            Outcome.STORED,
            Outcome.MISSING,
        ]
        tier.touch([first], deadline=soon())
        tier.put([first], [[value]], deadline=soon())
        times = {each.key: each.used_at for each in tier.scan(deadline=soon())}
        assert (times[first] or 0) > time.time() + DAY_S / 2
        assert tier.admit([Terms(third, TENANT, 2500, 1000)], deadline=soon()) == [Outcome.STORED]
        assert tier.contains([first, second], deadline=soon()) == [Outcome.FOUND, Outcome.MISSING]
    finally:
        tier.close()


def test_kv_that_a_customer_pays_for_is_there_after_the_server_was_killed(tmp_path: Path) -> None:
    """Others fill a folder of 24 objects, and the quota of eight; two promised ones outlive that and a kill -9."""
    disk = ("l2.0.use=filesystem", f"l2.0.path={tmp_path / 'l2'}", "l2.0.capacity=832KiB")
    with ServerProcess(*SETTINGS, *disk) as server:
        with server.client() as client:
            registered = client.register()
            paid = key_for(registered, prompt(1, 2), cache_salt=SALT, retain=retain_of(DAY_S))
            assert client.store(paid, b"p") is not None
            wait_until(lambda: client.status()["l2"][0]["promised"] == 2, 60, "the promise")
            for number in range(2, 14):
                salt = SALT if number % 2 else ""
                client.store(key_for(registered, prompt(number, 4), cache_salt=salt), b"x")
                wait_until(lambda: client.status()["l2"][0]["write_pending"] == 0, 60, "the writes")
            status = client.status()["l2"][0]
            assert status["evicted"] > 0
            assert status["details"]["tenants"]["customer"]["bytes"] <= 256 << 10
        server.kill9()
        server.start()
        with server.client() as client:
            registered = client.register()
            paid = key_for(registered, prompt(1, 2), cache_salt=SALT)
            assert client.hit(paid) == 2 * CHUNK
            assert client.retrieve(paid) == b"p" * (2 << 15)
            assert client.hit(key_for(registered, prompt(3, 4), cache_salt=SALT)) == 0
