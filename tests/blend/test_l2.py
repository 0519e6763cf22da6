"""Segments that only L2 holds: after a restart, from another node, and while a load is under way."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from kvf_blend import messages as b
from kvf_blend.server import lookup
from kvframework.api.keys import DIGEST_BYTES, PackedKey
from kvframework.api.layout import MemoryLayoutDesc, hookimpl
from kvframework.api.plugin import NoOptions
from kvframework.api.tier import TierProvider
from kvframework.errors import Cancelled, DeadlineExceeded
from kvframework.server import Server
from kvframework.service.cache_service import CacheService
from kvframework.wire import messages as m
from tests.blend.blend_client import CHUNK, SETTINGS, BlendWire, packed, pairs, spans
from tests.core.server.in_process import serving
from tests.core.storage.tier import MemoryTier
from tests.support.redis_server import RedisServer
from tests.support.waiting import wait_until

SEPARATOR = [7, 7]
MARKS: dict[str, Any] = {"separator": packed(SEPARATOR)}
DOCUMENTS = [list(range(100 * number, 100 * number + 40)) for number in range(1, 4)]
PROMPT = [*SEPARATOR, *(token for each in reversed(DOCUMENTS) for token in (*each, *SEPARATOR))]
PLACES = [(2, 42), (44, 84), (86, 126)]
CHUNKS = 9


class Disk:
    """What lies in it stays when a server ends; `tier` is the last one made of it."""

    def __init__(self) -> None:
        self.values: dict[PackedKey, bytes] = {}
        self.tier = MemoryTier(self.values)

    @hookimpl
    def kvf_tiers(self) -> list[TierProvider[NoOptions]]:
        return [TierProvider(name="memory", summary="memory", create=lambda _options, _context: self._made())]

    def _made(self) -> MemoryTier:
        self.tier = MemoryTier(self.values)
        return self.tier


@pytest.fixture
def disk() -> Disk:
    return Disk()


def written(client: BlendWire) -> None:
    wait_until(lambda: not client.status()["l2"][0]["write_pending"], what="the write to L2")


def store(client: BlendWire, tokens: Sequence[int] = PROMPT) -> None:
    client.pre_compute(tokens, **MARKS)
    written(client)


@pytest.fixture
def server(disk: Disk) -> Iterator[Server]:
    with serving(*SETTINGS, "l2.0.use=memory", plugins=(disk,)) as running:
        yield running


@pytest.fixture
def client(server: Server, disk: Disk) -> Iterator[BlendWire]:
    """Of a server that has the documents in L2, and in its index, but not in L1."""
    with BlendWire(server.endpoint) as connected:
        connected.begin()
        store(connected)
        connected.call("CLEAR", m.Clear())
        disk.tier.calls.clear()
        yield connected


def test_marked_segments_hit_after_a_restart(tmp_path: Path) -> None:
    """The index is empty then: what is not marked is unknown, until it is stored again."""
    tier = ("l2.0.use=filesystem", f"l2.0.path={tmp_path / 'l2'}", "l2.0.capacity=1GiB")
    with serving(*SETTINGS, *tier) as server, BlendWire(server.endpoint) as client:
        client.begin()
        store(client)
        final = client.final(PROMPT)
        client.put(final)
        written(client)
    with serving(*SETTINGS, *tier) as server, BlendWire(server.endpoint) as client:
        client.begin()
        other = [3, 3, 3, *PROMPT]
        assert client.look(other) == b.Hits()
        hits = client.look(other, **MARKS)
        assert spans(hits.segments) == [(start + 3, end + 3) for start, end in PLACES]
        plan = client.plan(hits)
        assert b"".join(client.get(plan) or []) == plan.digests
        assert (client.look(PROMPT).prefix_digests, client.look(PROMPT).exact) == (final[: 7 * DIGEST_BYTES], False)


@pytest.mark.redis
def test_another_node_finds_them(tmp_path: Path) -> None:
    with RedisServer(tmp_path) as redis:
        tier = ("l2.0.use=redis", f"l2.0.url={redis.url}")
        with serving(*SETTINGS, *tier) as one, BlendWire(one.endpoint) as client:
            client.begin()
            store(client)
            with serving(*SETTINGS, *tier) as two, BlendWire(two.endpoint) as other:
                other.begin()
                hits = other.look(PROMPT, **MARKS)
                assert spans(hits.segments) == PLACES
                plan = other.plan(hits)
                assert b"".join(other.get(plan) or []) == plan.digests
                assert other.free(hits.ticket) == other.free(plan.ticket) == CHUNKS
                # The load's own pins end a moment after its answer.
                wait_until(lambda: other.pins() == 0, what="the end of the pins")


def test_known_segments_come_from_l2_as_well(client: BlendWire) -> None:
    hits = client.look(PROMPT)
    assert spans(hits.segments) == PLACES
    assert client.free(hits.ticket) == CHUNKS


def test_one_task_with_the_registered_layout(client: BlendWire, monkeypatch: pytest.MonkeyPatch) -> None:
    """As LOOKUP's. What L1 answers asks nobody."""
    tasks: list[tuple[int, MemoryLayoutDesc]] = []
    original = CacheService.submit_prefetch_task

    def spy(self: CacheService, keys: Sequence[PackedKey], layout_desc: MemoryLayoutDesc, **named: object) -> object:
        tasks.append((len(set(keys)), layout_desc))
        return original(self, keys, layout_desc, **named)  # type: ignore[arg-type]

    monkeypatch.setattr(CacheService, "submit_prefetch_task", spy)
    hits = client.look(PROMPT, **MARKS)
    chains = 2 * ((len(PROMPT) - 1) // CHUNK)
    assert tasks == [(chains + CHUNKS, client.registered.desc)]
    client.put_prompt(PROMPT)
    assert client.look(PROMPT, **MARKS).prefix_tokens == (len(PROMPT) - 1) // CHUNK * CHUNK
    assert len(tasks) == 1
    assert client.free(hits.ticket) == CHUNKS


def test_only_what_is_chosen_is_loaded(client: BlendWire, disk: Disk) -> None:
    """A part of a document is stored too, and a prefix that ends in the first document."""
    client.pre_compute(DOCUMENTS[1], ranges=pairs((4, 30)))
    client.put_prompt(PROMPT[: 2 * CHUNK])
    written(client)
    client.call("CLEAR", m.Clear())
    disk.tier.calls.clear()
    hits = client.look(PROMPT)
    assert (hits.prefix_tokens, spans(hits.segments)) == (2 * CHUNK, PLACES[1:])
    assert len(disk.tier.asked("get")) == 2 + 6
    assert client.status()["l1"]["objects"] == 8


def test_a_lost_chunk_costs_its_segment(client: BlendWire, disk: Disk) -> None:
    (segment,) = client.names(DOCUMENTS[1], ranges=pairs((0, 40)))
    for key, value in disk.values.items():
        if key.endswith(segment.digests[-DIGEST_BYTES:]):
            disk.values[key] = value[:-1] + bytes([value[-1] ^ 1])
    hits = client.look(PROMPT, **MARKS)
    assert spans(hits.segments) == [PLACES[0], PLACES[2]]
    assert client.free(hits.ticket) == 6
    assert client.status()["l2"][0]["corrupt"] == 1


def test_a_tier_that_is_down_leaves_what_l1_has(client: BlendWire, disk: Disk) -> None:
    client.put(client.names(DOCUMENTS[0], ranges=pairs((0, 40)))[0].digests)
    disk.tier.down = True
    assert spans(client.look(PROMPT).segments) == PLACES[2:]


def send(client: BlendWire, request_id: str = "r") -> int:
    return client.send(b.CB_LOOKUP_PRE_COMPUTED.name, b.LookupPreComputed(1, request_id, packed(PROMPT), **MARKS))


def test_the_client_dies_while_l2_is_asked(server: Server, client: BlendWire, disk: Disk) -> None:
    disk.tier.stall("get")
    with BlendWire(server.endpoint) as other:
        send(other)
        wait_until(lambda: disk.tier.stalled, what="the load")
    wait_until(lambda: client.status()["messaging"]["counters"]["sessions_ended"] == 1, what="the client's end")
    disk.tier.resume()
    wait_until(lambda: client.status()["prefetch"]["in_flight"] == 0, what="the end of the load")
    wait_until(lambda: (client.pins(), client.status()["tickets"]) == (0, 0), what="the end of the pins")


def test_one_client_has_a_share_of_the_loads(
    server: Server, client: BlendWire, disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beyond it is answered at once, with what L1 has."""
    monkeypatch.setattr(lookup, "MAX_LOADS", 2)
    disk.tier.stall("contains")
    with BlendWire(server.endpoint) as watcher, BlendWire(server.endpoint) as other:

        def under_way(loads: int) -> None:
            wait_until(lambda: watcher.status()["prefetch"]["in_flight"] == loads, what=f"{loads} loads")

        send(client), send(client)
        under_way(2)
        assert client.look(PROMPT) == b.Hits()
        request = send(other)
        under_way(3)
        disk.tier.resume()
        assert spans(other.answer(request, b.CB_LOOKUP_PRE_COMPUTED.name).segments) == PLACES
        under_way(0)
    client.call("END_SESSION", m.EndSession())
    client.call("CLEAR", m.Clear())
    assert spans(client.look(PROMPT).segments) == PLACES, "the share is there again"


def test_a_lookup_can_be_cancelled(client: BlendWire, disk: Disk) -> None:
    disk.tier.stall("get")
    request = send(client)
    wait_until(lambda: disk.tier.stalled, what="the load")
    cancel = client.send("CANCEL", m.Cancel(request))
    # Answered behind the CANCEL: from here on the load may go on.
    client.call("PING", m.Empty())
    disk.tier.resume()
    with pytest.raises(Cancelled):
        client.answer(request, b.CB_LOOKUP_PRE_COMPUTED.name)
    assert client.answer(cancel, "CANCEL").found
    wait_until(lambda: client.pins() == 0, what="the end of the load")


def test_a_late_load_pins_nothing(client: BlendWire, disk: Disk, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server has answered run.deadline by then: nobody would ever free it."""
    over = dataclasses.replace(b.CB_LOOKUP_PRE_COMPUTED, deadline_s=-1.0)
    monkeypatch.setattr(lookup, "CB_LOOKUP_PRE_COMPUTED", over)
    with pytest.raises(DeadlineExceeded):
        client.look(PROMPT)
    wait_until(lambda: client.pins() == 0, what="the end of the load")
    assert client.status()["tickets"] == 0
