"""The hit rule against its definition."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvframework.service.keys import hit_chunks, needed_chunks, window_chunks


@st.composite
def grids(draw: st.DrawFn) -> tuple[list[list[bool]], list[int]]:
    chunks = draw(st.integers(1, 8))
    rows = draw(st.integers(1, 4))
    windows = draw(st.lists(st.integers(0, 9), min_size=rows, max_size=rows))
    row = st.lists(st.booleans(), min_size=chunks, max_size=chunks)
    return draw(st.lists(row, min_size=rows, max_size=rows)), windows


@given(grids())
def test_longest_end_at_which_every_row_holds(grid: tuple[list[list[bool]], list[int]]) -> None:
    rows, windows = grid

    def holds(end: int) -> bool:
        return all(
            row[chunk]
            for row, window in zip(rows, windows, strict=True)
            for chunk in range(max(end - window, 0) if window else 0, end)
        )

    assert hit_chunks(rows, windows) == max(end for end in range(len(rows[0]) + 1) if holds(end))


def test_needed_is_all_for_full_attention_and_the_tail_for_a_window() -> None:
    assert list(needed_chunks(4, 0)) == [0, 1, 2, 3]
    assert list(needed_chunks(4, 2)) == [2, 3]
    assert list(needed_chunks(1, 2)) == [0]


def test_a_window_is_rounded_up_to_chunks() -> None:
    assert [window_chunks(window, 256) for window in (0, 1, 256, 257)] == [0, 1, 1, 2]
