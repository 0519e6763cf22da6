"""A simulated fleet that finds its KV by hints: conversations that come back at any node, L1 by least recent use, one
hint an object, nodes that restart. It counts what a directory is asked and given; time is requests, so bandwidth and
congestion are not in it.
"""

from __future__ import annotations

import random
from collections import Counter, OrderedDict

# Chunks of an L1, and of a request's prompt: what it brings and what its answer adds.
L1_CHUNKS = 512
_SYSTEM_PROMPTS, _SYSTEM_CHUNKS = 20, 4
_NEW_CHUNKS = (1, 4)
_LONGEST = 48
# Share of requests that begin a conversation; the conversations of the last requests that may go on.
_BEGINS, _RECENT = 0.3, 4
# Requests of one node a second, and a restart of each node after so many.
REQUESTS_A_SECOND = 2.0
_RESTART_AFTER = 2000
# For the size of the directory: objects of a node, 256 GiB of 32 MiB each, and the life of a hint, which is told again
# at half of it while the object is there.
NODE_OBJECTS = 8192
TTL_S = 900
# A hint in Redis 6.2, with its expiry: the growth of `used_memory` by a million of them.
HINT_BYTES = 145

Chunk = tuple[int, int]


class Fleet:
    """Counts what happens to the requests that it is given."""

    def __init__(self, nodes: int, seed: int = 1) -> None:
        self.counts: Counter[str] = Counter()
        self.hints: dict[Chunk, tuple[int, int]] = {}
        self._nodes: list[OrderedDict[Chunk, None]] = [OrderedDict() for _ in range(nodes)]
        self._boots = [0] * nodes
        self._chance = random.Random(seed)
        self._going_on: list[list[Chunk]] = []
        self._conversations = 0

    def request(self) -> None:
        """One prompt at a random node: what its L1 lacks it has from the node that a hint names, or computes."""
        chance = self._chance
        number = chance.randrange(len(self._nodes))
        if chance.random() < 1 / _RESTART_AFTER:
            self._nodes[number].clear()
            self._boots[number] += 1
        prompt, own = self._prompt(), self._nodes[number]
        self.counts.update(requests=1, chunks=len(prompt))
        here = 0
        while here < len(prompt) and prompt[here] in own:
            here += 1
        got = here
        if here < len(prompt):
            got += self._from_peers(number, prompt[here:])
        self.counts.update(own=here, peers=got - here)
        for chunk in prompt:
            own[chunk] = None
            own.move_to_end(chunk)
        while len(own) > L1_CHUNKS:
            own.popitem(last=False)
        for chunk in prompt[here:]:
            self.hints[chunk] = number, self._boots[number]
        self.counts.update(told=len(prompt) - here)

    def _from_peers(self, number: int, rest: list[Chunk]) -> int:
        """How many chunks come, in the order of the prompt; counts the questions."""
        self.counts.update(looked_up=1, keys=len(rest))
        asked: set[int] = set()
        useful: set[int] = set()
        came = 0
        for chunk in rest:
            holder, boot = self.hints.get(chunk, (number, -1))
            if holder == number or boot != self._boots[holder]:
                break
            asked.add(holder)
            if chunk not in self._nodes[holder]:
                break
            useful.add(holder)
            came += 1
        self.counts.update(asked=len(asked), vain=len(asked - useful))
        return came

    def _prompt(self) -> list[Chunk]:
        chance, most = self._chance, _RECENT * len(self._nodes)
        if not self._going_on or chance.random() < _BEGINS:
            self._conversations += 1
            system = -1 - int(_SYSTEM_PROMPTS * chance.random() ** 2)
            prompt = [(system, at) for at in range(_SYSTEM_CHUNKS)]
        else:
            prompt = self._going_on.pop(chance.randrange(len(self._going_on)))
        name = next((each for each, _ in reversed(prompt) if each > 0), self._conversations)
        prompt = prompt + [(name, len(prompt) + at) for at in range(chance.randint(*_NEW_CHUNKS))]
        if len(prompt) < _LONGEST:
            self._going_on.append(prompt)
        if len(self._going_on) > most:
            self._going_on[chance.randrange(len(self._going_on))] = self._going_on[-1]
            self._going_on.pop()
        return prompt


def fleet_rows(nodes: int, turns: int) -> tuple[str, ...]:
    """Simulate `turns` requests of each node, after as many that fill it; a row of the table."""
    fleet = Fleet(nodes)
    for _ in range(nodes * turns):
        fleet.request()
    fleet.counts.clear()
    for _ in range(nodes * turns):
        fleet.request()
    counts = fleet.counts
    rate = nodes * REQUESTS_A_SECOND / counts["requests"]
    told = counts["told"] * rate
    # What left L1 meanwhile stays until it expires.
    hints = nodes * NODE_OBJECTS + told * TTL_S
    return (
        f"{nodes:,}",
        f"{counts['own'] / counts['chunks']:.0%}",
        f"{counts['peers'] / counts['chunks']:.0%}",
        f"{counts['looked_up'] * rate:,.0f}",
        f"{counts['keys'] * rate:,.0f}",
        f"{counts['asked'] / max(counts['looked_up'], 1):.2f}",
        f"{counts['vain'] / max(counts['asked'], 1):.1%}",
        f"{told + nodes * NODE_OBJECTS / (TTL_S / 2):,.0f}",
        f"{hints / 1e6:,.1f} million",
        f"{hints * HINT_BYTES / 1e9:,.2f} GB",
    )
