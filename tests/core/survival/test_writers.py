"""A worker that is stopped between PREPARE and COMMIT, and wakes up late: its ranges are nobody's until it has said so,
or is dead, and then they are everybody's."""

from __future__ import annotations

import signal

import pytest

from kvframework.wire import messages as m
from tests.core.survival.actor import Actor
from tests.support.server_process import ServerProcess, server_fixture
from tests.support.waiting import wait_until
from tests.support.wire_client import WireClient, key_for

OBJECTS = 32  # as many as L1 has room for
CHUNKS = 4
PATIENCE_S = 20.0


server = server_fixture("server.store_lease_s=0.5", capacity="1MiB", scope="module")


def l1(watcher: WireClient) -> dict[str, int]:
    found: dict[str, int] = watcher.status()["l1"]
    return found


def fill_l1(watcher: WireClient, registered: m.Registered, first: int, count: int) -> list[int]:
    """Others at work: more than L1 holds, every byte of what is still there checked. The tokens that are there."""
    there = []
    for token in range(first, first + count):
        watcher.store(key_for(registered, [token] * 256), b"%04d" % token)
    for token in range(first, first + count):
        found = watcher.retrieve(key_for(registered, [token] * 256))
        if found is not None:
            assert found == (b"%04d" % token) * (len(found) // 4), f"foreign bytes in {token}"
            there.append(token)
    return there


@pytest.mark.parametrize("end", ["abort", "commit", "eof"])
def test_the_ranges_of_a_stopped_writer_come_back(server: ServerProcess, watcher: WireClient, end: str) -> None:
    registered = watcher.register()
    key = key_for(registered, [5] * 256 * CHUNKS)
    with Actor(server.endpoint, 50) as writer:
        assert writer.ask("prepare_store", 5, CHUNKS) == [CHUNKS, 0, 0, 0]
        writer.signal(signal.SIGSTOP)
        wait_until(lambda: l1(watcher)["quarantined_bytes"] == CHUNKS * (32 << 10), PATIENCE_S, "the quarantine")
        assert watcher.lookup(key).hit_tokens == 0
        there = fill_l1(watcher, registered, 1000, 2 * OBJECTS)
        assert len(there) == OBJECTS - CHUNKS, "all of L1 but what is quarantined"
        assert watcher.store(key, b"MINE") is not None, "the key is free for another writer"

        if end == "eof":
            writer.signal(signal.SIGKILL)
        else:
            writer.tell("write", "LATE")
            writer.signal(signal.SIGCONT)
            writer.hear()
            assert l1(watcher)["quarantined_bytes"] > 0, "it lives and has said nothing"
            assert writer.ask(end) == (0 if end == "commit" else CHUNKS)
        wait_until(lambda: l1(watcher)["quarantined_bytes"] == 0, PATIENCE_S, "the ranges")

        found = watcher.retrieve(key)
        assert found is not None
        assert found == b"MINE" * (len(found) // 4)
        assert len(fill_l1(watcher, registered, 2000, 2 * OBJECTS)) == OBJECTS, "all of L1"
    after = l1(watcher)
    assert after["used_bytes"] + after["free_bytes"] == after["capacity_bytes"]
    assert (after["write_leases"], after["pins"]) == (0, 0)


def test_kill_9_between_prepare_and_commit_publishes_nothing(server: ServerProcess, watcher: WireClient) -> None:
    registered = watcher.register()
    key = key_for(registered, [6] * 256 * CHUNKS)
    with Actor(server.endpoint, 50) as writer:
        writer.ask("prepare_store", 6, CHUNKS)
        assert watcher.prepare_store(key).outcome.in_flight == CHUNKS
        writer.ask("write", "DEAD")
        writer.signal(signal.SIGKILL)
        wait_until(lambda: 50 not in watcher.status()["non_gpu_instance_ids"], PATIENCE_S, "the end of the writer")
    assert watcher.lookup(key).hit_tokens == 0
    assert watcher.retrieve(key) is None
    mine = watcher.store(key, b"MINE")
    assert mine is not None
    assert mine.outcome.stored == CHUNKS, "its ranges are free again"
    assert l1(watcher)["quarantined_bytes"] == 0
