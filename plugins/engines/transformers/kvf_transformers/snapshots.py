"""The recurrent states behind the chunks of one request: which are kept while it is computed, and for which tokens.
Pure.

Keys and values of a chunk can be taken from the cache at any later time, a state only in the moment when the chunk's
last token has been computed. A hit ends where a state was kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile

import torch

States = tuple[torch.Tensor, ...]


class Snapshots:
    """The states of one request, and the tokens that were computed into its cache. Owns the states.

    Kept are those at every `interval` tokens (0: none; rounded up to whole chunks), those behind the last chunk of a
    prompt that leaves a token to compute, and the last ones of a decode.
    """

    def __init__(self, chunk_tokens: int, interval: int, tokens: Sequence[int]) -> None:
        self._chunk = chunk_tokens
        self._interval = -(-interval // chunk_tokens) * chunk_tokens
        self._tokens = list(tokens)
        self._kept: dict[int, States] = {}
        self._passing = 0

    @property
    def tokens(self) -> int:
        return len(self._tokens)

    def stops(self, end: int) -> list[int]:
        """Return where a computation of the tokens up to `end` is interrupted for a copy, ascending."""
        due = {(end - 1) // self._chunk * self._chunk, end // self._chunk * self._chunk}
        if self._interval:
            due.update(range(self._interval, end + 1, self._interval))
        return sorted(each for each in due if self.tokens < each <= end)

    def computed(self, tokens: Sequence[int]) -> bool:
        """Note that these tokens follow; return whether the states behind them can be kept: a chunk ends there."""
        self._tokens += tokens
        return not self.tokens % self._chunk

    def keep(self, states: States, *, passing: bool) -> None:
        """Keep the states behind all tokens; `passing`: until the next ones that are, unless an interval ends here."""
        self._kept.pop(self._passing, None)
        due = bool(self._interval) and not self.tokens % self._interval
        self._passing = self.tokens if passing and not due else 0
        self._kept[self.tokens] = states

    def of(self, tokens: Sequence[int]) -> dict[int, States]:
        """Return the states that are those of these tokens."""
        equal = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(tokens, self._tokens, strict=False)))
        return {at: states for at, states in self._kept.items() if at <= equal}
