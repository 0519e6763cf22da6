"""The keys and values that transformers' caches hold, layer by layer. Pure, engine side."""

from __future__ import annotations

from collections.abc import Sequence
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
                hint="save the requests of a batch one by one",
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
