"""The columns that the copy engines receive: the fragments, none of which touches two slices of the arena."""

from __future__ import annotations

import array
import ctypes

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

pytest.importorskip("cuda.bindings", reason="needs cuda-bindings")

from kvf_cuda_ipc import batched
from kvf_cuda_ipc.batched import BatchedCopies
from kvf_cuda_ipc.driver import RawStream
from kvframework.api.copy_plans import CopyBatch, Step
from kvframework.errors import DeviceError

STREAM = RawStream(7)
ARENA = 1 << 20


class Asked:
    """A stand-in for the driver's call, which returns `status`."""

    def __init__(self, status: int = 0) -> None:
        self.copies: list[tuple[int, int, int]] = []
        self.rest: list[int] = []

        def call(to: int, source: int, sizes: int, count: int, *rest: int) -> int:
            columns = [(ctypes.c_uint64 * count).from_address(each) for each in (to, source, sizes)]
            self.copies += list(zip(*columns, strict=True))
            self.attributes = batched._Attributes.from_buffer_copy(ctypes.string_at(rest[0], 24))
            self.rest = list(rest)
            return status

        self._kept = batched._CALL(call)
        self.driver = BatchedCopies(ctypes.cast(self._kept, ctypes.c_void_p).value or 0)


def column(*values: int) -> array.array[int]:
    return array.array("Q", values)


@given(
    run=st.integers(1, 40),
    places=st.integers(1, 6),
    lanes=st.integers(1, 4),
    to_arena=st.booleans(),
    slices=st.lists(st.integers(1, 600), max_size=4, unique=True),
)
@example(run=8, places=1, lanes=1, to_arena=True, slices=[4])
def test_all_bytes_are_asked_for_once_and_no_copy_touches_two_slices(
    run: int, places: int, lanes: int, to_arena: bool, slices: list[int]
) -> None:
    batch = CopyBatch(
        column(*(1 << 40 | each << 20 for each in range(lanes))),
        column(*(each * places * run for each in range(lanes))),
        column(*(each << 10 for each in range(places))),
        column(*(each * run for each in range(places))),
        (),
        run,
    )
    begins = sorted({ARENA, *(ARENA + each for each in slices)})
    asked = Asked()
    asked.driver.copy(STREAM, batch, ARENA, begins, to_arena=to_arena)

    addresses, offsets, _ = batch.fragments()
    wanted = [
        (address + at, ARENA + offset + at)
        for address, offset in zip(addresses, offsets, strict=True)
        for at in range(run)
    ]
    found = []
    for to, source, size in asked.copies:
        device, host = (source, to) if to_arena else (to, source)
        assert not any(host < begin < host + size for begin in begins)
        found += [(device + at, host + at) for at in range(size)]
    assert sorted(found) == sorted(wanted)


def test_the_call_is_made_as_cuda_h_says() -> None:
    asked = Asked()
    one = column(0)
    asked.driver.copy(
        STREAM, CopyBatch(column(64), one, one, one, (Step(3, 100, 8),), 8), ARENA, [ARENA], to_arena=False
    )
    assert asked.copies == [(64, ARENA, 8), (164, ARENA + 8, 8), (264, ARENA + 16, 8)]
    _attributes, first, count, _failed, stream = asked.rest
    assert ctypes.c_size_t.from_address(first).value == 0
    assert (count, stream) == (1, STREAM)
    assert asked.attributes.source_order == 1
    assert (*asked.attributes.source_hint, *asked.attributes.destination_hint) == (0, 0, 0, 0)


def test_what_the_driver_refuses_is_an_error_of_one_copy() -> None:
    one = column(0)
    with pytest.raises(DeviceError, match="cuMemcpyBatchAsync: CUDA_ERROR_INVALID_VALUE") as raised:
        Asked(1).driver.copy(STREAM, CopyBatch(one, one, one, one, (), 8), ARENA, [ARENA], to_arena=True)
    assert type(raised.value) is DeviceError
