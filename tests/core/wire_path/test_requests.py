"""STORE_CPU_CHUNKS and RETRIEVE_CPU_CHUNKS as another client would speak them: what they answer, and what they refuse
with nothing left locked. How a transfer is cut, and how much of it is under way at once."""

from __future__ import annotations

import mmap
from collections.abc import Iterator, Sequence

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvf_cpu_gather.wire_path import BATCH_BYTES, WINDOW_BATCHES, WINDOW_BYTES, Staging, Window, batches
from kvframework import errors
from kvframework.api.keys import CacheKey
from kvframework.api.transport import ArenaRange, StoreOutcome
from kvframework.wire import messages as m
from kvframework.wire.frames import MAX_BUFFER_BYTES, split
from kvframework.wire.transfer_blocks import pack_indices, unpack_indices
from tests.core.wire_path.remote import RemoteServer, clear, held, remote_server
from tests.support.server_process import fixture_of
from tests.support.waiting import wait_until
from tests.support.wire_client import WireClient, key_for

TOKENS = list(range(1024))
NBYTES = 2 * 2 * 256 * 8 * 4  # of one object of WireClient's model
LEASE_S = 0.5


server = fixture_of(remote_server, f"server.retrieve_lease_s={LEASE_S}", curve=False, scope="module")


@pytest.fixture
def client(server: RemoteServer) -> Iterator[WireClient]:
    clear(server)
    with WireClient(server.tcp) as connected:
        yield connected
        wait_until(lambda: held(connected) == (0, 0, 0, 0))
        connected.call("GOODBYE", m.Empty())


def fill(number: int) -> bytes:
    return bytes([number]) * NBYTES


def store(client: WireClient, key: CacheKey, objects: Sequence[int], *buffers: bytes) -> m.ChunksStored:
    reply: m.ChunksStored = client.call("STORE_CPU_CHUNKS", m.StoreCpuChunks(key, 1, pack_indices(objects)), *buffers)
    return reply


def missing(client: WireClient, key: CacheKey) -> list[int]:
    return unpack_indices(store(client, key, ()).missing, where="missing")


def retrieve(client: WireClient, lease: str, objects: Sequence[int]) -> list[bytes]:
    client.send("RETRIEVE_CPU_CHUNKS", m.RetrieveCpuChunks(lease, pack_indices(objects)))
    assert client.socket.poll(5000)
    envelope = split(client.socket.recv_multipart())
    assert envelope.type == "RETRIEVE_CPU_CHUNKS"
    return [bytes(buffer) for buffer in envelope.buffers]


def test_the_question_says_what_is_missing_and_holds_nothing(client: WireClient) -> None:
    key = key_for(client.register(), TOKENS)
    reply = store(client, key, ())
    assert (reply.outcome, unpack_indices(reply.missing, where="")) == (StoreOutcome(), [0, 1, 2, 3])
    assert store(client, key, [1, 3], fill(1), fill(3)).outcome == StoreOutcome(stored=2)
    assert missing(client, key) == [0, 2]
    assert store(client, key, [0, 1], fill(9), fill(9)).outcome == StoreOutcome(stored=1, present=1)
    assert store(client, key, [2], fill(2)).outcome == StoreOutcome(stored=1)
    assert client.lookup(key).hit_tokens == 1024
    client.call("END_SESSION", m.EndSession())
    plan = client.prepare_retrieve(key)
    assert retrieve(client, plan.lease, [3, 0]) == [fill(3), fill(9)]
    assert retrieve(client, plan.lease, [1, 2]) == [fill(1), fill(2)], "what was there is not replaced"
    assert client.call("COMMIT_RETRIEVE", m.LeaseRef(plan.lease)).held is True


def test_the_question_is_a_use_of_what_is_present() -> None:
    """What a store counts as present must outlive the objects that make room for the rest of it."""
    with remote_server(curve=False, capacity="1MiB") as small, WireClient(small.tcp) as client:
        registered = client.register()

        def prompt(number: int) -> CacheKey:
            return key_for(registered, [number] * 1024)

        for number in range(8):
            assert store(client, prompt(number), range(4), *[fill(number)] * 4).outcome.stored == 4
        assert missing(client, prompt(0)) == []
        assert store(client, prompt(8), range(4), *[fill(8)] * 4).outcome.stored == 4
        assert missing(client, prompt(0)) == []
        assert missing(client, prompt(1)) == [0, 1, 2, 3]


def test_its_transfers_are_among_the_finished_requests(server: RemoteServer, client: WireClient) -> None:
    key = key_for(client.register(), TOKENS, request_id="over the wire")
    store(client, key, [0, 1, 2, 3], fill(1), fill(1), fill(1), fill(1))
    plan = client.prepare_retrieve(key)
    client.call("COMMIT_RETRIEVE", m.LeaseRef(plan.lease))
    with server.local() as local:
        records = local.call("RECENT", m.Recent(request_id=key.request_id)).records
    assert [(each.request, each.outcome, each.path) for each in records] == [
        ("STORE", "stored", "wire"),
        ("RETRIEVE", "hit", "wire"),
    ]
    assert {(each.objects, each.nbytes) for each in records} == {(4, 4 * NBYTES)}
    with pytest.raises(errors.RequestError, match="only a client on this node"):
        client.call("RECENT", m.Recent())


def test_a_range_in_the_middle_counts_from_its_start(client: WireClient) -> None:
    registered = client.register()
    assert store(client, key_for(registered, TOKENS, start=512), [1], fill(4)).outcome.stored == 1
    assert missing(client, key_for(registered, TOKENS)) == [0, 1, 2]


@pytest.mark.parametrize(
    ("objects", "buffers", "error"),
    [
        ([0], [fill(1)[:-1]], errors.MalformedFrames),
        ([0], [fill(1) + b"x"], errors.MalformedFrames),
        ([0, 1], [fill(1), b""], errors.MalformedFrames),
        ([0, 1], [fill(1)], errors.MalformedFrames),
        ([0], [fill(1), fill(2)], errors.MalformedFrames),
        ([0], [], errors.MalformedFrames),
        ([], [fill(1)], errors.MalformedFrames),
        ([4], [fill(1)], errors.BadRange),
        ([2**32 - 1], [fill(1)], errors.BadRange),
        ([0, 0], [fill(1), fill(1)], errors.BadRange),
        ([1, 0], [fill(1), fill(1)], errors.BadRange),
    ],
)
def test_what_does_not_fit_is_refused_before_anything_is_reserved(
    client: WireClient, objects: list[int], buffers: list[bytes], error: type[errors.KVFrameworkError]
) -> None:
    key = key_for(client.register(), TOKENS)
    with pytest.raises(error):
        store(client, key, objects, *buffers)
    assert missing(client, key) == [0, 1, 2, 3]


def test_broken_payloads_are_refused(client: WireClient) -> None:
    registered = client.register()
    key = key_for(registered, TOKENS)
    with pytest.raises(errors.InvalidPayload, match="a multiple of 4 bytes"):
        client.call("STORE_CPU_CHUNKS", m.StoreCpuChunks(key, 1, b"\0\0\0\0\0"), fill(1))
    with pytest.raises(errors.NotRegistered):
        client.call("STORE_CPU_CHUNKS", m.StoreCpuChunks(key, 99, pack_indices([0])), fill(1))
    with pytest.raises(errors.NamespaceMismatch):
        store(client, msgspec.structs.replace(key, namespace=b"x" * 16), [0], fill(1))
    with pytest.raises(errors.BadRange):
        store(client, msgspec.structs.replace(key, end=1000), [0], fill(1))
    with pytest.raises(errors.MalformedFrames, match="1 buffers"):
        client.call("LOOKUP", m.Lookup(msgspec.structs.replace(key, worker_id=None)), fill(1))
    with pytest.raises(errors.MessageTooLarge):
        store(client, key, range(4097), *([b""] * 4097))


def test_buffers_that_are_too_large_together_are_refused(client: WireClient) -> None:
    key = key_for(client.register(), TOKENS)
    with mmap.mmap(-1, 1 << 20) as zeros:
        frames = split([b"\0" * 8, b"NOOP", b"\x80", *([memoryview(zeros)] * 256)])
        assert len(frames.buffers) == 256
        del frames
        with pytest.raises(errors.MessageTooLarge):
            split([b"\0" * 8, b"NOOP", b"\x80", *([memoryview(zeros)] * 256), b"x"])
    assert missing(client, key) == [0, 1, 2, 3]


def test_a_frame_beyond_the_bound_only_disconnects_its_sender(server: RemoteServer, client: WireClient) -> None:
    key = key_for(client.register(), TOKENS)
    with WireClient(server.tcp) as rude:
        huge = mmap.mmap(-1, MAX_BUFFER_BYTES + 1)
        request_id = (99).to_bytes(8, "little")
        rude.socket.send_multipart([request_id, b"STORE_CPU_CHUNKS", b"\x80", memoryview(huge)], copy=False)
        with pytest.raises(TimeoutError):
            rude.receive(timeout=0.5)
    assert missing(client, key) == [0, 1, 2, 3]


def test_a_client_that_maps_nothing_cannot_commit_what_it_has_not_written(client: WireClient) -> None:
    key = key_for(client.register(), TOKENS)
    with pytest.raises(errors.TransportMismatch, match="STORE_CPU_CHUNKS"):
        client.prepare_store(key)


def test_retrieves_are_refused_without_a_lease_of_ones_own(server: RemoteServer, client: WireClient) -> None:
    key = key_for(client.register(), TOKENS)
    store(client, key, [0, 1, 2, 3], *(fill(n) for n in range(4)))
    plan = client.prepare_retrieve(key)
    with server.local() as other, pytest.raises(errors.LeaseUnknown):
        other.call("RETRIEVE_CPU_CHUNKS", m.RetrieveCpuChunks(plan.lease, pack_indices([0])))
    for objects, error in (([4], errors.BadRange), ([0, 2**32 - 1], errors.BadRange), ([], errors.BadRange)):
        with pytest.raises(error):
            client.call("RETRIEVE_CPU_CHUNKS", m.RetrieveCpuChunks(plan.lease, pack_indices(objects)))
    with pytest.raises(errors.MessageTooLarge):
        client.call("RETRIEVE_CPU_CHUNKS", m.RetrieveCpuChunks(plan.lease, pack_indices([0] * 10_000)))
    with pytest.raises(errors.InvalidPayload):
        client.call("RETRIEVE_CPU_CHUNKS", m.RetrieveCpuChunks(plan.lease, b"x"))
    assert client.call("COMMIT_RETRIEVE", m.LeaseRef(plan.lease)).held is True
    with pytest.raises(errors.LeaseUnknown):
        client.call("RETRIEVE_CPU_CHUNKS", m.RetrieveCpuChunks(plan.lease, pack_indices([0])))


def test_a_lapsed_lease_sends_nothing_and_says_so(client: WireClient) -> None:
    key = key_for(client.register(), TOKENS)
    store(client, key, [0, 1, 2, 3], *(fill(n) for n in range(4)))
    plan = client.prepare_retrieve(key)
    wait_until(lambda: client.status()["l1"]["pins"] == 0, what="the end of the lease")
    assert client.call("RETRIEVE_CPU_CHUNKS", m.RetrieveCpuChunks(plan.lease, pack_indices([0]))).held is False
    assert client.call("COMMIT_RETRIEVE", m.LeaseRef(plan.lease)).held is False


def test_goodbye_ends_all_that_a_remote_client_has(server: RemoteServer, client: WireClient) -> None:
    with WireClient(server.tcp) as leaving:
        key = key_for(leaving.register(instance_id=2), TOKENS)
        leaving.call("STORE_CPU_CHUNKS", m.StoreCpuChunks(key, 2, pack_indices([0])), fill(1))
        leaving.prepare_retrieve(msgspec.structs.replace(key, end=256, tokens=key.tokens[:1024]), 2)
        assert held(client)[0] == 1
        leaving.call("GOODBYE", m.Empty())
        assert held(client)[0] == 0
        assert client.status()["non_gpu_instance_ids"] == []
        with pytest.raises(errors.HelloRequired):
            leaving.call("NOOP", m.Empty())


SIZES = st.integers(1, 3) | st.integers(1, BATCH_BYTES) | st.integers(BATCH_BYTES - 99, BATCH_BYTES * 20)


@given(st.lists(SIZES, max_size=60))
def test_batches_hold_everything_once_in_order_and_bounded(sizes: list[int]) -> None:
    places = [ArenaRange(index, 0, 0, size) for index, size in enumerate(sizes)]
    cut = list(batches(places))
    assert [place for batch in cut for place in batch.places] == places
    for batch in cut:
        assert batch.nbytes <= BATCH_BYTES or len(batch.places) == 1
        end = 0
        for place, offset in zip(batch.places, batch.offsets, strict=True):
            assert offset >= end
            assert offset % 64 == 0
            end = offset + place.length
        assert end <= batch.nbytes


@given(st.lists(SIZES, max_size=60))
def test_a_window_overlaps_and_is_bounded(sizes: list[int]) -> None:
    window: Window[int] = Window()
    out: list[int] = []
    for index, size in enumerate(sizes):
        while not window.has_room(size):
            out.append(window.take_oldest())
        window.add(index, size)
        under_way = sizes[len(out) : index + 1]
        assert len(under_way) == len(window) <= WINDOW_BATCHES
        assert sum(under_way) <= WINDOW_BYTES or len(under_way) <= 2
    while window:
        out.append(window.take_oldest())
    assert out == list(range(len(sizes)))


def test_staging_gives_the_same_memory_again_but_never_what_is_out() -> None:
    staging = Staging()
    first, second = staging.take(1000), staging.take(500)
    first[:1], second[:1] = b"1", b"2"
    assert (first.nbytes, second.nbytes) == (1000, 1000)
    staging.give_back(first)
    again = staging.take(1000)
    assert bytes(again[:1]) == b"1"
    bigger = staging.take(2000)
    staging.give_back(again)
    assert staging.take(1).nbytes == 2000, "pieces of the old size are let go"
    assert bigger.nbytes == 2000
    staging.close()
