"""The selective prefill (CacheBlend, EuroSys '25): a prompt's logits and whole KV, of which most was loaded and only
the chosen tokens go through the model. Runs in the engine process and thread.

Layer 0 runs for every token behind the prefix. Layer 1 then makes fresh keys and values for all of them; their distance
to the loaded ones shows which tokens differ most in this prompt. Only the chosen tokens go through the further layers;
in each layer their fresh keys and values replace the loaded ones, and they attend to all.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from kvf_blend.engine.recompute import Held, by_deviation
from kvf_blend.errors import BlendRefused
from kvf_transformers.forward import Forward
from kvf_transformers.shapes import LayerPair, layers_of
from transformers import DynamicCache

# Tokens that attend at once: bounds the mask, and a token of a slice does not attend to slices behind it.
_SLICE = 1024

# Maps deviations of the loaded tokens to the sorted positions that are computed; None for "without a measure".
Choice = Callable[[Held, torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Prefilled:
    """`logits` `[1, vocabulary]` behind the last token; `recomputed` of the loaded tokens went through all layers."""

    logits: torch.Tensor
    recomputed: int


def prefill(
    decoder: Decoder, tokens: Sequence[int], held: Held, pairs: Sequence[LayerPair], choose: Choice | None
) -> Prefilled:
    """Fill `pairs`, the KV of the whole prompt layer by layer, in place, where nothing was loaded and at the positions
    of `choose`; with None no loaded token is recomputed, and layer 0 does not run for it either.

    The contents of `pairs` for tokens that are not loaded are never read. Blocks for the computation.
    """
    missing = held.missing_positions()
    sink = _Scatter(pairs)
    with torch.no_grad():
        if choose is not None and held.segments:
            positions, hidden, done = _chosen(decoder, tokens, held, pairs, choose)
        else:
            positions, hidden, done = missing, decoder.embed([tokens[at] for at in missing.tolist()]), 0
        for layer in range(done, decoder.layers):
            hidden = _through(decoder, layer, hidden, positions, sink)
        return Prefilled(decoder.logits(hidden), len(positions) - len(missing))


def _chosen(
    decoder: Decoder, tokens: Sequence[int], held: Held, pairs: Sequence[LayerPair], choose: Choice
) -> tuple[torch.Tensor, torch.Tensor, int]:
    """The chosen positions, their hidden states, and the number of layers that these have gone through."""
    positions = torch.arange(held.prefix, held.tokens)
    hidden = _through(decoder, 0, decoder.embed(tokens[held.prefix :]), positions, _Scatter(pairs))
    if decoder.layers == 1:
        return positions, hidden, 1
    positions = choose(held, _deviation(decoder, hidden, positions, held, pairs[1]))
    return positions, hidden[:, (positions - held.prefix).to(hidden.device)], 1


def _through(
    decoder: Decoder, layer: int, hidden: torch.Tensor, positions: torch.Tensor, sink: _Scatter
) -> torch.Tensor:
    done = []
    for first in range(0, len(positions), _SLICE):
        here = positions[first : first + _SLICE].to(hidden.device)
        visible = int(here[-1]) + 1
        sink.next(here, visible)
        done.append(decoder.run_layer(layer, hidden[:, first : first + _SLICE], here, sink, visible))
    return torch.cat(done, dim=1)


def _deviation(
    decoder: Decoder, hidden: torch.Tensor, positions: torch.Tensor, held: Held, pair: LayerPair
) -> torch.Tensor:
    """The distance of the loaded KV of layer 1 from the fresh one: for each loaded token the squared distance of its
    keys and of its values, each relative to the mean of the fresh ones."""
    sink = _Measure()
    with contextlib.suppress(_Taken):
        decoder.run_layer(1, hidden, positions.to(hidden.device), sink, 1)
    loaded = held.loaded_positions().to(hidden.device)
    total = torch.zeros(len(loaded), dtype=torch.float32, device=hidden.device)
    for fresh, full in zip(sink.fresh, pair, strict=True):
        new = fresh[:, :, loaded - held.prefix].float()
        distance = (new - full[:, :, loaded].float()).square().sum(dim=(0, 1, 3))
        size = fresh.float().square().sum(dim=(0, 1, 3)).mean()
        total += distance / size.clamp_min(torch.finfo(torch.float32).tiny)
    return total


class _Scatter:
    """Writes fresh keys and values to their positions in the whole prompt's, and returns the visible ones."""

    def __init__(self, pairs: Sequence[LayerPair]) -> None:
        self._pairs = pairs
        self._positions = torch.empty(0, dtype=torch.long)
        self._visible = 0

    def next(self, positions: torch.Tensor, visible: int) -> None:
        self._positions, self._visible = positions, visible

    def update(
        self, keys: torch.Tensor, values: torch.Tensor, layer: int, *_more: object, **_named: object
    ) -> LayerPair:
        whole_keys, whole_values = self._pairs[layer]
        whole_keys.index_copy_(2, self._positions, keys)
        whole_values.index_copy_(2, self._positions, values)
        return whole_keys[:, :, : self._visible], whole_values[:, :, : self._visible]


class _Taken(Exception):
    """Ends a layer after its attention has passed on its keys and values."""


class _Measure:
    """Takes the keys and values of one layer, and ends it."""

    fresh: tuple[torch.Tensor, ...] = ()

    def update(
        self, keys: torch.Tensor, values: torch.Tensor, layer: int, *_more: object, **_named: object
    ) -> LayerPair:
        self.fresh = (keys, values)
        raise _Taken


_TOKENS = 24
_HELD = Held(_TOKENS, 5, ((5, 12), (14, 21)))
# Relative to the length of all logits: the effect that the order of additions may have.
_TOLERANCES = {torch.float32: 1e-3, torch.float16: 0.03, torch.bfloat16: 0.1}


def check_decoder(model: Any, decoder: Decoder) -> None:
    """Prove once per model that a selective prefill computes its logits: what `Decoder` misses of a model, such as
    scaled embeddings, capped logits or masks of its own, show in them. Blocks for four forward passes of 24 tokens.
    Raises `BlendRefused` unless the logits are the model's own without any hit, with all loaded tokens recomputed, and
    with the right KV loaded."""
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
        decoder.refuse(f"the model's layers cannot be called one by one: {type(error).__name__}: {error}")


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
        decoder.refuse(f"with {case} the model computes wrong logits, with a relative error of {distance:.2g}")


def _spoiled(pairs: Sequence[LayerPair], kept: int) -> list[LayerPair]:
    """A copy that is right for the first `kept` tokens only."""
    copies = [(keys.clone(), values.clone()) for keys, values in pairs]
    for keys, values in copies:
        keys[:, :, kept:].neg_()
        values[:, :, kept:].neg_()
    return copies


_PARTS = ("embed_tokens", "layers", "norm", "rotary_emb")
_ATTENTION = ("eager", "sdpa")
_HINT = "use TransformersKV for this model, which reuses prefixes only"


class Decoder:
    """One decoder of transformers, run layer by layer: embeddings, single layers, the head. Borrows the model. The only
    assumption about it is that it is built like Llama; `check_decoder` proves the rest. Raises `BlendRefused` for one
    that is not, or has windows."""

    def __init__(self, model: Any) -> None:
        self.name = type(model).__name__
        self._model = model
        self._inner = model.base_model
        self._head = model.get_output_embeddings()
        lacking = [part for part in _PARTS if not hasattr(self._inner, part)]
        if lacking or self._head is None:
            self.refuse(
                f"the model has no {', '.join(lacking) or 'output embeddings'}",
                available="decoders with embed_tokens, layers, norm, rotary_emb: Llama, Mistral, Qwen2, Qwen3",
            )
        config = model.config
        kinds = set(getattr(config, "layer_types", None) or ())
        if kinds - {"full_attention"} or (not kinds and getattr(config, "sliding_window", None)):
            self.refuse(
                "some layers of the model attend only to a window", available="layers that attend to every token"
            )
        if config._attn_implementation not in _ATTENTION:
            self.refuse(
                f"the model uses the attention implementation {config._attn_implementation!r}",
                available=", ".join(_ATTENTION),
            )

    @property
    def layers(self) -> int:
        return len(self._inner.layers)

    @property
    def device(self) -> torch.device:
        device: torch.device = self._model.device
        return device

    def embed(self, tokens: Sequence[int]) -> torch.Tensor:
        """Hidden states `[1, tokens, hidden]` before the first layer."""
        ids = torch.tensor([list(tokens)], dtype=torch.long, device=self.device)
        hidden: torch.Tensor = self._inner.embed_tokens(ids)
        return hidden

    def run_layer(
        self, layer: int, hidden: torch.Tensor, positions: torch.Tensor, sink: _Scatter | _Measure, visible: int
    ) -> torch.Tensor:
        """Hidden states behind the layer, of tokens at `positions`. `sink` returns the KV of the prompt's first
        `visible` tokens, of which each token attends to those up to its own position."""
        at = positions.unsqueeze(0)
        hidden = self._inner.layers[layer](
            hidden,
            attention_mask=_mask(positions, visible, hidden.dtype),
            position_ids=at,
            past_key_values=sink,
            use_cache=True,
            position_embeddings=self._inner.rotary_emb(hidden, position_ids=at),
        )
        return hidden[0] if isinstance(hidden, tuple) else hidden

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits `[1, vocabulary]` of the last token of `hidden`."""
        logits: torch.Tensor = self._head(self._inner.norm(hidden[:, -1:]))[:, -1]
        return logits

    def refuse(self, why: str, *, available: str = "") -> None:
        """Raise `BlendRefused`."""
        raise BlendRefused(why, where=self.name, available=available, hint=_HINT)


def _mask(positions: torch.Tensor, visible: int, dtype: torch.dtype) -> torch.Tensor:
    """The causal mask `[1, 1, positions, visible]`, which is added to the scores: no token attends to a later one."""
    later = torch.arange(visible, device=positions.device) > positions.unsqueeze(1)
    mask = torch.zeros(later.shape, dtype=dtype, device=positions.device)
    return mask.masked_fill_(later, torch.finfo(dtype).min)[None, None]
