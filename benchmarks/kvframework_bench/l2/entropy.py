"""How small a coder of single bytes can make numbers whose bytes lie apart: what codecs are measured against."""

from __future__ import annotations

import numpy as np


def entropy_bound(content: bytes | memoryview, width: int) -> float:
    """Return the share of its size to which `content`, elements of `width` bytes, can be packed by the best coder that
    knows how often each byte occurs at each place of an element, and nothing else: not its neighbours, not its channel,
    not its layer. The table of how often is not counted."""
    if not content:
        return 0.0
    values = np.frombuffer(content, dtype=np.uint8)
    return sum(_entropy_bits(values[place::width]) for place in range(width)) / (8 * values.size)


def _entropy_bits(values: np.ndarray[tuple[int, ...], np.dtype[np.uint8]]) -> float:
    counts = np.bincount(values, minlength=256).astype(np.float64)
    counts = counts[counts > 0]
    return float((counts * (np.log2(counts.sum()) - np.log2(counts))).sum())
