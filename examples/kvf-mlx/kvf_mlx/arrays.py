"""The arrays of mlx-lm's caches as tensors and back, and the form of a model's cache. Engine side."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np
import torch
from mlx_lm.models.cache import ArraysCache, KVCache, make_prompt_cache

from kvframework.errors import BadLayout

DTYPES = {mx.float32: torch.float32, mx.float16: torch.float16, mx.bfloat16: torch.bfloat16}
Pair = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class Form:
    """A model's cache: by the name of a layer the keys and values `[1, heads, 0, dim]`, or the shape of a state."""

    pairs: dict[str, Pair]
    states: dict[str, tuple[tuple[int, ...], torch.dtype]]

    def empty(self, tokens: int) -> dict[str, Any]:
        """New tensors for so many tokens, and for the states behind them."""
        made: dict[str, Any] = {
            name: tuple(plane.new_empty(1, plane.shape[1], tokens, plane.shape[3]) for plane in pair)
            for name, pair in self.pairs.items()
        }
        for name, (shape, dtype) in self.states.items():
            made[name] = torch.empty(1, int(np.prod(shape)), dtype=dtype)
        return made


def learnt(model: Any) -> Form:
    """Return the form, by a forward pass of one token. Raises `BadLayout` for caches of other kinds than keys and
    values of all tokens and plain states: windows, quantised ones, lists."""
    caches = make_prompt_cache(model)
    model(mx.array([[0]]), cache=caches)
    tensors = read(caches)
    if tensors is None:
        kinds = sorted({type(cache).__name__ for cache in caches})
        raise BadLayout(f"the model's caches are {', '.join(kinds)}", available="KVCache, ArraysCache")
    return Form(
        {name: tuple(plane[:, :, :0] for plane in each) for name, each in tensors.items() if isinstance(each, tuple)},  # type: ignore[misc]
        {name: (tuple(each.shape), each.dtype) for name, each in tensors.items() if not isinstance(each, tuple)},
    )


def read(caches: Sequence[Any]) -> dict[str, Any] | None:
    """Return copies of what the caches hold, by layer; None if one of them is of another kind, or empty."""
    found: dict[str, Any] = {}
    for index, cache in enumerate(caches):
        if type(cache) is KVCache and not cache.empty():
            found[f"layers.{index}"] = tuple(_tensor(plane) for plane in cache.keys_and_values())
        elif type(cache) is ArraysCache and all(each is not None for each in cache.cache):
            for number, each in enumerate(cache.cache):
                found[f"states.{index}.{number}"] = _tensor(each)
        else:
            return None
    return found


def fill(form: Form, caches: Sequence[Any], tensors: dict[str, Any], tokens: int) -> None:
    """Put what was loaded into the new caches of a model."""
    for index, cache in enumerate(caches):
        if type(cache) is KVCache:
            keys, values = tensors[f"layers.{index}"]
            cache.keys, cache.values, cache.offset = _array(keys), _array(values), tokens
        else:
            for number in range(len(cache.cache)):
                name = f"states.{index}.{number}"
                cache[number] = _array(tensors[name].view(form.states[name][0]))


def _tensor(array: mx.array) -> torch.Tensor:
    dtype = DTYPES.get(array.dtype)
    if dtype is None:
        raise BadLayout(f"an array of {array.dtype}", available=", ".join(map(str, DTYPES)))
    # numpy has no bfloat16.
    numbers = np.array(array.view(mx.uint16) if dtype is torch.bfloat16 else array)
    return torch.from_numpy(numbers).view(dtype)


def _array(tensor: torch.Tensor) -> mx.array:
    if tensor.dtype is torch.bfloat16:
        return mx.array(tensor.view(torch.uint16).numpy()).view(mx.bfloat16)
    return mx.array(tensor.numpy())
