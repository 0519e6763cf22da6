"""How a transfer is cut, and how much of it is under way at once."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvf_cpu_gather.wire_path import BATCH_BYTES, WINDOW_BATCHES, WINDOW_BYTES, Staging, Window, batches
from kvframework.api.transport import ArenaRange

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
