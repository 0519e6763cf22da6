"""The proof that a selective prefill computes the logits of the model itself. Runs in the engine process, once per
model, before its first prompt.

Models differ in more than their layers: scaled embeddings, capped logits, masks of their own. The check knows none of
that by name; a model with a feature that `Decoder` misses gives other logits, and is refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from kvf_blend.engine.decoder import Decoder
from kvf_blend.engine.prefill import Choice, prefill
from kvf_blend.engine.recompute import Held, by_deviation
from kvf_blend.errors import BlendRefused
from kvf_transformers.forward import Forward
from kvf_transformers.shapes import LayerPair, layers_of
from transformers import DynamicCache

_TOKENS = 24
_HELD = Held(_TOKENS, 5, ((5, 12), (14, 21)))
# Relative to the length of all logits: the effect that the order of additions may have.
_TOLERANCES = {torch.float32: 1e-3, torch.float16: 0.03, torch.bfloat16: 0.1}


def check_decoder(model: Any, decoder: Decoder) -> None:
    """Blocks for four forward passes of 24 tokens. Raises `BlendRefused` unless the logits of a prompt are the model's
    own in three cases: without any hit, with all loaded tokens recomputed, and with the right KV loaded."""
    tokens = [(at * 7 + 3) % model.config.vocab_size for at in range(_TOKENS)]
    cache = DynamicCache()
    expected = Forward(model).compute(tokens, cache)
    exact = layers_of(cache, tokens=_TOKENS)
    try:
        _compare(decoder, "no hit", tokens, expected, Held(_TOKENS), _spoiled(exact, 0), None)
        everything = partial(by_deviation, share=1.0)
        _compare(decoder, "everything recomputed", tokens, expected, _HELD, _spoiled(exact, _HELD.prefix), everything)
        some = partial(by_deviation, share=0.3)
        _compare(decoder, "the right KV loaded", tokens, expected, _HELD, _spoiled(exact, _TOKENS), some)
    except BlendRefused:
        raise
    except Exception as error:  # noqa: BLE001 - whatever a foreign model raises, it is not built as needed
        decoder.refuse(f"its layers cannot be called one by one: {type(error).__name__}: {error}")


def _compare(
    decoder: Decoder,
    case: str,
    tokens: Sequence[int],
    expected: torch.Tensor,
    held: Held,
    pairs: list[LayerPair],
    choose: Choice | None,
) -> None:
    found = prefill(decoder, tokens, held, pairs, choose).logits.float()
    distance = float((found - expected.float()).norm() / expected.float().norm())
    # Not "more than": NaN must not pass.
    if not distance <= _TOLERANCES.get(expected.dtype, 0.0):
        decoder.refuse(f"with {case} its logits are off by {distance:.2g} of their length")


def _spoiled(pairs: Sequence[LayerPair], kept: int) -> list[LayerPair]:
    """A copy that is right for the first `kept` tokens only."""
    copies = [(keys.clone(), values.clone()) for keys, values in pairs]
    for keys, values in copies:
        keys[:, :, kept:].neg_()
        values[:, :, kept:].neg_()
    return copies
