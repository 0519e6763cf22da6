"""The reference copies: each one copies everything, and the fastest is chosen."""

from __future__ import annotations

import importlib.util
import itertools
import mmap
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvframework_bench.copy_reference import Buffers, Copy, copies, fastest, fastest_copy, slices, streaming_copies
from kvframework_bench.errors import BenchFailed, WrongBytes

NBYTES = 3 * mmap.PAGESIZE + 17


@given(st.integers(1, 1 << 30), st.integers(1, 64))
def test_slices_cover_everything_once(nbytes: int, parts: int) -> None:
    cut = slices(nbytes, parts)
    assert 1 <= len(cut) <= parts
    assert cut[0][0] == 0
    assert all(start + length == following for (start, length), (following, _) in itertools.pairwise(cut))
    assert sum(cut[-1]) == nbytes
    assert all(length > 0 and start % mmap.PAGESIZE == 0 for start, length in cut)


def test_every_way_is_checked_and_timed() -> None:
    with copies(NBYTES) as ways:
        assert len({way.name for way in ways}) == len(ways)
        assert all(way.nbytes == NBYTES and way.run() > 0 for way in ways)
        assert any(way.name == "libc memmove, 1 thread" for way in ways)


def test_a_way_that_leaves_a_byte_out_is_found() -> None:
    buffers = Buffers(NBYTES)

    def lazy() -> float:
        buffers.target[: NBYTES - 1] = buffers.source[: NBYTES - 1]
        return 1e-9

    with pytest.raises(WrongBytes, match="lazy"):
        buffers.check(Copy("lazy", NBYTES, lazy))


def test_the_fastest_has_the_smallest_median() -> None:
    ways = [Copy(name, 1, lambda: 0.0) for name in ("steady", "lucky once")]
    measured = {"steady": [[2.0], [2.0], [2.0]], "lucky once": [[1.0], [3.0], [3.0]]}
    assert fastest(ways, measured).name == "steady"


def test_without_numpy_and_torch_there_is_still_a_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: None)
    with fastest_copy(NBYTES) as copy:
        assert copy.name.startswith(("libc", "streaming stores"))


def test_streaming_stores_are_those_of_a_process_of_their_own() -> None:
    """Its environment is set before it starts; an odd size is copied whole too, otherwise it would not have begun."""
    with streaming_copies(NBYTES + 13, 2) as ways:
        assert [way.name for way in ways] == ["streaming stores, 1 thread", "streaming stores, 2 threads"]
        assert all(way.nbytes == NBYTES + 13 and 0 < way.run() < 60 for way in ways)
        (child,) = {way.run.args[0] for way in ways}  # type: ignore[attr-defined]
        environment = Path(f"/proc/{child.pid}/environ").read_text().split("\0")
        assert any(each.startswith("GLIBC_TUNABLES=") and "non_temporal_threshold" in each for each in environment)
    assert not Path(f"/proc/{child.pid}").exists()


def test_a_process_that_copies_no_more_ends_the_bench() -> None:
    with streaming_copies(NBYTES, 1) as ways:
        ways[0].run.args[0].kill()  # type: ignore[attr-defined]
        with pytest.raises((BenchFailed, ValueError, OSError)):
            ways[0].run()


def test_nothing_is_measured_beside_threads_of_torch_that_look_for_work(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    rests: list[float] = []
    monkeypatch.setattr("kvframework_bench.copy_reference.time.sleep", rests.append)
    with copies(NBYTES) as ways:
        rests.clear()
        for way in ways:
            way.run()
            assert bool(rests) is way.name.startswith("torch"), way.name
            rests.clear()


def test_torch_keeps_its_threads() -> None:
    torch = pytest.importorskip("torch")
    before = torch.get_num_threads()
    with copies(NBYTES) as ways:
        for way in ways:
            way.run()
    assert torch.get_num_threads() == before
