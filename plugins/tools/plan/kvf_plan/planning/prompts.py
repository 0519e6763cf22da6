"""The prompts of a trace as paths in the tree of their prefixes. Pure.

A node of the tree is a prefix of whole chunks, numbered in the order of first use: two prompts share a node if and only
if they are equal up to its end. So a cache of nodes has the ancestors of all that it holds, as long as it lets the last
chunk of a prompt go first.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable

import msgspec

from kvf_plan.trace.form import Request
from kvf_plan.trace.summary import LiveCount, LiveSet


class Prompt(msgspec.Struct, frozen=True, gc=False):
    """`at` in seconds from the trace's start; `nodes` from the first chunk on, those that are not full left out."""

    at: float
    tokens: int
    nodes: array[int]


class Prompts(msgspec.Struct, frozen=True):
    """All prompts in the order of time. `nodes` is how many different ones there are, `uses` how many uses of them."""

    chunk_tokens: int
    prompts: list[Prompt]
    nodes: int

    @property
    def tokens(self) -> int:
        """The tokens of all prompts."""
        return sum(prompt.tokens for prompt in self.prompts)

    @property
    def uses(self) -> int:
        return sum(len(prompt.nodes) for prompt in self.prompts)

    @property
    def seconds(self) -> float:
        """From the first request to the last."""
        return self.prompts[-1].at - self.prompts[0].at if self.prompts else 0.0

    def live_set(self) -> LiveSet:
        """Count the live set of all prompts."""
        count = LiveCount()
        for prompt in self.prompts:
            count.add(prompt.at, prompt.nodes)
        return count.found()


def prompts_of(requests: Iterable[Request], chunk_tokens: int) -> Prompts:
    """Read all requests of a trace of `chunk_tokens`. Keeps 4 bytes a chunk and 100 a node."""
    known: dict[tuple[int, int], int] = {}
    made = []
    for request in requests:
        nodes = array("i")
        at = -1
        for chunk in request.chunks[: request.tokens // chunk_tokens]:
            # A chunk's id says what comes before it; with the parent it is also right where a trace's ids do not.
            at = known.setdefault((at, chunk), len(known))
            nodes.append(at)
        made.append(Prompt(request.at, request.tokens, nodes))
    return Prompts(chunk_tokens, made, len(known))
