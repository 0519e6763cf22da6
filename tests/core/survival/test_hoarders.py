"""One client never frees what it pins, or uses up what others are granted: other clients go on as if it were alone."""

from __future__ import annotations

import contextlib
import os
import sys
from typing import Any

import pytest
from msgspec.structs import replace

from kvf_observe.explain import why
from kvframework.api.requests import CacheKey
from kvframework.errors import AlreadyRegistered
from kvframework.wire import messages as m
from tests.support.processes import ran
from tests.support.server_process import ServerProcess
from tests.support.waiting import wait_until
from tests.support.wire_client import WireClient, key_for

# Room for 32 chunks of 32 KiB.
CAPACITY, ROOM = "1MiB", 32


class Hoarder:
    """A client that frees nothing. Its prompts fill L1."""

    def __init__(self, client: WireClient) -> None:
        self._client = client
        registered = client.register(1)
        self._keys = [key_for(registered, [1 + number] * 256, request_id="hoards") for number in range(ROOM)]
        assert all(client.store(key, b"h") for key in self._keys)

    def look_up(self) -> int:
        return sum(look_up(self._client, key).hit_tokens == 256 for key in self._keys)

    def load(self) -> int:
        return sum(self._client.prepare_retrieve(key).hit for key in self._keys)


def most_pinned(server: ServerProcess) -> dict[str, Any]:
    return dict(max(server.status()["messaging"]["sessions"], key=lambda each: each["pinned_bytes"]))


def keys_of(registered: m.Registered, first: int, count: int) -> list[CacheKey]:
    return [key_for(registered, [first + number] * 256) for number in range(count)]


def look_up(client: WireClient, key: CacheKey, *instances: int) -> m.LookupReply:
    reply: m.LookupReply = client.call("LOOKUP", m.Lookup(replace(key, worker_id=None), grant=instances))
    return reply


def store_nine(client: WireClient, first: int = 1000, instance_id: int = 2) -> int:
    """Store nine prompts; return how many of them are hits once all are stored."""
    with contextlib.suppress(AlreadyRegistered):
        client.register(instance_id)
    namespace = bytes.fromhex(client.status()["namespaces"][0])
    keys = [key_for(m.Registered(namespace, None), [first + number] * 256) for number in range(9)]  # type: ignore[arg-type]
    for key in keys:
        client.store(key, b"n", instance_id)
    found = [look_up(client, key) for key in keys]
    for each in found:
        if each.ticket:
            client.call("FREE_LOOKUP_LOCKS", m.TicketRef(each.ticket))
    return sum(each.hit_tokens == 256 for each in found)


def test_hits_that_are_never_freed_do_not_keep_another_engine_from_storing() -> None:
    with ServerProcess(capacity=CAPACITY) as server, server.client() as greedy, server.client() as other:
        hoarder = Hoarder(greedy)
        assert hoarder.look_up() == ROOM, "alone, it may pin all of L1"
        assert most_pinned(server)["pinned_bytes"] == 1 << 20
        assert store_nine(other) == 9
        seen = most_pinned(server)
        assert 0 < seen["pinned_bytes"] <= 1 << 19
        assert seen["over_share"] >= ROOM // 2
        assert server.status()["l1"]["counters"]["over_share"] == seen["over_share"]
        assert server.status()["l1"]["counters"]["lapsed"] == 0, "that is for leases that were too short"
        assert hoarder.look_up() > 0, "its newer prompts are hits"
        assert store_nine(other, 2000) == 9
        run = ran(
            sys.executable,
            "-m",
            "kvframework.cli.main",
            "status",
            "--endpoint",
            server.endpoint,
            code=None,
            env={**os.environ, "COLUMNS": "200"},
        )
        assert f"(process {os.getpid()})" in run.stdout
        assert "ended or refused by pin_share" in run.stdout


def test_loads_that_are_never_ended_do_not_keep_another_engine_from_storing() -> None:
    with (
        ServerProcess("server.retrieve_lease_s=1", capacity=CAPACITY) as server,
        server.client() as greedy,
        server.client() as other,
    ):
        hoarder = Hoarder(greedy)
        assert hoarder.load() == ROOM, "alone, it may load all of L1"

        def stores() -> bool:
            hoarder.load()
            return store_nine(other) == 9

        wait_until(stores, 30, "room for another")
        for first in (2000, 3000, 4000):
            assert hoarder.load() < ROOM
            assert most_pinned(server)["pinned_bytes"] <= 1 << 19
            assert store_nine(other, first) == 9
        records = other.call("RECENT", m.Recent()).records
        misses = [each for each in records if each.request_id == "hoards" and each.outcome == "miss"]
        # Its unpinned prompts made room for others.
        assert {each.reason for each in misses} == {"dropped_share", "evicted"}
        assert any("the load was refused, because the client pins its full share" in why(each, 0.0) for each in misses)


@pytest.mark.parametrize("is_granted", [True, False])
def test_an_engine_of_several_sessions_takes_no_hit_of_its_own(is_granted: bool) -> None:
    """Its worker finds L1 full of its scheduler's hits, alone on the server."""
    with ServerProcess(capacity=CAPACITY) as server, server.client() as scheduler, server.client() as worker:
        keys = keys_of(worker.register(2), 1, ROOM)
        for key in keys:
            worker.store(key, b"n", 2)
        if is_granted:
            (grant,) = look_up(scheduler, keys[0], 2).grants
            assert worker.call("COMMIT_RETRIEVE", m.Commit(grant.lease)).held
        else:  # as a server-driven transport loads, too
            assert look_up(scheduler, keys[0]).hit_tokens == 256
            worker.call("COMMIT_RETRIEVE", m.Commit(worker.prepare_retrieve(keys[0], 2).lease))
        for key in keys:
            assert look_up(scheduler, key).hit_tokens == 256
        assert store_nine(worker) == 0, "as it was before: there is no room"
        assert server.status()["l1"]["counters"]["over_share"] == 0
        assert worker.prepare_retrieve(keys[0], 2).hit
        with server.client() as other:
            assert store_nine(other, instance_id=3) == 9, "another engine is not in its way"


def test_a_worker_is_not_of_a_scheduler_that_has_ended() -> None:
    """Its scheduler ends while it loads, and another one goes on with it: the two are an engine alone."""
    with ServerProcess(capacity=CAPACITY) as server, server.client() as worker:
        keys = keys_of(worker.register(2), 1, ROOM)
        for key in keys:
            worker.store(key, b"n", 2)
        with server.client() as before:
            (grant,) = look_up(before, keys[0], 2).grants
        wait_until(lambda: len(server.status()["messaging"]["sessions"]) == 2, what="the end of the scheduler")
        assert worker.call("COMMIT_RETRIEVE", m.Commit(grant.lease)).held
        more = keys_of(m.Registered(keys[0].namespace, None), 1000, 1)  # type: ignore[arg-type]
        assert worker.store(more[0], b"n", 2), "L1 is full, so it needs room"
        with server.client() as scheduler:
            found = [look_up(scheduler, key, 2) for key in [*keys, *more]]
            (grant,) = next(each for each in found if each.grants).grants
            assert worker.call("COMMIT_RETRIEVE", m.Commit(grant.lease)).held
            assert worker.prepare_retrieve(more[0], 2).hit
        assert server.status()["l1"]["counters"]["over_share"] == 0
