"""Blend's requests over real sockets: names, hits and plans, and tickets that end as those of a LOOKUP do."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest

from kvf_blend import messages as b
from kvf_blend.errors import BadSegments
from kvframework.api.keys import DIGEST_BYTES, CacheKey
from kvframework.client import KVClient
from kvframework.errors import InvalidPayload, LeaseUnknown, MessageTooLarge
from kvframework.server import Server
from kvframework.service.cache_service import CacheService
from kvframework.wire import messages as m
from tests.blend.blend_client import CHUNK, ROTARY, SETTINGS, BlendWire, packed, pairs, spans
from tests.core.server.in_process import serving
from tests.support.waiting import wait_until

SEPARATOR = [7, 7, 7]
# None of whole chunks.
DOCUMENTS = [[100 * number + at for at in range(20 + 10 * number)] for number in range(1, 5)]
MARKS: dict[str, Any] = {"separator": packed(SEPARATOR)}


def joined(*documents: list[int]) -> list[int]:
    return [token for each in documents for token in (*each, *SEPARATOR)]


@pytest.fixture
def client(server: Server) -> Iterator[BlendWire]:
    with BlendWire(server.endpoint) as connected:
        connected.begin()
        yield connected


def test_a_name_says_neither_place_nor_neighbour(client: BlendWire) -> None:
    first = client.names(joined(*DOCUMENTS), **MARKS)
    other = client.names([5, *joined(*reversed(DOCUMENTS))], ranges=pairs(*_places([5], *reversed(DOCUMENTS))))
    assert {each.digests for each in first} == {each.digests for each in other}
    assert [each.tokens for each in first] == [len(each) for each in DOCUMENTS]
    assert all(len(each.digests) == -(-each.tokens // CHUNK) * DIGEST_BYTES for each in first)
    assert not {each.digests for each in client.names(joined(*DOCUMENTS), cache_salt="x", **MARKS) if each.held}


def _places(head: list[int], *documents: list[int]) -> list[tuple[int, int]]:
    places, at = [], len(head)
    for each in documents:
        places.append((at, at + len(each)))
        at += len(each) + len(SEPARATOR)
    return places


def test_what_is_held_is_said(client: BlendWire) -> None:
    prompt = joined(*DOCUMENTS, DOCUMENTS[0])
    assert not any(each.held for each in client.pre_compute(prompt, **MARKS))
    assert all(each.held for each in client.names(prompt, **MARKS))
    longer = [*DOCUMENTS[0], 1]
    assert [each.held for each in client.names(joined(longer, DOCUMENTS[1]), **MARKS)] == [False, True]


@pytest.mark.parametrize("marks", [{}, MARKS], ids=["unmarked", "marked"])
def test_documents_hit_in_another_order(client: BlendWire, marks: dict[str, Any]) -> None:
    client.pre_compute(joined(*DOCUMENTS), **MARKS)
    prompt = [1, 2, *joined(DOCUMENTS[2], [3, 4, 5], DOCUMENTS[0], DOCUMENTS[3]), 6]
    hits = client.look(prompt, **marks)
    assert hits.prefix_tokens == 0
    assert [prompt[start:end] for start, end in spans(hits.segments)] == [DOCUMENTS[2], DOCUMENTS[0], DOCUMENTS[3]]
    plan = client.plan(hits)
    assert [(each.start, each.tokens, each.shift) for each in plan.pieces] == [
        (each.start, each.tokens, each.start) for each in hits.segments
    ]
    assert plan.digests == b"".join(each.digests for each in hits.segments)
    assert b"".join(client.get(plan) or []) == plan.digests
    for piece, hit in zip(plan.pieces, hits.segments, strict=True):
        assert plan.digests[piece.source // CHUNK * DIGEST_BYTES :].startswith(hit.digests)


def test_segments_behind_a_head_are_those_of_the_same_head(client: BlendWire) -> None:
    """They are found behind it at once, and rotated by so much less; also to the front."""
    before = [700, 701, 702]
    for instance_id, head in ((2, before), (3, before), (4, before[:2])):
        client.begin(instance_id, before=head)
    stored = client.pre_compute(joined(*DOCUMENTS), 2, **MARKS)
    assert len({each.digests for each in (*stored, *client.names(joined(*DOCUMENTS), **MARKS))}) == 2 * len(DOCUMENTS)
    prompt = [*before, *joined(DOCUMENTS[2], DOCUMENTS[0])]
    marked = {"ranges": pairs(*_places(before, DOCUMENTS[2], DOCUMENTS[0]))}
    for instance_id in (1, 4):
        assert client.look(prompt, instance_id, **marked).segments == ()
    for marks in ({}, marked):
        hits = client.look(prompt, 3, **marks)
        assert len(hits.segments) == 2
        plan = client.plan(hits, 3)
        assert [each.shift for each in plan.pieces] == [0, len(DOCUMENTS[2]) + len(SEPARATOR)]
    bare = client.look(joined(DOCUMENTS[2], DOCUMENTS[0]), 3)
    assert client.plan(bare, 3).pieces[0] == b.Piece(0, 0, len(DOCUMENTS[2]), -len(before))


def test_the_longest_hit_first_and_none_overlaps(client: BlendWire) -> None:
    """Known segments that lie within each other; what is longest but not stored does not count."""
    text = list(range(1000, 1100))
    for start, end in ((0, 30), (20, 60), (50, 90)):
        client.pre_compute(text, ranges=pairs((start, end)))
    client.names(text, ranges=pairs((10, 95)))
    assert spans(client.look([9, *text, 9]).segments) == [(21, 61)]
    client.pre_compute(text, ranges=pairs((61, 99)))
    assert spans(client.look([9, *text, 9]).segments) == [(21, 61), (62, 100)]


def test_the_same_document_twice_is_loaded_once(client: BlendWire) -> None:
    client.pre_compute(joined(DOCUMENTS[1]), **MARKS)
    hits = client.look([1, *joined(DOCUMENTS[1], DOCUMENTS[1]), 2])
    assert len(hits.segments) == 2
    plan = client.plan(hits)
    assert plan.digests == hits.segments[0].digests
    assert {each.source for each in plan.pieces} == {0}
    assert [each.shift for each in plan.pieces] == [1, 1 + len(DOCUMENTS[1]) + len(SEPARATOR)]


def test_documents_that_share_chunks_do_not_mix(client: BlendWire) -> None:
    """One is the beginning of the other, so their first digests are equal; a third lies between them."""
    whole, other = list(range(500, 500 + 3 * CHUNK + 5)), DOCUMENTS[0]
    prompt = [1, *joined(whole[: 2 * CHUNK], other, whole), 2]
    client.pre_compute(prompt, ranges=pairs(*_places([1], whole[: 2 * CHUNK], other, whole)))
    hits = client.look(prompt)
    plan = client.plan(hits)
    assert len(plan.pieces) == 3
    for piece, hit in zip(plan.pieces, hits.segments, strict=True):
        assert plan.digests[piece.source // CHUNK * DIGEST_BYTES :].startswith(hit.digests)
    assert b"".join(client.get(plan) or []) == plan.digests


def test_a_prefix_goes_before_segments(client: BlendWire) -> None:
    prompt = [*joined(*DOCUMENTS), 1]
    client.pre_compute(joined(*DOCUMENTS), **MARKS)
    end = 5 * CHUNK
    client.put_prompt(prompt[:end])
    hits = client.look(prompt, **MARKS)
    assert (hits.prefix_tokens, hits.exact) == (end, True)
    assert spans(hits.segments) == [place for place in _places([], *DOCUMENTS) if place[0] >= end]
    plan = client.plan(hits)
    assert plan.pieces[0] == b.Piece(0, 0, end, 0)
    assert plan.digests.startswith(hits.prefix_digests)
    assert plan.pieces[1].source == end


def test_a_blended_prompt_is_found_by_blend_only(client: BlendWire) -> None:
    prompt = list(range(6 * CHUNK + 3))
    final = client.final(prompt)
    assert len(final) == 6 * DIGEST_BYTES
    client.put(final)
    hits = client.look([*prompt, 1])
    assert (hits.prefix_tokens, hits.exact, hits.prefix_digests) == (6 * CHUNK, False, final)
    key = CacheKey("tiny", 1, None, client.registered.namespace, 0, 6 * CHUNK, "r", packed(prompt[: 6 * CHUNK]))
    assert client.lookup(key).hit_tokens == 0, "the core must never take it for exact"

    client.put_prompt(prompt[: 4 * CHUNK])
    assert client.look([*prompt, 1]).exact is False, "the longer one"
    client.put_prompt(prompt)
    hits = client.look([*prompt, 1])
    assert (hits.prefix_tokens, hits.exact) == (6 * CHUNK, True), "the exact one, if they are equal"


def test_the_last_token_is_left_to_compute(client: BlendWire) -> None:
    document = list(range(2 * CHUNK))
    client.put_prompt(document)
    client.pre_compute(document, ranges=pairs((0, len(document))))
    assert (client.look(document).prefix_tokens, client.look(document).segments) == (CHUNK, ())
    assert client.look(document, ranges=pairs((0, len(document)))).segments == ()
    assert client.look([*document, 1]).prefix_tokens == 2 * CHUNK
    assert spans(client.look([1, *document]).segments) == []
    assert spans(client.look([1, *document, 1]).segments) == [(1, 1 + len(document))]


def test_nothing_is_found(client: BlendWire) -> None:
    for prompt in ([], [1], list(range(100))):
        assert client.look(prompt) == b.Hits()
        assert client.plan(b.Hits()) == b.LoadPlan()
    assert client.status()["tickets"] == 0


def test_salts_are_apart(client: BlendWire) -> None:
    client.pre_compute(joined(DOCUMENTS[0]), cache_salt="mine", **MARKS)
    prompt = [1, *joined(DOCUMENTS[0]), 2]
    for marks in ({}, MARKS):
        assert client.look(prompt, cache_salt="mine", **marks).segments
        assert client.look(prompt, **marks) == b.Hits()


def test_all_ranks_must_hold(server: Server) -> None:
    with BlendWire(server.endpoint) as client:
        client.begin(world_size=2)
        client.world_size = 1
        (segment,) = client.names(joined(DOCUMENTS[0]), **MARKS)
        key = client.digest_key(segment.digests, 0, "")
        client.store(msgspec.structs.replace(key, world_size=2), b"rank 0")
        assert not client.names(joined(DOCUMENTS[0]), **MARKS)[0].held, "this registration told no rank"
        assert client.look([1, *joined(DOCUMENTS[0]), 2]) == b.Hits()
        client.store(msgspec.structs.replace(key, world_size=2, worker_id=1), b"rank 1")
        hits = client.look([1, *joined(DOCUMENTS[0]), 2])
        assert spans(hits.segments) == [(1, 31)]
        assert client.free(hits.ticket) == 2 * len(segment.digests) // DIGEST_BYTES


def test_what_has_left_is_not_planned(client: BlendWire) -> None:
    client.pre_compute(joined(*DOCUMENTS), **MARKS)
    prompt = [1, *joined(*DOCUMENTS), 2]
    hits = client.look(prompt)
    client.free(hits.ticket)
    client.call("CLEAR", m.Clear())
    assert client.plan(hits) == b.LoadPlan()
    for each in hits.segments[1::2]:
        client.put(each.digests)
    client.put(hits.segments[2].digests[:DIGEST_BYTES])
    plan = client.plan(hits)
    assert [each.start for each in plan.pieces] == [each.start for each in hits.segments[1::2]]
    assert client.get(plan) is not None


def test_a_segment_of_100k_tokens() -> None:
    tokens = [number * 7919 % 32000 for number in range(100_000)]
    with (
        serving(SETTINGS[0], "server.chunk_size=1024", capacity="32MiB") as server,
        BlendWire(server.endpoint) as client,
    ):
        assert client.begin().chunk_tokens == 1024
        (segment,) = client.pre_compute(tokens, ranges=pairs((0, len(tokens))))
        assert len(segment.digests) == 98 * DIGEST_BYTES
        hits = client.look([1, 2, 3, *tokens, 4])
        assert spans(hits.segments) == [(3, 100_003)]
        plan = client.plan(hits)
        assert plan.pieces == (b.Piece(0, 3, 100_000, 3),)
        assert b"".join(client.get(plan) or []) == segment.digests


def test_too_many_objects_are_refused(client: BlendWire) -> None:
    with pytest.raises(MessageTooLarge):
        client.names(list(range(20)) * 30_000, ranges=pairs((0, 600_000)))
    with pytest.raises(InvalidPayload):
        client.call(b.CB_STORE_FINAL.name, b.StoreFinal(1, "r", bytes(b.MAX_TOKENS * 4 + 4)))


HIT = b.Segment(20, 5, bytes(32))


@pytest.mark.parametrize(
    "hits",
    [
        b.Hits(prefix_tokens=CHUNK),
        b.Hits(prefix_tokens=1, prefix_digests=bytes(32)),
        b.Hits(prefix_tokens=CHUNK, prefix_digests=bytes(33)),
        b.Hits(prefix_tokens=2 * CHUNK, prefix_digests=bytes(64), segments=(HIT,)),
        b.Hits(segments=(HIT, b.Segment(24, 5, bytes(32)))),
        b.Hits(segments=(HIT, b.Segment(1, 5, bytes(32)))),
        b.Hits(segments=(b.Segment(1, 17, bytes(32)),)),
        b.Hits(segments=(b.Segment(1, 17, b""),)),
    ],
)
def test_hits_that_no_lookup_gives_are_refused(client: BlendWire, hits: b.Hits) -> None:
    with pytest.raises(BadSegments):
        client.plan(hits)


def test_marks_are_needed_to_store_and_checked_everywhere(client: BlendWire) -> None:
    with pytest.raises(BadSegments, match="neither"):
        client.names([1, 2, 3])
    for ranges in (pairs((5, 3)), pairs((1, 5), (4, 7)), pairs((0, 11)), pairs((3, 3))):
        for call in (client.names, client.look):
            with pytest.raises(BadSegments) as caught:
                call(list(range(10)), ranges=ranges)
            assert caught.value.where.startswith("ranges[")
    with pytest.raises(BadSegments, match="separator has 4 tokens, the prompt 3"):
        client.look([1, 2, 3], separator=packed([1, 2, 3, 4]))


def test_kvclient_sends_them(server: Server, client: BlendWire) -> None:
    """As an integration does; errors are the plugin's own classes there."""
    client.pre_compute(joined(DOCUMENTS[0]), **MARKS)
    with KVClient(server.endpoint, requests=b.REQUESTS) as engine:
        assert engine.wait_up(20)
        payload = b.LookupPreComputed(1, "r", packed([1, *joined(DOCUMENTS[0])]))
        hits = engine.request(b.CB_LOOKUP_PRE_COMPUTED.name, payload, b.Hits, timeout=5)
        assert spans(hits.segments) == [(1, 31)]
        bad = b.LookupPreComputed(1, "r", b"123")
        with pytest.raises(BadSegments):
            engine.request(b.CB_LOOKUP_PRE_COMPUTED.name, bad, b.Hits, timeout=5)


def test_other_parameters_never_share(server: Server, client: BlendWire) -> None:
    """The same tokens, model and namespace; keys rotated otherwise."""
    client.pre_compute(joined(DOCUMENTS[0]), **MARKS)
    prompt = [1, *joined(DOCUMENTS[0]), 2]
    with BlendWire(server.endpoint) as other:
        other.begin(2, type(ROTARY)("interleaved", 10000.0, 4, 4))
        assert other.registered == client.registered
        assert (other.look(prompt, 2, **MARKS), other.look(prompt, 2)) == (b.Hits(), b.Hits())
        assert not other.names(joined(DOCUMENTS[0]), 2, **MARKS)[0].held


@pytest.fixture
def engine(server: Server) -> Iterator[BlendWire]:
    """Of an engine that has stored the documents."""
    with BlendWire(server.endpoint) as connected:
        connected.begin()
        connected.pre_compute(joined(*DOCUMENTS), **MARKS)
        yield connected


def test_what_leaves_between_the_look_and_the_pin(engine: BlendWire, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is looked for anew; if it leaves every time, nothing is promised."""
    original = CacheService.pin
    left = 2

    def pin(self: CacheService, *arguments: Any) -> str:
        nonlocal left
        left -= 1
        return original(self, *arguments) if left < 0 else ""

    monkeypatch.setattr(CacheService, "pin", pin)
    hits = engine.look([1, *joined(*DOCUMENTS), 2])
    assert len(hits.segments) == len(DOCUMENTS)
    assert hits.ticket
    left = 10
    assert engine.look([1, *joined(*DOCUMENTS), 2]) == b.Hits()
    assert engine.plan(hits) == b.LoadPlan()


def _free(engine: BlendWire, hits: b.Hits) -> None:
    assert engine.free(hits.ticket)


def _end_session(engine: BlendWire, _hits: b.Hits) -> None:
    assert engine.call("END_SESSION", m.EndSession("other")).tickets == 0
    assert engine.call("END_SESSION", m.EndSession("mine")).tickets == 1


def _cancel(engine: BlendWire, hits: b.Hits) -> None:
    assert engine.call("CANCEL", m.Cancel(ticket=hits.ticket)).found


def _die(engine: BlendWire, _hits: b.Hits) -> None:
    engine.close()


@pytest.mark.parametrize("end", [_free, _end_session, _cancel, _die])
def test_a_ticket_ends_like_one_of_a_lookup(
    server: Server, engine: BlendWire, end: Callable[[BlendWire, b.Hits], None]
) -> None:
    with BlendWire(server.endpoint) as other:
        hits = other.look([1, *joined(*DOCUMENTS), 2], request_id="mine")
        assert engine.pins() == len(b"".join(each.digests for each in hits.segments)) // DIGEST_BYTES
        with pytest.raises(LeaseUnknown):
            engine.free(hits.ticket)
        assert engine.call("CLEAR", m.Clear()).in_use == engine.pins() > 0
        assert not other.call("QUERY_PREFETCH_STATUS", m.TicketRef(hits.ticket)).pending
        end(other, hits)
        wait_until(lambda: engine.pins() == 0, what="the end of the pins")
        assert engine.status()["tickets"] == 0


def test_a_retrieve_has_a_ticket_of_its_own(engine: BlendWire) -> None:
    hits = engine.look([1, *joined(*DOCUMENTS), 2])
    plan = engine.plan(hits)
    engine.free(hits.ticket)
    engine.call("CLEAR", m.Clear())
    assert b"".join(engine.get(plan) or []) == plan.digests
    assert engine.free(plan.ticket)
    assert engine.pins() == 0
