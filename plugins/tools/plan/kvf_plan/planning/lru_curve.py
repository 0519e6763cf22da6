"""The hit rate of LRU at every capacity, from one pass over a trace. Pure.

Under LRU a cache of n chunks holds the first n of one stack, whatever n is. After each request its chunks lie on top,
its beginning first, since the policy hears of a prompt's last chunk first. So what a request shares with an earlier one
lies in the stack in one piece: its depth is known from the pieces above, and a Fenwick tree sums those. This costs a
request, not a chunk, a logarithm.
"""

from __future__ import annotations

from bisect import bisect_left
from itertools import accumulate

import msgspec

from kvf_plan.planning.prompts import Prompts


class LruCurve(msgspec.Struct, frozen=True):
    """`hits[n]` is how many of `uses` a cache of n chunks holds with all that comes before them; the last is that of an
    endless one, and of every larger cache.

    `found` has for each request where in the stack its chunks lay, in the prompt's order: pairs of how many chunks lay
    above the first of a piece, and how many are in it. What is not there is new.
    """

    hits: list[int]
    uses: int
    chunk_tokens: int
    tokens: int
    found: list[list[tuple[int, int]]]

    def token_hit_rate(self, chunks: int) -> float:
        """Return the share of all tokens of prompts; those that fill no chunk are never hit."""
        return self._at(chunks) * self.chunk_tokens / self.tokens if self.tokens else 0.0

    def chunks_for(self, token_hit_rate: float) -> int | None:
        """Return the least capacity with this hit rate, None if no capacity has it."""
        capacities = range(len(self.hits))
        found = bisect_left(capacities, token_hit_rate, key=self.token_hit_rate)
        return found if found < len(capacities) else None

    def hits_of(self, request: int, chunks: int) -> int:
        """Return how many chunks of one request, from the first on, a cache of `chunks` has."""
        return sum(min(length, chunks - above) for above, length in self.found[request] if above < chunks)

    def _at(self, chunks: int) -> int:
        return self.hits[min(max(chunks, 0), len(self.hits) - 1)]


def lru_curve(prompts: Prompts) -> LruCurve:
    """Make the curve. Takes a small part of a microsecond a chunk, and 8 bytes a node."""
    last = [-1] * prompts.nodes
    # Of each request, how many chunks no later one has used: its end, from some chunk on.
    pieces = _Sums(len(prompts.prompts))
    stacked = 0
    found: list[list[tuple[int, int]]] = []
    # How many hits begin, less those that end, at each depth.
    steps = [0] * (prompts.nodes + 2)
    for index, prompt in enumerate(prompts.prompts):
        nodes = prompt.nodes
        at, count = 0, len(nodes)
        found.append([])
        while at < count and (of := last[nodes[at]]) >= 0:
            begin = at
            while at < count and last[nodes[at]] == of:
                at += 1
            # The request's own beginning, which lies above this piece, has left the sums already.
            above = begin + stacked - pieces.up_to(of)
            steps[above + 1] += 1
            steps[above + at - begin + 1] -= 1
            found[-1].append((above, at - begin))
            pieces.add(of, begin - at)
            stacked -= at - begin
        for node in nodes:
            last[node] = index
        pieces.add(index, count)
        stacked += count
    at_depth = list(accumulate(steps[:-1]))
    return LruCurve(list(accumulate(at_depth)), prompts.uses, prompts.chunk_tokens, prompts.tokens, found)


class _Sums:
    """A Fenwick tree over the requests."""

    def __init__(self, size: int) -> None:
        self._tree = [0] * (size + 1)

    def add(self, index: int, amount: int) -> None:
        tree, index = self._tree, index + 1
        while index < len(tree):
            tree[index] += amount
            index += index & -index

    def up_to(self, index: int) -> int:
        """Return the sum of those up to and with `index`."""
        tree, index, total = self._tree, index + 1, 0
        while index:
            total += tree[index]
            index &= index - 1
        return total
