"""The keys and values that transformers' caches hold, layer by layer. Pure, engine side.

The recurrent states behind the chunks of one request: which are kept while it is computed, and for which tokens.
Pure.

Keys and values of a chunk can be taken from the cache at any later time, a state only in the moment when the chunk's
last token has been computed. A hit ends where a state was kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile
from typing import Any

import torch

from kvframework.errors import BadLayout
from transformers import cache_utils

# Keys and values of one layer, [1, heads, tokens, dim].
LayerPair = tuple[torch.Tensor, torch.Tensor]


def _classes(*names: str) -> frozenset[type]:
    """The classes of those names that this release of transformers has."""
    return frozenset(getattr(cache_utils, name) for name in names if hasattr(cache_utils, name))


# Only these very classes, since subclasses may keep more. Layers of the first two kinds have keys and values.
_ATTENTION = _classes("DynamicLayer", "DynamicSlidingWindowLayer", "StaticLayer", "StaticSlidingWindowLayer")
_BOTH = _classes(
    "LinearAttentionAndFullAttentionLayer",
    "LinearAttentionAndSlidingWindowAttentionLayer",
    "LinearAttentionAndStaticFullAttentionLayer",
    "LinearAttentionAndStaticSlidingWindowAttentionLayer",
)
_STATES = _classes("LinearAttentionLayer")
_NOTHING = _classes("DummyLayer")
_KNOWN = _ATTENTION | _BOTH | _STATES | _NOTHING


def has_pair(layer: object) -> bool:
    return type(layer) in _ATTENTION or type(layer) in _BOTH


def has_states(layer: object) -> bool:
    return type(layer) in _STATES or type(layer) in _BOTH


def layers_of(cache: Any, *, tokens: int) -> list[LayerPair]:
    """Return keys and values of the layers that have them, borrowed from `cache`; of a static layer the part that is
    written.

    Raises `BadLayout` for another kind of cache, and unless every such layer holds all of the first `tokens` tokens of
    one request.
    """
    check_layers("the cache", checked_cache(cache).layers)
    pairs = []
    for index, layer in enumerate(cache.layers):
        if not has_pair(layer):
            continue
        shapes = [tuple(tensor.shape) for tensor in (layer.keys, layer.values) if isinstance(tensor, torch.Tensor)]
        if len(shapes) != 2 or any(len(shape) != 4 or shape[0] != 1 for shape in shapes):
            raise BadLayout(
                f"keys and values have the shapes {' and '.join(map(str, shapes)) or '(missing)'}",
                where=f"layer {index}",
                available="[1, heads, tokens, dim]",
                hint="save each request of a batch separately",
            )
        seen, kept = int(layer.get_seq_length()), min(shape[2] for shape in shapes)
        if seen < tokens or kept < seen:
            raise BadLayout(
                f"{type(layer).__name__} holds {min(kept, seen)} of {max(seen, tokens)} tokens",
                where=f"layer {index}",
                available=f"all of at least {tokens} tokens",
                hint="a cache that drops tokens outside the window cannot be stored: use the cache of restore()",
            )
        pairs.append((layer.keys[:, :, :seen], layer.values[:, :, :seen]))
    if not len(cache):
        raise BadLayout("the cache has no layers", hint="the model ignores the past_key_values that it is given")
    return pairs


def checked_cache(cache: Any) -> Any:
    """Return the cache. Raises `BadLayout` for an object of another kind."""
    if not isinstance(cache, cache_utils.Cache):
        raise BadLayout(
            f"the cache is a {type(cache).__name__}",
            available="DynamicCache, StaticCache",
            hint="continuous batching makes its own PagedAttentionCache and cannot load prompts",
        )
    return cache


def check_layers(where: str, layers: Sequence[object]) -> None:
    """Raise `BadLayout` for a layer that may keep more than keys, values and states."""
    others = sorted({type(layer).__name__ for layer in layers if type(layer) not in _KNOWN})
    if others:
        raise BadLayout(
            f"the cache has layers of {', '.join(others)}",
            where=where,
            available=", ".join(sorted(cls.__name__ for cls in _KNOWN)),
            hint="only keys and values of every token, and recurrent states, can be stored",
        )


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
