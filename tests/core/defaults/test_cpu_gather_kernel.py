"""The copy kernel against a copy in Python, fragment by fragment. Where it was not built, these skip."""

from __future__ import annotations

import array
import ctypes
import os
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvf_cpu_gather.kernel import BYTES_PER_THREAD, STREAMING_BYTES, CopyKernel, load_kernel, wrapping_copies
from kvframework.api.copy_plans import CopyBatch, Step

KERNEL = load_kernel(2)
pytestmark = pytest.mark.skipif(KERNEL is None, reason="the copy kernel was not built: no C compiler at build time")


class Memory:
    def __init__(self, content: bytes) -> None:
        self.bytes = ctypes.create_string_buffer(content, len(content))
        self.address = ctypes.addressof(self.bytes)

    @property
    def content(self) -> bytes:
        return self.bytes.raw


def packed(values: list[int]) -> array.array[int]:
    return array.array("Q", values)


def copied(batch: CopyBatch, engine: bytes, arena: bytes, base: int, *, to_arena: bool) -> tuple[bytes, bytes]:
    there, here = bytearray(engine), bytearray(arena)
    addresses, offsets, run = batch.fragments()
    for address, offset in zip(addresses, offsets, strict=True):
        at = address - base
        if to_arena:
            here[offset : offset + run] = engine[at : at + run]
        else:
            there[at : at + run] = arena[offset : offset + run]
    return bytes(there), bytes(here)


def check(
    kernel: CopyKernel, plan: tuple[list[int], int, list[Step], int], *, to_arena: bool, aligned: bool = False
) -> None:
    """`plan`: place order on the engine's side, lanes, steps, run. Fragments lie apart on both sides. `aligned`: the
    first of them begin at whole lines, as what is written by streaming stores several runs at a time."""
    order, lanes, steps, run = plan
    span = run
    wide: list[Step] = []
    for count, device, arena in reversed(steps):
        wide.insert(0, Step(count, span + device, span + arena))
        span = (span + max(device, arena)) * count
    size = span * len(order)
    engine, arena = Memory(os.urandom(size * lanes + 64)), Memory(os.urandom(size * lanes + 64))
    begin_there, begin_here = (-engine.address % 64, -arena.address % 64) if aligned else (7, 3)
    batch = CopyBatch(
        packed([engine.address + begin_there + size * lane for lane in range(lanes)]),
        packed([begin_here + size * lane for lane in range(lanes)]),
        packed([span * place for place in order]),
        packed([span * number for number in range(len(order))]),
        tuple(wide),
        run,
    )
    expected = copied(batch, engine.content, arena.content, engine.address, to_arena=to_arena)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("kvf_cpu_gather.kernel.STREAMING_LOAD_BYTES", STREAMING_BYTES)
        kernel.copy(batch, arena.address, to_arena=to_arena)
    assert (engine.content, arena.content) == expected


steps = st.lists(st.tuples(st.integers(1, 3), st.integers(0, 5), st.integers(0, 5)).map(lambda s: Step(*s)), max_size=3)
# Runs of one element have a loop of their own.
runs = st.sampled_from([1, 2, 4, 8]) | st.integers(1, 2000)


@given(st.permutations(range(4)), st.integers(1, 3), steps, runs, st.booleans())
def test_every_fragment_arrives_and_nothing_else_changes(
    order: list[int], lanes: int, inner: list[Step], run: int, to_arena: bool
) -> None:
    assert KERNEL is not None
    check(KERNEL, (order, lanes, inner, run), to_arena=to_arena)


@pytest.mark.parametrize("run", [255, 256, 300, 511, 512, 4096, 4099, 4160, 65536])
@pytest.mark.parametrize("to_arena", [True, False])
@pytest.mark.parametrize("aligned", [True, False])
def test_large_copies_by_threads_past_the_caches(run: int, to_arena: bool, aligned: bool) -> None:
    assert KERNEL is not None
    places = 2 * max(BYTES_PER_THREAD, STREAMING_BYTES) // (run * 3) + 1
    order = list(range(places))
    order.reverse()
    check(KERNEL, (order, 3, [], run), to_arena=to_arena, aligned=aligned)


@pytest.mark.parametrize("run", [128, 192, 1984])
@pytest.mark.parametrize("apart", [0, 32], ids=["lines", "half_lines"])
@pytest.mark.parametrize("to_arena", [True, False])
def test_short_runs_of_whole_lines_past_the_caches(run: int, apart: int, to_arena: bool) -> None:
    assert KERNEL is not None
    inner = [Step(3, 64, apart), Step(4, apart, 64)]
    places = STREAMING_BYTES // (run * 12 * 2) + 1
    check(KERNEL, (list(range(places)), 2, inner, run), to_arena=to_arena, aligned=True)


@pytest.mark.parametrize("size", [8, 32])
@pytest.mark.parametrize("to_arena", [True, False])
def test_what_a_step_reads_soon_stays_in_the_caches(size: int, to_arena: bool) -> None:
    seen: list[int] = []
    with wrapping_copies(lambda _copy: lambda product, _threads: seen.append(product._obj.streaming) or 0):
        kernel = load_kernel()
    assert kernel is not None
    zero = packed([0])
    kernel.copy(CopyBatch(zero, zero, zero, zero, (), size << 20), 0, to_arena=to_arena)
    assert seen == [to_arena or size == 32]


def test_more_threads_than_fragments_and_nothing_to_copy() -> None:
    kernel = load_kernel(64)
    assert kernel is not None
    check(kernel, ([0], 1, [], STREAMING_BYTES * 3), to_arena=True)
    nothing = packed([])
    kernel.copy(CopyBatch(packed([0]), packed([0]), nothing, nothing, (), 16), 0, to_arena=True)


def test_a_malformed_product_is_refused() -> None:
    assert KERNEL is not None
    one = packed([0])
    with pytest.raises(ValueError, match="9 steps"):
        KERNEL.copy(CopyBatch(one, one, one, one, (Step(1, 0, 0),) * 9, 1), 0, to_arena=True)


def test_several_threads_copy_at_once() -> None:
    kernel = KERNEL
    assert kernel is not None
    failed: list[BaseException] = []

    def work() -> None:
        try:
            for _ in range(5):
                check(kernel, ([2, 0, 1], 2, [Step(2, 1, 0)], 300_000), to_arena=True)
        except BaseException as error:  # noqa: BLE001  told by the main thread
            failed.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert failed == []
