"""The copy kernel against a copy in Python, fragment by fragment. Where it was not built, these skip. The copy kernel
leaves its core to others between two turns, what it loses by that is bounded, and no thread waits for one that has no
core: by the counts of a kernel that is built with a clock and a scheduler of these tests' own. Without a C compiler
these skip."""

from __future__ import annotations

import array
import ctypes
import os
import shutil
import subprocess
import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvf_cpu_gather import kernel as kernel_module
from kvf_cpu_gather.kernel import BYTES_PER_THREAD, STREAMING_BYTES, CopyKernel, load_kernel
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


SOURCE = Path(kernel_module.__file__).with_name("native") / "copy.c"
MIB = 1 << 20
MS = 1_000_000

# Time goes by in turns, and while others have the core. `start` says what becomes of the caller's helpers: 0, they
# cannot be started; 1, they run before the caller; 2, they get a core when the caller waits for their end.
SCHEDULER = """
#include <errno.h>
#include <pthread.h>
#include <stdint.h>
#include <time.h>

uint64_t now_ns, turn_ns, away_ns, yields, start;
static int is_back;
static void *(*late[64])(void *);
static void *arguments[64];
static uintptr_t helpers;

int kvf_test_yield(void)
{
    yields++;
    now_ns += away_ns;
    is_back = 1;
    return 0;
}

int kvf_test_create(pthread_t *thread, const pthread_attr_t *how, void *(*run)(void *), void *argument)
{
    (void)how;
    if (start == 0)
        return EAGAIN;
    if (start == 1)
        run(argument);
    *thread = helpers++ % 64;
    late[*thread] = start == 2 ? run : NULL;
    arguments[*thread] = argument;
    return 0;
}

int kvf_test_join(pthread_t thread, void **value)
{
    (void)value;
    if (late[thread] != NULL)
        late[thread](arguments[thread]);
    return 0;
}

int kvf_test_clock(clockid_t clock, struct timespec *now)
{
    (void)clock;
    if (!is_back)
        now_ns += turn_ns;
    is_back = 0;
    now->tv_sec = now_ns / 1000000000;
    now->tv_nsec = now_ns % 1000000000;
    return 0;
}
"""


class Scheduler:
    """The numbers of the library `path`, in which a turn takes `turn_ns`, and others keep a core for `away_ns`."""

    def __init__(self, path: Path, turn_ns: int, away_ns: int, start: int = 0) -> None:
        self.library = ctypes.CDLL(str(path))
        ctypes.c_uint64.in_dll(self.library, "start").value = start
        ctypes.c_uint64.in_dll(self.library, "turn_ns").value = turn_ns
        ctypes.c_uint64.in_dll(self.library, "away_ns").value = away_ns

    @property
    def lost_and_copying_ns(self) -> tuple[int, int]:
        lost = self.yields * ctypes.c_uint64.in_dll(self.library, "away_ns").value
        return lost, ctypes.c_uint64.in_dll(self.library, "now_ns").value - lost

    @property
    def yields(self) -> int:
        return ctypes.c_uint64.in_dll(self.library, "yields").value


@pytest.fixture
def library(tmp_path: Path) -> Path:
    """Each test has one of its own, since a library's numbers last as long as the process."""
    found = shutil.which("cc")
    if found is None:
        pytest.skip("no C compiler")
    scheduler = tmp_path / "scheduler.c"
    scheduler.write_text(SCHEDULER)
    built = tmp_path / "kernel.so"
    fakes = [
        "-Dsched_yield=kvf_test_yield",
        "-Dclock_gettime=kvf_test_clock",
        "-Dpthread_create=kvf_test_create",
        "-Dpthread_join=kvf_test_join",
        f"-DTURN={MIB}",
    ]
    flags = ["-std=c11", "-O2", "-shared", "-fPIC", "-pthread"]
    subprocess.run([found, *flags, *fakes, SOURCE, scheduler, "-o", built], check=True)
    return built


def copy(scheduler: Scheduler, mib: int, *, to_arena: bool = True, threads: int = 1) -> None:
    """In fragments of 32 KiB; every byte is compared."""
    check(CopyKernel(scheduler.library, threads), (list(range(8 * mib)), 4, [], 32 << 10), to_arena=to_arena)


@pytest.mark.parametrize("to_arena", [True, False])
def test_others_have_the_core_between_two_turns(library: Path, to_arena: bool) -> None:
    """However often, as long as each is soon done: a lookup is."""
    scheduler = Scheduler(library, turn_ns=MS // 10, away_ns=MS // 2)
    copy(scheduler, 1, to_arena=to_arena)
    assert scheduler.yields == 0
    copy(scheduler, 16, to_arena=to_arena)
    assert scheduler.yields == 15


@pytest.mark.parametrize("slice_ms", [1, 4, 70])
def test_who_keeps_the_core_gets_a_fortieth_of_the_time(library: Path, slice_ms: int) -> None:
    """Else a copy beside one that computes all the time would lose a slice for each turn. 20 ms, and the slice by which
    the others' time is up, come once."""
    scheduler = Scheduler(library, turn_ns=10 * MS, away_ns=slice_ms * MS)
    for _ in range(3):  # what one copy has lost the next one knows
        copy(scheduler, 16)
        lost, copying = scheduler.lost_and_copying_ns
        assert lost - slice_ms * MS <= 20 * MS + copying / 40
    assert lost >= 20 * MS + copying / 50


def test_helpers_earn_nothing(library: Path) -> None:
    """So that several threads lose no more together than one."""
    scheduler = Scheduler(library, turn_ns=10 * MS, away_ns=4 * MS, start=1)
    for _ in range(3):
        copy(scheduler, 16, threads=4)
    lost, _ = scheduler.lost_and_copying_ns
    assert 20 * MS <= lost <= 24 * MS


@pytest.mark.parametrize("to_arena", [True, False])
@pytest.mark.parametrize("start", [0, 2])
def test_what_helpers_have_no_core_for_the_caller_copies(library: Path, start: int, to_arena: bool) -> None:
    """A thread without a core has taken nothing, so nobody waits for it: its part is the caller's, in turns."""
    scheduler = Scheduler(library, turn_ns=MS // 10, away_ns=0, start=start)
    copy(scheduler, 16, to_arena=to_arena, threads=4)
    assert scheduler.yields == 15


def test_a_copy_of_larger_fragments_has_turns_too(library: Path) -> None:
    scheduler = Scheduler(library, turn_ns=MS // 10, away_ns=0)
    check(CopyKernel(scheduler.library, 1), ([1, 0], 2, [], 3 * MIB), to_arena=True)
    assert scheduler.yields == 3
