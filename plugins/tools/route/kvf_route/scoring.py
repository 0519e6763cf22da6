"""How much of a prompt each node holds. Pure.

A node is what a request can be sent to: all places that its publishers tell of. The hit is the run of blocks from the
beginning of the prompt that it has anywhere; each block counts for the fastest tier that has it.

A prompt that a thousand nodes have takes a third of a second, so a score is computed in steps: others have the loop in
between. What a node gets or loses meanwhile may count or not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import xxhash

from kvf_route import prefix_hashes
from kvf_route.contents import Place
from kvf_route.events import TIERS
from kvf_route.index import Flags, Index, Keys
from kvframework.api.hasher import DIGEST_BYTES

# Tokens by tier.
Score: TypeAlias = dict[str, int]
# By node; None after each step of some milliseconds, until the last one.
Scoring: TypeAlias = Iterator[dict[str, Score] | None]
# Whether each place, a row, has each of some blocks, a column.
_Has: TypeAlias = Callable[[Sequence[int], npt.NDArray[np.uint64]], Flags]

_NOWHERE = len(TIERS)
_RANKS = {tier: rank for rank, tier in enumerate(TIERS)}
# Most nodes have nothing of a prompt, so that the first block decides; the rest is asked for in growing spans.
_FIRST_SPAN, _GROWTH, _LONGEST_SPAN = 1, 8, 1024
# Blocks that are looked for in one step, in all places together.
_STEP = 1 << 14


def by_tokens(
    index: Index, nodes: Mapping[str, Sequence[Place]], tokens: bytes, *, salt: str = "", adapter: str = ""
) -> Scoring:
    """The score of each node for packed tokens. A node whose publishers have blocks of several sizes gets the best
    score of one size."""
    best: dict[str, Score] = {node: {} for node in nodes}
    for size in sorted({place.block_tokens for places in nodes.values() for place in places}):
        sized = {node: [each for each in places if each.block_tokens == size] for node, places in nodes.items()}
        prompt = _Prompt(tokens, size, salt, adapter)
        for scores in _scores(sized, len(tokens) // (4 * size), size, prompt.owns, index.holds):
            if scores is None:
                yield None
                continue
            for node, score in scores.items():
                if sum(score.values()) > sum(best[node].values()):
                    best[node] = score
    yield best


def by_digests(
    index: Index,
    nodes: Mapping[str, Sequence[Place]],
    digests: bytes,
    chunk_tokens: int,
    *,
    model: str,
    salt: str = "",
    adapter: str = "",
) -> Scoring:
    """The score of each node for packed digests of kvframework's chunks."""

    def externals(span: slice) -> Keys:
        named = range(span.start * DIGEST_BYTES, span.stop * DIGEST_BYTES, DIGEST_BYTES)
        found = (last_block(digests[at : at + DIGEST_BYTES], model, salt, adapter) for at in named)
        return np.fromiter(found, np.uint64)

    for scores in _scores(nodes, len(digests) // DIGEST_BYTES, chunk_tokens, externals, index.holds_externals):
        yield None if scores is None else {node: scores.get(node, {}) for node in nodes}


def last_block(digest: bytes, model: str, salt: str, adapter: str) -> int:
    """The hash by which kvframework's servers tell the last block of a chunk, unless its engine has one of its own."""
    root = "\0".join((model, salt, adapter)).encode("utf-8", "surrogatepass")
    return xxhash.xxh3_64_intdigest(digest, seed=xxhash.xxh3_64_intdigest(root)) >> 1


class _Prompt:
    """The names of a prompt's blocks, made as far as they are asked for, span after span: most are not."""

    def __init__(self, tokens: bytes, block_tokens: int, salt: str, adapter: str) -> None:
        self._tokens = tokens
        self._block_tokens = block_tokens
        self._extras = {0: prefix_hashes.salted(salt)}
        self._last = prefix_hashes.root(adapter)

    def owns(self, span: slice) -> Keys:
        step = 4 * self._block_tokens
        tokens = self._tokens[span.start * step : span.stop * step]
        names = prefix_hashes.chained(self._last, tokens, self._block_tokens, self._extras)
        self._last, self._extras = names[-1], {}
        return prefix_hashes.as_keys(names)


def _scores(
    nodes: Mapping[str, Sequence[Place]], blocks: int, block_tokens: int, names: Callable[[slice], Keys], has: _Has
) -> Scoring:
    """The score of each node that has any of so many blocks; `names` returns those of a span, each asked for once."""
    alive = [node for node, places in nodes.items() if places]
    totals = {node: np.zeros(_NOWHERE, np.int64) for node in alive}
    for span in _spans(blocks):
        if not alive:
            break
        keys, here, alive = names(span), alive, []
        for group in _groups(nodes, here, len(keys)):
            best = _best(nodes, group, keys, has)
            runs = _runs(best)
            within = np.arange(best.shape[1]) < runs[:, None]
            for rank in range(_NOWHERE):
                for node, number in zip(group, ((best == rank) & within).sum(1).tolist(), strict=True):
                    totals[node][rank] += number
            alive += [node for node, run in zip(group, runs.tolist(), strict=True) if run == best.shape[1]]
            yield None
    yield {
        node: {tier: int(total[rank]) * block_tokens for tier, rank in _RANKS.items() if total[rank]}
        for node, total in totals.items()
        if total.any()
    }


def _groups(nodes: Mapping[str, Sequence[Place]], alive: Sequence[str], width: int) -> Iterator[list[str]]:
    """Nodes with so many places together as can be looked at in one step, one node at least."""
    group: list[str] = []
    places = 0
    for node in alive:
        if group and (places + len(nodes[node])) * width > _STEP:
            yield group
            group, places = [], 0
        group.append(node)
        places += len(nodes[node])
    if group:
        yield group


def _best(nodes: Mapping[str, Sequence[Place]], alive: list[str], keys: Keys, has: _Has) -> npt.NDArray[np.uint8]:
    """The rank of the fastest tier in which each node, a row, has each block, a column."""
    rows = [place for node in alive for place in nodes[node]]
    ranks = np.array([_RANKS[place.tier] for place in rows], np.uint8)
    flags = has([place.number for place in rows], keys)
    ranked = np.where(flags, ranks[:, None], np.uint8(_NOWHERE))
    starts = np.cumsum([0, *(len(nodes[node]) for node in alive[:-1])])
    return np.minimum.reduceat(ranked, starts, axis=0)


def _runs(best: npt.NDArray[np.uint8]) -> npt.NDArray[np.int64]:
    """How many blocks from the first each row has without a gap."""
    lacking = best == _NOWHERE
    runs: npt.NDArray[np.int64] = np.where(lacking.any(1), lacking.argmax(1), best.shape[1])
    return runs


def _spans(blocks: int) -> Iterator[slice]:
    begin, width = 0, _FIRST_SPAN
    while begin < blocks:
        yield slice(begin, min(begin + width, blocks))
        begin, width = begin + width, min(width * _GROWTH, _LONGEST_SPAN)
