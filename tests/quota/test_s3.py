"""Quotas and promises in a real SeaweedFS: eight processes that write at once, and restarts of everything."""

from __future__ import annotations

import time
from pathlib import Path

import obstore
import pytest

from kvframework.api.keys import retain_of
from kvframework.api.tier import Outcome, Terms
from tests.quota.test_redis import CHUNK, DAY_S, MIB, SALT, SETTINGS, prompt
from tests.quota.writers import TENANT, key_of, soon, writing
from tests.support.s3_server import BUCKET, SeaweedServer, s3_store
from tests.support.s3_tier import open_s3_tier, write_credentials
from tests.support.server_process import ServerProcess
from tests.support.waiting import wait_until
from tests.support.wire_client import key_for


def held_bytes(server: SeaweedServer) -> int:
    """The least of three listings: a listing takes a while, and counts values as well as those that take their place
    meanwhile."""
    listings = [obstore.list(s3_store(server), prefix="tier/", chunk_size=1000) for _ in range(3)]
    found = ((each for page in pages for each in page if "kvframework" not in each["path"]) for pages in listings)
    return min(sum(each["size"] for each in listing) for listing in found)


def test_eight_writers_keep_to_a_quota(tmp_path: Path) -> None:
    most, nbytes = 128 * MIB, 256 << 10
    with SeaweedServer(tmp_path) as server:
        options = {"endpoint": server.endpoint, "credentials_file": str(write_credentials(tmp_path / "credentials"))}
        seen = []
        with writing("s3", options, most=most, nbytes=nbytes, seconds=25.0) as running:
            while running():
                seen.append(held_bytes(server))
                time.sleep(0.5)
        seen.append(held_bytes(server))
    assert max(seen) <= most * 1.02
    assert max(seen) >= most * 0.95, "the quota is used"


def test_a_bucket_keeps_what_its_operator_says_no_rule_deletes(tmp_path: Path) -> None:
    with SeaweedServer(tmp_path) as server:
        credentials = str(write_credentials(tmp_path / "credentials"))
        key, until = key_of(b"salt-of-a-tenant"), time.time() + DAY_S
        for keeps in (False, True):
            tier = open_s3_tier(server.endpoint, credentials_file=credentials, keeps=keeps)
            try:
                assert tier.admit([Terms(key, TENANT, MIB, 5)], deadline=soon()) == [Outcome.STORED]
                assert tier.put([key], [[memoryview(b"value")]], deadline=soon()) == [Outcome.STORED]
                promise = Terms(key, TENANT, MIB, until=until)
                outcome = Outcome.STORED if keeps else Outcome.FAILED
                assert tier.admit([promise], deadline=soon()) == [outcome]
                assert bool(keeps) != ("keeps is false" in "\n".join(tier.problems()))
            finally:
                tier.close()


@pytest.mark.timeout(400)
def test_kv_that_a_customer_pays_for_is_there_after_every_process_was_killed(tmp_path: Path) -> None:
    """Two promised objects of 32 KiB outlive forty later ones in a quota of eight, a sweep, and kill -9 of all."""
    credentials = write_credentials(tmp_path / "credentials")
    with SeaweedServer(tmp_path) as store:
        bucket = (
            "l2.0.use=s3",
            f"l2.0.url=s3://{BUCKET}/tier",
            f"l2.0.endpoint={store.endpoint}",
            f"l2.0.credentials_file={credentials}",
            "l2.0.keeps=true",
            "l2.0.capacity=512KiB",
            "l2.0.sweep_s=2",
            "l2.0.timeout_s=20",
        )
        with ServerProcess(*SETTINGS, *bucket) as server:
            with server.client() as client:
                registered = client.register()
                paid = key_for(registered, prompt(1, 2), cache_salt=SALT, retain=retain_of(DAY_S))
                assert client.store(paid, b"p") is not None
                wait_until(lambda: client.status()["l2"][0]["promised"] == 2, 60, "the promise")
                for number in range(2, 12):
                    client.store(key_for(registered, prompt(number, 4), cache_salt=SALT if number % 2 else ""), b"x")
                    wait_until(lambda: client.status()["l2"][0]["write_pending"] == 0, 60, "the writes")
                    time.sleep(1.0)  # so that the store's clock, of whole seconds, orders them
                wait_until(lambda: held_bytes(store) <= 512 << 10, 60, "the sweep")
            server.kill9()
            store.kill9()
            store.start()
            server.start()
            with server.client() as client:
                registered = client.register()
                paid = key_for(registered, prompt(1, 2), cache_salt=SALT)
                wait_until(lambda: client.hit(paid) == 2 * CHUNK, 60, "the store")
                assert client.retrieve(paid) == b"p" * (2 << 15)
                assert client.hit(key_for(registered, prompt(3, 4), cache_salt=SALT)) == 0
