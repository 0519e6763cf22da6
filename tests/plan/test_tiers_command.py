"""`kvframework tiers gc` on real stores, beside a real server."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from kvf_plan.retired import choose, open_tier
from kvframework.config.load import load_config
from kvframework.storage.l2.sealed_tier import L2Store
from kvframework.storage.namespaces import RECORD_BYTES, NamespaceRecord, record_key
from tests.core.cli.command import run
from tests.core.storage.node import DESC
from tests.support.redis_server import RedisServer
from tests.support.redis_tier import open_redis_tier
from tests.support.s3_server import BUCKET, SeaweedServer
from tests.support.s3_tier import write_credentials
from tests.support.server_process import ServerProcess
from tests.support.waiting import wait_until
from tests.support.wire_client import key_for

TOKENS = list(range(1024))
CHUNKS = 4
OTHER = {"model_name": "other", "hidden_dim_size": 16}
NAMESPACES = [bytes([number]) * 16 for number in range(3)]


@pytest.fixture(params=["redis", "filesystem", "s3"])
def settings(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[list[str]]:
    if request.param == "redis":
        with RedisServer(tmp_path) as redis:
            yield ["l2.0.use=redis", f"l2.0.url={redis.url}"]
    elif request.param == "filesystem":
        yield ["l2.0.use=filesystem", f"l2.0.path={tmp_path / 'l2'}", "l2.0.shared=true"]
    else:
        credentials = write_credentials(tmp_path / "credentials")
        with SeaweedServer(tmp_path) as weed:
            places = [f"url=s3://{BUCKET}/kv", f"endpoint={weed.endpoint}", f"credentials_file={credentials}"]
            yield ["l2.0.use=s3", *(f"l2.0.{place}" for place in places)]


def gc(settings: list[str], *arguments: str) -> dict[str, dict[str, object]]:
    options = [part for each in settings for part in ("--set", each)]
    done = run("tiers", "gc", "--json", *options, *arguments)
    assert (done.returncode, done.stderr) == (0, "")
    return {row["model"]: row for row in json.loads(done.stdout)["namespaces"]}


def test_beside_a_server_a_model_leaves_and_comes_back(settings: list[str]) -> None:
    with ServerProcess(*settings) as server, server.client() as client:
        one, two = client.register(), client.register(2, **OTHER)
        tiny, other = key_for(one, TOKENS), key_for(two, TOKENS, model_name="other")

        def store(filling: bytes) -> None:
            client.store(tiny, filling)
            client.store(other, filling, 2)
            wait_until(lambda: not any(tier["write_pending"] for tier in client.status()["l2"]), what="the writes")

        store(b"a")
        found = gc(settings)
        assert {model: row["values"] for model, row in found.items()} == {"tiny": CHUNKS, "other": CHUNKS}
        assert all(0 <= time.time() - float(str(row["used_at"])) < 60 for row in found.values())
        assert not any(row["retired"] for row in gc(settings, "--older-than", "1h", "--delete").values())
        dry = gc(settings, "--model", "other")
        assert [row["retired"] for row in dry.values()] == [model == "other" for model in dry]
        assert gc(settings) == found, "a dry run deletes nothing"
        deleted = gc(settings, "--model", str(found["other"]["namespace"])[:12], "--delete")["other"]
        assert (deleted["deleted"], deleted["deleted_bytes"]) == (CHUNKS, found["other"]["nbytes"])
        assert list(gc(settings)) == ["tiny"], "its record goes last"
        assert run("clear", "--yes", "--endpoint", server.endpoint).returncode == 0
        assert (client.hit(tiny), client.hit(other)) == (len(TOKENS), 0)
        store(b"b")
        assert run("clear", "--yes", "--endpoint", server.endpoint).returncode == 0
        assert (client.hit(tiny), client.hit(other)) == (len(TOKENS), len(TOKENS))


@pytest.fixture
def redis(tmp_path: Path) -> Iterator[RedisServer]:
    with RedisServer(tmp_path) as server:
        yield server


def write(redis: RedisServer, namespace: bytes, days: int | None, values: int = 1) -> None:
    """Values of a namespace whose record says that it was used so many days ago; None: an older release's record."""
    used_at = 0 if days is None else int(time.time()) - days * 86400
    packed = msgspec.msgpack.encode(NamespaceRecord("m", 1, DESC, used_at=used_at))
    record = (len(packed).to_bytes(4, "little") + packed).ljust(RECORD_BYTES, b"\0")
    store = L2Store(open_redis_tier(redis.url), timeout_s=20.0)
    keys = [namespace + number.to_bytes(56, "big") for number in range(values)]
    assert all(store.put([record_key(namespace), *keys], [memoryview(record), *[memoryview(b"x")] * values]))
    store.close()


def test_only_what_was_not_used_for_so_long(redis: RedisServer) -> None:
    for namespace, days in zip(NAMESPACES, (40, 20, None), strict=True):
        write(redis, namespace, days, 600)
    options = ("--set", "l2.0.use=redis", "--set", f"l2.0.url={redis.url}", "--older-than", "30d")
    done = run("tiers", "gc", *options)
    assert "40.0 days ago retired" in " ".join(done.stdout.split())
    assert "a dry run: --delete would delete 600 values" in done.stdout
    assert "deleted 600 values" in run("tiers", "gc", *options, "--delete").stdout
    left = json.loads(run("tiers", "gc", "--json", *options).stdout)["namespaces"]
    assert {row["namespace"]: row["values"] for row in left} == {each.hex(): 600 for each in NAMESPACES[1:]}


def test_a_namespace_that_comes_into_use_meanwhile_is_kept(redis: RedisServer) -> None:
    write(redis, NAMESPACES[0], 40)
    config = load_config(None, ["l2.0.use=redis", f"l2.0.url={redis.url}"])
    with open_tier(config, config.l2[0]) as tier:
        tier.read(time.monotonic() + 20)
        choose(tier.found.values(), (), 30 * 86400)
        write(redis, NAMESPACES[0], 0)
        tier.delete(time.monotonic() + 20)
        tier.read(time.monotonic() + 20)
    (contents,) = tier.found.values()
    assert (contents.in_use, contents.deleted, contents.model) == (True, 0, "m")


def test_errors_say_where_and_what_to_do(redis: RedisServer, tmp_path: Path) -> None:
    options = ["--set", "l2.0.use=redis", "--set", f"l2.0.url={redis.url}"]
    write(redis, NAMESPACES[0], 40)
    for wrong, said in (
        (["--delete"], "choose the KV to delete"),
        (["--older-than", "soon"], "expected a time such as"),
    ):
        refused = run("tiers", "gc", *options, *wrong)
        assert (refused.returncode, said in " ".join(refused.stderr.replace("│", " ").split())) == (2, True)
    unknown = run("tiers", "gc", *options, "--model", "n")
    assert (unknown.returncode, unknown.stderr.splitlines()[1:]) == (2, ["  expected: m"])
    redis.stop()
    folder = ["--set", "l2.1.use=filesystem", "--set", f"l2.1.path={tmp_path / 'l2'}"]
    down = run("tiers", "gc", *options, *folder)
    assert (down.returncode, "no KV is selected" in down.stdout) == (2, True)
    assert "[[l2]] #1: redis at 127.0.0.1" in down.stderr
