"""The copy kernel: its own source, built for the host and run thread by thread, against fragments written out; and
compiled by NVRTC as GPUs get it."""

from __future__ import annotations

import array
import ctypes
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("cuda.bindings", reason="needs cuda-bindings")

from kvf_cuda_ipc import gathering
from kvf_cuda_ipc.gathering import PAIRS, Batch, GatherKernel, described, parts, source
from kvframework.api.copy_plans import CopyBatch, Step
from kvframework.errors import DeviceError
from tests.cuda.building import kernels_library

MEMORY = 1 << 17
PATTERN = bytes((7 * number + number // 251) % 255 + 1 for number in range(MEMORY))


class HostKernels:
    """The kernels as plain functions; `launch` replaces the driver's."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        self.words: list[int] = []
        self.parameter_bytes = {
            size: ctypes.c_size_t.in_dll(library, f"kvf_copy_{size}_params").value for size in (1, 2, 4, 8, 16)
        }

    def launch(self, function: int, blocks: int, threads: int, _stream: int, parameter: int) -> None:
        self.words.append(function)
        place = {
            name: ctypes.c_uint.in_dll(self._library, f"kvf_{name}_x")
            for name in ("block", "blocks", "thread", "threads")
        }
        kernel = self._library[f"kvf_copy_{function}"]
        place["blocks"].value, place["threads"].value = blocks, threads
        for place["block"].value in range(blocks):
            for place["thread"].value in range(threads):
                kernel(ctypes.c_void_p(parameter))


@pytest.fixture(scope="session")
def kernels() -> HostKernels:
    return HostKernels(ctypes.CDLL(str(kernels_library())))


@st.composite
def batches(draw: st.DrawFn) -> CopyBatch:
    """Fragments that overlap nowhere: each place has its own stretch, on either side in an order of its own."""
    word = draw(st.sampled_from([1, 2, 4, 8, 16, 48]))
    run = word * draw(st.integers(1, 6))
    steps: list[Step] = []
    device, arena = run + word * draw(st.integers(0, 2)), run
    for _ in range(draw(st.integers(0, 4))):
        number = draw(st.integers(1, 3))
        steps.insert(0, Step(number, device, arena))
        device, arena = device * number + word * draw(st.integers(0, 1)), arena * number
    room = MEMORY // max(device, arena)
    lanes = draw(st.integers(1, min(5, room)))
    places = draw(st.integers(1, min(5, room // lanes)))
    shuffled = st.permutations(range(places))
    return CopyBatch(
        array.array("Q", [each * places * device for each in range(lanes)]),
        array.array("Q", [each * places * arena for each in range(lanes)]),
        array.array("Q", [each * device for each in draw(shuffled)]),
        array.array("Q", [each * arena for each in draw(shuffled)]),
        tuple(steps),
        run,
    )


@settings(max_examples=60)
@given(batch=batches(), to_arena=st.booleans(), blocks=st.integers(1, 3), shift=st.sampled_from([0, 1, 2, 4, 8]))
def test_a_kernel_copies_what_the_fragments_say(
    kernels: HostKernels, batch: CopyBatch, to_arena: bool, blocks: int, shift: int
) -> None:
    device, arena = ctypes.create_string_buffer(MEMORY + 64), ctypes.create_string_buffer(MEMORY + 64)
    at_device = -(-ctypes.addressof(device) // 16) * 16 + shift
    at_arena = -(-ctypes.addressof(arena) // 16) * 16 + shift
    moved = CopyBatch(
        array.array("Q", [at_device + each for each in batch.lane_addresses]),
        batch.lane_offsets,
        batch.place_addresses,
        batch.place_offsets,
        batch.steps,
        batch.run,
    )
    origin = at_device if to_arena else at_arena
    ctypes.memmove(origin, PATTERN, MEMORY)

    GatherKernel(kernels, {size: size for size in (16, 8, 4, 2, 1)}, blocks).copy(  # type: ignore[arg-type, misc]
        0,
        moved,
        at_arena,
        to_arena=to_arena,  # type: ignore[arg-type]
    )

    addresses, offsets, run = moved.fragments()
    expected = bytearray(MEMORY)
    for address, offset in zip(addresses, offsets, strict=True):
        there = address - at_device
        source_at, target_at = (there, offset) if to_arena else (offset, there)
        expected[target_at : target_at + run] = PATTERN[source_at : source_at + run]
    assert ctypes.string_at(at_arena if to_arena else at_device, MEMORY) == bytes(expected)
    # Bytes before and behind belong to no fragment.
    whole = arena if to_arena else device
    begin = (at_arena if to_arena else at_device) - ctypes.addressof(whole)
    assert not any(whole.raw[:begin]) and not any(whole.raw[begin + MEMORY :])  # noqa: PT018


def test_words_are_as_wide_as_everything_allows(kernels: HostKernels) -> None:
    def width(run: int, *, address: int = 0, step: int = 0) -> int:
        columns = [array.array("Q", [each]) for each in (address, 0, 0, 0)]
        batch = CopyBatch(*columns, (Step(1, step, 0),), run)
        return described(batch, 0, to_arena=True)[0]

    assert [width(run) for run in (1, 2, 6, 12, 24, 48, 256)] == [1, 2, 2, 4, 8, 16, 16]
    assert width(256, address=8) == 8
    assert width(256, step=2) == 2
    assert {ctypes.sizeof(Batch)} == set(kernels.parameter_bytes.values())
    assert ctypes.sizeof(Batch) <= 4096


@settings(max_examples=40)
@given(lanes=st.integers(1, 400), places=st.integers(1, 400), run=st.sampled_from([1, 64, 1 << 20, 1 << 30]))
def test_parts_fit_the_table_and_are_the_whole(lanes: int, places: int, run: int) -> None:
    def column(count: int, factor: int) -> array.array[int]:
        return array.array("Q", [each * factor for each in range(count)])

    batch = CopyBatch(column(lanes, 1000), column(lanes, 1000), column(places, 1), column(places, 1), (), run)
    found = [(lane, place) for part in parts(batch) for lane in part.lane_addresses for place in part.place_addresses]
    assert sorted(found) == [(1000 * lane, place) for lane in range(lanes) for place in range(places)]
    for part in parts(batch):
        assert len(part.lane_addresses) + len(part.place_addresses) <= PAIRS
        assert part.nbytes <= 1 << 31


def test_a_fragment_beyond_what_the_kernel_counts_is_refused() -> None:
    one = array.array("Q", [0])
    with pytest.raises(DeviceError, match="one fragment has"):
        next(parts(CopyBatch(one, one, one, one, (), (1 << 31) + 1)))


def _compiled() -> Callable[[str, str, int], bytes]:
    from kvf_cuda_ipc.gathering import compiled

    try:
        compiled("", "empty.cu", 80)
    except DeviceError as error:
        pytest.skip(error.fact)
    return compiled


@pytest.mark.parametrize("capability", [80, 90, 100, 120])
def test_nvrtc_compiles_the_kernels(capability: int) -> None:
    image = _compiled()(source(), "gather.cu", capability)
    assert image.startswith(b"\x7fELF")
    for size in (1, 2, 4, 8, 16):
        assert b"kvf_copy_%d\0" % size in image
    assert gathering._SIZES == (16, 8, 4, 2, 1)


def test_a_gpu_newer_than_the_compiler_gets_ptx_and_one_too_old_a_reason() -> None:
    compiled = _compiled()
    assert b".visible .entry kvf_copy_16" in compiled(source(), "gather.cu", 999)
    with pytest.raises(DeviceError, match="NVRTC cannot compile for compute capability"):
        compiled(source(), "gather.cu", 10)


def test_the_compilers_words_are_in_the_error() -> None:
    with pytest.raises(DeviceError, match=r'bad\.cu\(1\): error: identifier "nothing" is undefined'):
        _compiled()("__global__ void f() { nothing(); }", "bad.cu", 90)
