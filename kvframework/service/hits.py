"""The hit rule: how many chunks of a prompt are usable, given the objects that exist. Pure.

A row is one (rank, layer group): all rows must hold. Full attention needs every chunk before the end of the hit; a
window needs the chunks that contain its last tokens; a recurrent state, declared as a window of one token, needs the
chunk that ends there. Chunks before the request's start are the engine's own and are not requested.
"""

from __future__ import annotations

from collections.abc import Sequence


def window_chunks(window: int, chunk_tokens: int) -> int:
    """Return the number of chunks that a window of `window` tokens needs before any chunk boundary; 0 for full
    attention."""
    return -(-window // chunk_tokens)


def hit_chunks(rows: Sequence[Sequence[object]], windows: Sequence[int]) -> int:
    """Return the longest usable prefix in chunks. `rows[r][c]` is true if object c of row r exists; `windows[r]` in
    chunks, 0: full."""
    if not rows:
        return 0
    bound = len(rows[0])
    for row, window in zip(rows, windows, strict=True):
        if not window:
            bound = min(bound, prefix_chunks(row))
    if not any(windows):
        return bound
    usable = [_usable_ends(row, window) for row, window in zip(rows, windows, strict=True) if window]
    for end in range(bound, 0, -1):
        if all(ends[end] for ends in usable):
            return end
    return 0


def needed_chunks(end: int, window: int) -> range:
    """Return the chunks of one row that a hit of `end` chunks uses."""
    return range(max(end - window, 0) if window else 0, end)


def prefix_chunks(row: Sequence[object]) -> int:
    """Return the number of chunks before the first that is missing."""
    return len(row) if all(row) else list(map(bool, row)).index(False)


def _usable_ends(row: Sequence[object], window: int) -> list[bool]:
    run = 0
    ends = [True]
    for index, there in enumerate(row, start=1):
        run = run + 1 if there else 0
        ends.append(run >= min(index, window))
    return ends
