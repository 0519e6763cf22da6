"""The allocator: ranges never overlap, neighbours merge, and what it says of its free bytes is true."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvframework.storage.l1.entries import ALIGNMENT, RangeAllocator, rounded

UNIT = ALIGNMENT

# None frees one that is held (which, by the second number); a number is a size to allocate; a bool grows the arena.
Steps = list[tuple[str, int]]
steps = st.lists(
    st.one_of(
        st.tuples(st.just("allocate"), st.integers(1, 6 * UNIT)),
        st.tuples(st.just("free"), st.integers(0, 1 << 16)),
        st.tuples(st.just("take"), st.integers(0, 40)),
        st.tuples(st.just("grow"), st.integers(0, 40 * UNIT)),
    ),
    max_size=80,
)


def free_runs(limit: int, held: dict[int, int]) -> list[int]:
    """Lengths of the maximal free runs, worked out unit by unit."""
    taken = {unit for offset, size in held.items() for unit in range(offset // UNIT, (offset + rounded(size)) // UNIT)}
    runs, run = [], 0
    for unit in range(limit // UNIT + 1):
        if unit < limit // UNIT and unit not in taken:
            run += UNIT
        elif run:
            runs.append(run)
            run = 0
    return sorted(runs)


@given(steps)
def test_behaves_like_a_map_of_units(script: Steps) -> None:
    allocator = RangeAllocator()
    held: dict[int, int] = {}
    limit = 0
    for action, number in script:
        if action == "grow":
            allocator.grow(number)
            limit = max(limit, number - number % UNIT)
        elif action == "free" and held:
            offset = sorted(held)[number % len(held)]
            allocator.free(offset, held.pop(offset))
        elif action == "take":
            start, end = number * UNIT, (number + 7) * UNIT
            taken = dict(allocator.take(start, end))
            assert all(start <= offset and offset + length <= end for offset, length in taken.items())
            free_before = sum(free_runs(limit, held))
            held |= taken
            assert sum(free_runs(limit, held)) == free_before - sum(taken.values())
            outside = {limit: UNIT * 99, start: min(end, limit) - start} if start < limit else {}
            assert free_runs(limit, held | outside) == free_runs(limit, held)
        elif action == "allocate":
            before = free_runs(limit, held)
            found = allocator.allocate(number)
            fitting = [run for run in before if run >= rounded(number)]
            assert (found is None) == (not fitting)
            if found is not None:
                offset = found
                assert offset % ALIGNMENT == 0
                assert 0 <= offset <= limit - rounded(number)
                for other, size in held.items():
                    assert offset + rounded(number) <= other or other + rounded(size) <= offset
                held[offset] = number
                # Best fit: the run that was cut is the smallest that was large enough.
                left = list(before)
                left.remove(fitting[0])
                expected = sorted([*left, fitting[0] - rounded(number)])
                assert [run for run in expected if run] == free_runs(limit, held)
        runs = free_runs(limit, held)
        assert allocator.limit == limit
        assert allocator.free_bytes == sum(runs) == limit - sum(map(rounded, held.values()))
        assert allocator.largest_free == max(runs, default=0)
        assert 0.0 <= allocator.fragmentation < 1.0
        assert (allocator.fragmentation == 0.0) == (len(runs) <= 1)
    for offset, size in held.items():
        allocator.free(offset, size)
    assert allocator.free_bytes == allocator.largest_free == limit
    assert allocator.allocate(limit) == (0 if limit else None)


@pytest.mark.parametrize(("nbytes", "units"), [(0, 1), (1, 1), (UNIT, 1), (UNIT + 1, 2)])
def test_sizes_are_rounded_up_to_whole_units(nbytes: int, units: int) -> None:
    assert rounded(nbytes) == units * UNIT
