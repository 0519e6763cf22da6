"""The ring of records: its readers get all of it in order, it is bounded in memory, and a gap is counted."""

from __future__ import annotations

import threading

import pytest

from kvframework import record_ring as module
from kvframework.api.keys import CacheKey, ChunkContent, Extra, Image
from kvframework.api.listener import Accessed, Added, Batch, Record, Registered, Removed
from kvframework.record_ring import RecordRing

KEY = CacheKey("m", 1, 0, b"n" * 16, 0, 4, "r", digests=b"d" * 32)
RECORDS: list[Record] = [Added([b"a"]), Removed((b"a",)), Accessed(1, [b"b"], found=True), Registered(KEY, None)]


def put(ring: RecordRing, record: Record) -> None:
    if isinstance(record, Added):
        ring.added(record.keys)
    elif isinstance(record, Removed):
        ring.removed(record.keys[0])
    elif isinstance(record, Accessed):
        ring.accessed(record.tier, record.keys, record.found)
    elif isinstance(record, Registered):
        ring.registered(record.key, record.content)
    else:
        ring.finished(record)


def test_each_reader_gets_all_from_its_begin_in_order() -> None:
    ring = RecordRing(wanted=True)
    first = ring.open()
    put(ring, RECORDS[0])
    second = ring.open()
    for record in RECORDS[1:]:
        put(ring, record)
    assert (first.waiting, second.waiting) == (4, 3)
    assert first.take() == Batch(RECORDS)
    assert second.take() == Batch(RECORDS[1:])
    assert first.take() == second.take() == Batch([])
    assert not ring._held


def test_without_listeners_nothing_is_kept() -> None:
    ring = RecordRing()
    put(ring, RECORDS[0])
    assert ring.end == 0


def test_a_full_ring_tells_a_slow_reader_its_gap_and_a_quick_one_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_BYTES", 1000)
    ring = RecordRing(wanted=True)
    slow, quick = ring.open(), ring.open()
    received: list[Record] = []
    for number in range(10):
        ring.added([bytes([number])])
        batch = quick.take()
        assert not batch.lost
        received += batch.records
    assert received == [Added([bytes([number])]) for number in range(10)]
    assert slow.lost == 8
    assert slow.take() == Batch(received[-2:], 8)
    assert (slow.lost, quick.lost) == (8, 0)
    assert slow.take() == Batch([])


def test_a_reader_that_is_closed_keeps_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    ring = RecordRing(wanted=True)
    reader, other = ring.open(), ring.open()
    put(ring, RECORDS[0])
    other.take()
    reader.close()
    reader.close()
    assert not ring._held
    other.close()
    put(ring, RECORDS[0])
    assert not ring._held


def test_batches_end_with_the_server_and_the_last_one_is_whole() -> None:
    ring = RecordRing(wanted=True)
    reader = ring.open()
    received: list[Record] = []
    thread = threading.Thread(target=lambda: received.extend(each for batch in reader for each in batch.records))
    thread.start()
    for record in RECORDS:
        put(ring, record)
    reader.end(handed_over=True)
    thread.join(10)
    assert received == RECORDS
    assert (reader.ended, reader.handed_over) == (True, True)


def test_records_of_many_threads_are_all_there() -> None:
    ring = RecordRing(wanted=True)
    reader = ring.open()
    threads = [threading.Thread(target=lambda: [put(ring, RECORDS[0]) for _ in range(2000)]) for _ in range(4)]
    for thread in threads:
        thread.start()
    received = 0
    while any(thread.is_alive() for thread in threads):
        received += len(reader.take().records)
    assert received + len(reader.take().records) == 8000


@pytest.mark.parametrize(
    "content",
    [
        ChunkContent(b"", extras=tuple(Extra(0, b"") for _ in range(1000))),
        ChunkContent(b"", extras=(Extra(0, b"x" * (1 << 16)),) * 4),
        ChunkContent(b"", images=tuple(Image("i", 0, 1) for _ in range(1000))),
    ],
    ids=["extras", "their bytes", "images"],
)
def test_a_content_counts_with_all_that_it_says(content: ChunkContent, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_BYTES", 300_000)
    ring = RecordRing(wanted=True)
    reader = ring.open()
    for _ in range(3):
        ring.registered(KEY, content)
    batch = reader.take()
    assert (len(batch.records), batch.lost) == (1, 2)
