"""The inspection of a model before its first prompt: the shape of each layer's KV, or the reason why it cannot be kept.

Runs in the engine process, once a model; blocks for a forward pass of one token.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from kvframework.errors import BadLayout

# Keys and values of one layer, [1, heads, tokens, dim].
LayerPair = tuple[torch.Tensor, torch.Tensor]

_HINT = "only attention layers that keep keys and values of every token can be stored"


def learn_layers(model: Any) -> list[LayerPair]:
    """Return a template per layer: keys and values of no tokens, with the model's heads, head sizes, dtypes and
    devices.

    Raises `BadLayout` for models that keep anything but keys and values per token.
    """
    config = model.config
    if getattr(config, "is_encoder_decoder", False):
        raise BadLayout(f"{type(model).__name__} is an encoder-decoder", available="decoder models", hint=_HINT)
    _check_classes(type(model).__name__, DynamicCache(config=config).layers, sliding=True)
    cache = DynamicCache()
    try:
        with torch.no_grad():
            model(input_ids=torch.zeros(1, 1, dtype=torch.long, device=model.device), past_key_values=cache)
    except Exception as error:
        raise BadLayout(
            f"{type(model).__name__} cannot run with a plain DynamicCache: {type(error).__name__}: {error}", hint=_HINT
        ) from error
    pairs = layers_of(cache, tokens=1)
    if any(plane.shape[2] != 1 for pair in pairs for plane in pair):
        raise BadLayout(f"{type(model).__name__} keeps KV of more tokens than it is given", hint=_HINT)
    return [(keys[:, :, :0], values[:, :, :0]) for keys, values in pairs]


def layers_of(cache: Any, *, tokens: int) -> list[LayerPair]:
    """Return keys and values of each layer, borrowed from `cache`.

    Raises `BadLayout` unless every layer holds all of the first `tokens` tokens of one request.
    """
    _check_classes("the cache", cache.layers, sliding=False)
    pairs = []
    for index, layer in enumerate(cache.layers):
        shapes = [tuple(tensor.shape) for tensor in (layer.keys, layer.values) if isinstance(tensor, torch.Tensor)]
        if len(shapes) != 2 or any(len(shape) != 4 or shape[0] != 1 or shape[2] < tokens for shape in shapes):
            raise BadLayout(
                f"keys and values are {' and '.join(map(str, shapes)) or 'not there'}",
                where=f"layer {index}",
                available=f"[1, heads, at least {tokens} tokens, dim]",
                hint="a batch of one request",
            )
        pairs.append((layer.keys, layer.values))
    if not pairs:
        raise BadLayout("the cache has no layers", hint="the model does not use the past_key_values that it is given")
    return pairs


def _check_classes(where: str, layers: Sequence[object], *, sliding: bool) -> None:
    """Accept only the very classes, since subclasses may keep more than keys and values."""
    allowed = {DynamicLayer, DynamicSlidingWindowLayer} if sliding else {DynamicLayer}
    others = sorted({type(layer).__name__ for layer in layers if type(layer) not in allowed})
    if others:
        hint = "make the cache without a config: DynamicCache()" if not sliding else _HINT
        raise BadLayout(
            f"layers of {', '.join(others)}",
            where=where,
            hint=hint,
            available=", ".join(sorted(cls.__name__ for cls in allowed)),
        )
