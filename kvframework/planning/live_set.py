"""The live set: the chunks that will be asked for again. Pure.

A policy that knew the future would need as much and no more; below it every policy loses hits that it could have.
"""

from __future__ import annotations

import msgspec

from kvframework.planning.prompts import Prompts


class LiveSet(msgspec.Struct, frozen=True):
    """Counts of chunks: `most` that will be asked for again, at most at once, `at` seconds; `reused` that ever were,
    `stored` that were ever seen; `hits` of `uses` in an endless cache."""

    most: int
    at: float
    reused: int
    stored: int
    uses: int
    hits: int

    @property
    def hit_rate(self) -> float:
        """What an endless cache has of all uses of whole chunks."""
        return self.hits / self.uses if self.uses else 0.0


def live_set(prompts: Prompts) -> LiveSet:
    """Count them in one pass back and one forth."""
    times = bytearray(prompts.nodes)  # used: never, once, more often
    last_uses = [0] * len(prompts.prompts)
    for index in range(len(prompts.prompts) - 1, -1, -1):
        for node in prompts.prompts[index].nodes:
            if not times[node]:
                times[node] = 1
                last_uses[index] += 1
            else:
                times[node] = 2
    first_seen = 0  # nodes are numbered in the order of first use
    live = most = uses = 0
    at = 0.0
    for prompt, ending in zip(prompts.prompts, last_uses, strict=True):
        new = max(prompt.nodes[-1] + 1 - first_seen, 0) if prompt.nodes else 0
        first_seen += new
        uses += len(prompt.nodes)
        # Those that end here were live until now; those that begin are live from now on, unless they end at once.
        live += new - ending
        if live > most:
            most, at = live, prompt.at
    return LiveSet(most, at, times.count(2), prompts.nodes, uses, uses - prompts.nodes)
