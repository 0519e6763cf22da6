"""The recompute plan: the tokens of a prompt that go through the model although their KV was loaded. Needs torch; pure.

KV of a segment was computed without the text before it. A few tokens carry most of the difference (CacheBlend, EuroSys
'25): recomputed, they bring the logits near to those of the whole prompt.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch

# Makes 0.07 of 100 tokens 7: the product of the floats is a little more.
_ROUNDING = 1e-9


@dataclass(frozen=True)
class Held:
    """The loaded parts of a prompt of `tokens` tokens: its first `prefix`, and `segments`, pairs (start, end).

    Raises `ValueError` unless the segments are in order, apart, behind the prefix and not empty, and the last token of
    the prompt is in none: there would be nothing to compute logits from.
    """

    tokens: int
    prefix: int = 0
    segments: tuple[tuple[int, int], ...] = ()

    def __post_init__(self) -> None:
        bounds = [(0, self.prefix), *self.segments, (self.tokens - 1, self.tokens)]
        if self.prefix < 0 or any(start >= end for start, end in bounds[1:]):
            raise ValueError(f"a segment is empty or lies outside the prompt: {self}")
        if any(before[1] > behind[0] for before, behind in pairwise(bounds)):
            raise ValueError(f"segments are out of order, or no token is left to compute: {self}")

    @property
    def loaded(self) -> int:
        return sum(end - start for start, end in self.segments)

    def loaded_positions(self) -> torch.Tensor:
        """Positions in segments, sorted."""
        return _positions(self.segments)

    def missing_positions(self) -> torch.Tensor:
        """Positions behind the prefix that are in no segment, sorted; the last one of the prompt among them."""
        edges = [self.prefix, *(edge for segment in self.segments for edge in segment), self.tokens]
        return _positions(list(zip(edges[::2], edges[1::2], strict=True)))


def by_deviation(held: Held, deviation: torch.Tensor, share: float) -> torch.Tensor:
    """The missing positions, and the `share` (0 to 1, rounded up to a token) of the loaded ones that deviates most.

    `deviation` is one number for each of `held.loaded_positions()`; NaN counts as the most. Sorted positions, on the
    CPU.
    """
    if not 0 <= share <= 1:
        raise ValueError(f"the share to recompute is {share}, expected 0 to 1")
    if deviation.shape != (held.loaded,):
        raise ValueError(f"the deviations have shape {tuple(deviation.shape)} for {held.loaded} tokens")
    count = min(held.loaded, math.ceil(share * held.loaded - _ROUNDING))
    measured = deviation.detach().cpu().double().nan_to_num(nan=math.inf, posinf=math.inf)
    chosen = held.loaded_positions()[measured.topk(count, sorted=False).indices]
    return torch.cat([held.missing_positions(), chosen]).sort().values


def _positions(ranges: Sequence[tuple[int, int]]) -> torch.Tensor:
    each = [torch.arange(start, end) for start, end in ranges]
    return torch.cat(each) if each else torch.empty(0, dtype=torch.long)
