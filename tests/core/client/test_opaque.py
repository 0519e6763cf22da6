"""Objects by size and group: an engine's own keys, its lookups and stores, and its processes that share one session."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence

import pytest

from kvframework.api.keys import DIGEST_BYTES
from kvframework.client import KVClient
from kvframework.client.opaque import KeyGroup, OpaqueInstance, OpaqueObjects, Prompt, granted_objects, map_arena
from kvframework.errors import ServerGone
from tests.support.server_process import ServerProcess
from tests.support.waiting import wait_until

# Full attention in chunks of 16 tokens, a window of 24 tokens in chunks of 8, a state each 32 tokens.
SIZES, TOKENS, WINDOWS = (4096, 8192, 12000), (16, 8, 32), (0, 24, 32)


@pytest.fixture
def instance(client: KVClient) -> Iterator[OpaqueInstance]:
    made = OpaqueInstance(client, OpaqueObjects(5, "tiny", SIZES, 8, "test-blocks"))
    wait_until(lambda: made.is_ready, 20, "the registration")
    yield made
    made.close()


def digest(prompt: str, group: int, chunk: int) -> bytes:
    return hashlib.blake2b(f"{prompt} {group} {chunk}".encode(), digest_size=DIGEST_BYTES).digest()


def groups(prompt: str, end: int, chunks: Mapping[int, Sequence[int]] | None = None) -> list[KeyGroup]:
    """The keys of a prompt of `end` tokens, or of consecutive `chunks` by group."""
    made = []
    for group, (tokens, window) in enumerate(zip(TOKENS, WINDOWS, strict=True)):
        wanted = range(end // tokens) if chunks is None else chunks.get(group, ())
        packed = b"".join(digest(prompt, group, chunk) for chunk in wanted)
        made.append(KeyGroup(packed, tokens, wanted[0] if chunks and wanted else 0, window, aligned=group == 2))
    return made


def content(group: int, key: bytes) -> bytes:
    return (key * (SIZES[group] // len(key) + 1))[: SIZES[group]]


def store(instance: OpaqueInstance, prompt: str, end: int, chunks: Mapping[int, Sequence[int]] | None = None) -> int:
    keys = groups(prompt, end, chunks)
    with instance.prepare_store(Prompt(f"store {prompt}", 0, end), keys).result(20) as plan:
        for place in plan.ranges:
            key = keys[place.group].digests[place.chunk * DIGEST_BYTES :][:DIGEST_BYTES]
            plan.arena[place.offset : place.offset + place.length] = content(place.group, key)
        outcome = plan.commit().result(20)
    assert outcome.ok
    return outcome.stored


def found(client: KVClient, instance: OpaqueInstance, prompt: str, end: int) -> tuple[int, list[tuple[int, int]]]:
    """The tokens of the hit, and its objects, whose bytes are compared."""
    keys = groups(prompt, end)
    reply = instance.lookup(Prompt(f"look up {prompt}", 0, end), keys).result(20)
    objects = []
    arena = client.arena
    assert arena is not None
    for group, chunk, offset in granted_objects(reply, keys):
        expected = content(group, keys[group].digests[chunk * DIGEST_BYTES :][:DIGEST_BYTES])
        assert bytes(arena.view[offset : offset + SIZES[group]]) == expected
        objects.append((group, chunk))
    for grant in reply.grants:
        instance.loaded(grant.lease, 0.0)
    instance.release(reply.ticket)
    return reply.hit_tokens, objects


def test_a_hit_has_of_each_group_what_its_rule_asks_for(client: KVClient, instance: OpaqueInstance) -> None:
    assert store(instance, "a", 64) == 4 + 8 + 2
    hit, objects = found(client, instance, "a", 64)
    assert hit == 64
    assert objects == [(0, 0), (0, 1), (0, 2), (0, 3), (1, 5), (1, 6), (1, 7), (2, 1)]
    assert found(client, instance, "b", 64) == (0, [])


def test_a_hit_ends_where_every_group_can_go_on(client: KVClient, instance: OpaqueInstance) -> None:
    # The state after 64 tokens lacks, that after 32 is there; of the window a chunk before token 32 lacks.
    store(instance, "c", 64, {0: range(4), 1: range(8), 2: [0]})
    hit, objects = found(client, instance, "c", 64)
    assert hit == 32
    assert objects == [(0, 0), (0, 1), (1, 1), (1, 2), (1, 3), (2, 0)]
    store(instance, "d", 64, {0: range(4), 1: [0, 1], 2: [0]})
    assert found(client, instance, "d", 64) == (0, [])


def test_what_is_stored_again_is_present_and_another_salt_finds_nothing(instance: OpaqueInstance) -> None:
    store(instance, "e", 64)
    again = instance.prepare_store(Prompt("again", 0, 64), groups("e", 64)).result(20)
    assert (again.ranges, again.outcome.present) == ((), 14)
    other = instance.lookup(Prompt("other", 0, 64, cache_salt="pepper"), groups("e", 64)).result(20)
    assert other.hit_tokens == 0


def test_the_registration_is_renewed_after_a_restart(process: ServerProcess, instance: OpaqueInstance) -> None:
    process.stop()
    process.start()
    wait_until(lambda: instance.is_ready, 20, "the registration")
    assert store(instance, "g", 64) == 14


WORKER = """
import sys, time
from kvframework.client.opaque import ArenaTicket, map_arena
path, session, boot, offset = sys.argv[1:]
arena = map_arena(ArenaTicket(path, bytes.fromhex(session), bytes.fromhex(boot)))
arena.view[int(offset)] = 7
print("mapped", flush=True)
sys.stdin.read()
"""


def test_a_range_stays_a_workers_when_its_scheduler_has_ended(server: ServerProcess) -> None:
    with server.engine_client() as client:
        made = OpaqueInstance(client, OpaqueObjects(6, "tiny", SIZES, 8, "test-blocks"))
        wait_until(lambda: made.is_ready, 20, "the registration")
        plan = made.prepare_store(Prompt("kept", 0, 64), groups("h", 64)).result(20)
        ticket = made.ticket
        arguments = (ticket.path, ticket.session.hex(), ticket.boot_id.hex(), str(plan.ranges[0].offset))
        worker = subprocess.Popen(
            [sys.executable, "-c", WORKER, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert worker.stdout.readline() == "mapped\n"
        del plan
    reserved = server.status()["l1"]["write_leases"]
    try:
        assert reserved == 1
    finally:
        worker.communicate()
    wait_until(lambda: server.status()["l1"]["write_leases"] == 0, 20, "the end of the session")


def test_a_wrong_session_maps_nothing(instance: OpaqueInstance) -> None:
    ticket = instance.ticket
    assert ticket is not None
    with pytest.raises(ServerGone, match="refused"):
        map_arena(ticket._replace(session=bytes(16)))
    assert map_arena(ticket).is_served
