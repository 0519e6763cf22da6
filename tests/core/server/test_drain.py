"""A server writes what only L1 holds to its tiers before it ends: for want of engines, by SIGTERM, by DRAIN. The end of
a server whose plugins do not let go of everything."""

from __future__ import annotations

import json
import logging
import re
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from kvframework.api.plugin import NoOptions
from kvframework.api.tier import Node, TierProvider, hookimpl
from kvframework.config.load import load_config
from kvframework.errors import ConfigError, PluginBroken
from kvframework.registry.registry import PluginRegistry
from kvframework.server import Server
from kvframework.service.operator_requests import Drain
from kvframework.storage.l2.writer import DRAIN_NICE
from kvframework.wire import messages as m
from tests.core.cli.command import COMMAND, environment, run
from tests.core.server.gated_transport import GatedPlugin
from tests.core.server.in_process import serving
from tests.core.storage.tier import MemoryTier
from tests.support.held_server import HeldServer
from tests.support.redis_server import RedisServer
from tests.support.server_process import ServerProcess
from tests.support.waiting import wait_until
from tests.support.wire_client import WireClient, key_for

pytest.importorskip("kvf_filesystem")
CHUNKS = 40
TOKENS = list(range(256 * CHUNKS))
EVICTS = ("l1.high_watermark=0.9", "l1.low_watermark=0.8")


def drain(server: ServerProcess, *options: str) -> tuple[int, dict[str, Any]]:
    done = run("drain", "--json", "--endpoint", server.endpoint, *options)
    return done.returncode, json.loads(done.stdout)


def niceness(server: ServerProcess) -> list[int]:
    """Of each thread."""
    threads = [each.read_text() for each in Path(f"/proc/{server.pid}/task").glob("*/stat")]
    return [int(each.rpartition(")")[2].split()[16]) for each in threads]


def ended(server: ServerProcess) -> int:
    process, server.process = server.process, None
    assert process is not None
    return int(process.wait(120))


@contextmanager
def filled(kind: type[ServerProcess], tier: str, *settings: str, policy: str = "write_back") -> Iterator[ServerProcess]:
    """`tier` is a URL of Redis, or a folder."""
    use = [f"l2.0.url={tier}", "l2.0.timeout_s=1"] if ":" in tier else [f"l2.0.path={tier}", "l2.0.capacity=64MiB"]
    name = "redis" if ":" in tier else "filesystem"
    with kind(f"l2.0.use={name}", *use, f"l2.0.write_policy={policy}", *EVICTS, *settings) as server:
        with server.client() as client:
            client.store(key_for(client.register(), TOKENS), b"x")
            assert not client.status()["l2"][0]["stored"]
        yield server


@pytest.mark.parametrize("policy", ["write_back", "write_through_selective"])
@pytest.mark.parametrize("tier", ["filesystem", pytest.param("redis", marks=pytest.mark.redis)])
@pytest.mark.parametrize("way", ["idle", "SIGTERM", "DRAIN"])
def test_what_only_l1_held_is_in_the_tier_after_the_end(
    way: str, tier: str, policy: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    place = request.getfixturevalue("redis").url if tier == "redis" else str(tmp_path)
    end = {"idle": "server.idle_stop_s=3", "SIGTERM": "server.drain_s=60", "DRAIN": "server.drain_s=0"}[way]
    # A queue that is smaller than what is left.
    with filled(ServerProcess, place, "l2.0.write_queue=8", end, policy=policy) as server:
        if way == "DRAIN":
            status, shown = drain(server)
            assert (status, shown["left"], shown["written"]) == (0, 0, CHUNKS)
        elif way == "SIGTERM":
            server.process.terminate()
        assert ended(server) == 0
        assert f"drained: {CHUNKS} objects are written, 0 (0 B) are left" in server.log
        server.set("server.idle_stop_s=0")
        server.start()
        with server.client() as client:
            assert client.hit(key_for(client.register(), TOKENS)) == len(TOKENS)


@pytest.mark.redis
def test_until_the_time_of_the_shorter_drain_loads_are_answered_and_stores_find_no_room(redis: RedisServer) -> None:
    with filled(ServerProcess, redis.url) as server:
        redis.sigstop()
        command = [*COMMAND, "drain", "--timeout", "10m", "--endpoint", server.endpoint]
        first = subprocess.Popen(command, stdout=subprocess.PIPE, env=environment())
        with server.client() as client:
            registered = client.register()
            wait_until(lambda: client.status()["drain"]["left"] == CHUNKS, what="the drain")
            wait_until(lambda: DRAIN_NICE in niceness(server), what="a writing thread that leaves the cores to others")
            assert client.hit(key_for(registered, TOKENS)) == len(TOKENS)
            plan = client.call("PREPARE_STORE", m.Prepare(key_for(registered, range(5, 5 + 512)), 1))
            assert (plan.lease, plan.outcome.dropped) == ("", 2)
        status, shown = drain(server, "--timeout", "3s")
        assert (status, shown["left"], shown["written"]) == (1, CHUNKS, 0)
        assert shown["left_bytes"] > 0
        assert shown["tiers"][0].startswith(f"redis: {CHUNKS} left, last error: [storage.tier]")
        said, _ = first.communicate(timeout=60)
        assert (first.returncode, ended(server)) == (1, 0)
        assert f"not written: {CHUNKS} objects" in said.decode()
        assert shown["tiers"][0] in said.decode()


@pytest.mark.redis
def test_a_keeper_waits_for_a_drain_that_a_signal_begins(redis: RedisServer) -> None:
    with filled(HeldServer, redis.url, "server.drain_s=10") as server:
        redis.sigstop()
        began = time.monotonic()
        server.process.terminate()
        assert ended(server) == 0
        assert time.monotonic() - began > 10
        assert f"drained: 0 objects are written, {CHUNKS} (" in server.log


@pytest.mark.redis
def test_a_signal_ends_a_drain_at_once(redis: RedisServer) -> None:
    with filled(ServerProcess, redis.url) as server:
        redis.sigstop()
        with subprocess.Popen([*COMMAND, "drain", "--endpoint", server.endpoint], env=environment()) as asking:
            wait_until(lambda: server.status()["drain"]["done"] is False, what="the drain")
            server.process.terminate()
            assert (ended(server), asking.wait(60)) == (0, 1)
        assert f"drained: 0 objects are written, {CHUNKS} (" in server.log


def test_a_cancelled_drain_neither_writes_on_beside_the_next_one_nor_ends_the_server() -> None:
    left, ended = {b"key"}, threading.Event()
    store = SimpleNamespace(name="tier", read_only=False, last_error="")
    writer = SimpleNamespace(store=store, left=lambda: left, write_rest=lambda: len(left), order_rest=bool)
    table = SimpleNamespace(objects=list, closed=False)
    drain = Drain(cast("Any", SimpleNamespace(table=table, tiers=SimpleNamespace(writers=[writer]))), ended.set)

    def at_work() -> int:
        return sum(thread.name == "kvf-drain" for thread in threading.enumerate())

    for _ in range(3):
        drain.begin(60)
        drain.tick()
        drain.cancel()
    drain.begin(60)
    drain.tick()
    wait_until(lambda: at_work() == 1, 2, "the end of the cancelled drains")
    left.clear()
    wait_until(lambda: drain.status().done, what="the end of the last drain")
    drain.cancel()
    wait_until(lambda: at_work() == 0, what="its thread's end")
    drain.begin(60)
    assert not drain.status().done
    assert not ended.is_set()


def test_a_keeper_ends_with_a_server_that_drained_also_what_an_earlier_one_held(tmp_path: Path) -> None:
    with filled(HeldServer, str(tmp_path)) as server:
        server.kill9()
        server.start()
        assert drain(server)[1]["written"] == CHUNKS
        assert ended(server) == 0


def test_without_a_tier_all_is_left() -> None:
    with ServerProcess() as server:
        with server.client() as client:
            client.store(key_for(client.register(), TOKENS), b"x")
        status, shown = drain(server)
        assert (status, shown["left"], shown["tiers"], ended(server)) == (1, CHUNKS, [], 0)


@pytest.mark.redis
def test_what_was_used_last_is_written_until_the_tier_is_full(redis: RedisServer) -> None:
    redis_tier = ("l2.0.use=redis", f"l2.0.url={redis.url}", "l2.0.write_policy=write_back", "l2.0.timeout_s=20")
    with ServerProcess(*redis_tier, *EVICTS) as server, redis.client() as store:
        with server.client() as client:
            registered = client.register()
            prompts = [key_for(registered, [number] * 256) for number in range(CHUNKS)]
            for key in prompts:
                client.store(key, b"x")
            client.hit(prompts[3])
        store.config_set("maxmemory", store.info()["used_memory"] + CHUNKS // 4 * (32 << 10))
        status, shown = drain(server)
        assert (status, ended(server)) == (1, 0)
        assert f"are left; {shown['tiers'][0]}" in server.log
        assert "last error: Redis is full" in server.log
        store.config_set("maxmemory", 0)
        server.start()
        with server.client() as client:
            client.register()
            found = [number for number, key in enumerate(prompts) if client.hit(key)]
    # A batch may be refused in part.
    assert min({*found} - {3}) > 7, found


@pytest.mark.parametrize("time", ["-1s", "2h", "soon", "", "nan"])
def test_a_wrong_time_is_refused(time: str) -> None:
    done = run("drain", "--timeout", time)
    assert (done.returncode, "is not a time" in done.stderr) == (2, True)


def test_without_a_server_it_says_so(tmp_path: Path) -> None:
    done = run("drain", "--endpoint", f"ipc://{tmp_path}/none.sock")
    assert (done.returncode, "no server answers" in done.stderr) == (2, True)


def test_an_arena_that_a_copy_still_uses_is_no_error(caplog: pytest.LogCaptureFixture) -> None:
    with serving() as server:
        held = server.service.storage.table.arena[:16]
    assert "the arena stays mapped, because a transport still uses it after its last request" in caplog.text
    held.release()


def test_a_transport_that_cannot_close_does_not_keep_storage_open(caplog: pytest.LogCaptureFixture) -> None:
    plugin = GatedPlugin()

    def fail() -> None:
        raise RuntimeError("jammed")

    plugin.transport.close = fail  # type: ignore[method-assign]
    caplog.set_level(logging.INFO)
    with serving("transport.1.use=gated", plugins=(plugin,)):
        pass
    assert "closing transport gated failed" in caplog.text
    assert caplog.records[-1].message == "stopped"


def test_a_client_that_lives_is_not_said_to_have_ended(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    with serving() as server:
        client = WireClient(server.endpoint, timeout=20)
        client.register(instance_id=50)
    client.close()
    (line,) = (each.message for each in caplog.records if "1 instance" in each.message)
    assert line.startswith("closed the session of ")
    assert "because the server stops: 1 instance, 0 tickets and " in line


# How many loads and writes call a tier at once: by its `[[l2]]` table, else by its provider.


def threads(kind: str) -> int:
    return sum(bool(re.fullmatch(rf"kvf-{kind}-filesystem-\d+", thread.name)) for thread in threading.enumerate())


@pytest.mark.parametrize(
    ("settings", "loads", "writes"), [((), 4, 2), (("l2.0.loads=1", "l2.0.writes=3"), 1, 3), (("l2.0.writes=1",), 4, 1)]
)
def test_as_many_as_the_table_or_the_provider_says_and_by_its_write_policy(
    tmp_path: Path, settings: tuple[str, ...], loads: int, writes: int
) -> None:
    disk = ("l2.0.use=filesystem", f"l2.0.path={tmp_path / 'l2'}", "l2.0.capacity=1GiB")
    with serving(*disk, *settings, "l2.0.write_policy=write_through_selective") as server:
        (tier,) = server.service.storage.status()["l2"]  # type: ignore[misc]
        assert (tier["loads"], tier["writes"]) == (loads, writes)
        assert tier["write_policy"] == "write_through_selective"
        assert (threads("prefetch"), threads("writer")) == (loads + 1, writes), "one more asks"
    assert (threads("prefetch"), threads("writer")) == (0, 0)


@pytest.mark.parametrize("value", [0, -1, 65])
def test_another_number_is_refused(value: int) -> None:
    for name in ("loads", "writes"):
        with pytest.raises(ConfigError, match=name):
            load_config(None, ("l2.0.use=filesystem", "l2.0.path=/tmp/none", f"l2.0.{name}={value}"))
        with pytest.raises(PluginBroken, match=f"{name} is {value}"):
            TierProvider(name="t", summary="s", create=lambda _options, _context: None, **{name: value})  # type: ignore[arg-type,return-value]


# A tier gets the node that it is part of before the server serves, and may stop the start.


class AttachedTier(MemoryTier):
    node: Node | None = None
    error: Exception | None = None

    def attach(self, node: Node) -> None:
        if self.error is not None:
            raise self.error
        self.node = node


class Plugin:
    def __init__(self, tier: AttachedTier) -> None:
        self.tier = tier

    @hookimpl
    def kvf_tiers(self) -> list[TierProvider[NoOptions]]:
        return [TierProvider(name="attached", summary="attached", create=lambda _options, _context: self.tier)]


def test_the_node_of_a_tier_knows_what_the_server_knows() -> None:
    tier = AttachedTier()
    with serving("l2.0.use=attached", plugins=(Plugin(tier),)) as server, WireClient(server.endpoint) as client:
        node = tier.node
        assert node.identity.boot_id == server.service.boot_id
        assert node.identity.chunk_size == server.service.chunk_size
        assert node.identity.hasher == server.service.hasher.fingerprint
        assert node.models() == {}
        registered = client.register()
        assert node.models() == {"tiny": {registered.namespace}}


def test_an_error_of_attach_stops_the_start() -> None:
    tier = AttachedTier()
    tier.error = RuntimeError("no room")
    registry = PluginRegistry()
    registry.register(Plugin(tier), distribution="tests")
    server = Server(load_config(None, ("l2.0.use=attached", "l1.capacity=16MiB")), registry)
    with pytest.raises(PluginBroken, match="attach raised RuntimeError: no room"):
        server.bind()
    server.close()
