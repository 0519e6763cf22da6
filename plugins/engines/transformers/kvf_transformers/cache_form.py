"""What a model's cache holds, learnt before its first prompt: keys and values per token, recurrent states, or nothing
that can be kept.

Runs in the engine process, once a model; blocks for a forward pass of one token, and for a model with states for some
of a dozen.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from kvf_transformers.forward import Forward
from kvf_transformers.shapes import LayerPair, check_layers, checked_cache, has_pair, has_states, layers_of
from kvframework.errors import BadLayout, RequestError
from transformers import DynamicCache, cache_utils

# Set while a model's form is learnt, whose passes concern no request.
LEARNING: ContextVar[bool] = ContextVar("LEARNING", default=False)
# The proof's prompt: so many tokens, and some more behind them.
_BEFORE, _BEHIND = 12, 4


class StatePlace(NamedTuple):
    """One recurrent state of a cache, and its form. Conv states and recurrent states are numbered apart."""

    layer: int
    kind: str
    number: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @property
    def name(self) -> str:
        return f"states.{self.layer}.{self.kind}.{self.number}"


class RestoredCache(DynamicCache):  # type: ignore[misc]
    """A cache that keeps every token, also those that leave a sliding window."""

    def activate_past_recording(self) -> None:
        """Begin to keep what may be taken back, which assisted generation does. It passes the whole prompt to the
        model again, whatever the cache holds, so the tokens that were restored would be there twice: refused with
        `RequestError`. On mps, generation of any kind calls this."""
        held = int(self.get_seq_length())
        if held and not any(getattr(layer, "device", None) == torch.device("mps:0") for layer in self.layers):
            raise RequestError(
                f"assisted generation cannot begin with a cache that holds {held} tokens",
                hint="decode without an assistant, or give generate() an empty cache and call save() afterwards",
            )
        super().activate_past_recording()

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat the tokens and states for each beam, or each answer that is asked for."""
        for layer in self.layers:
            if has_pair(layer):
                layer.batch_repeat_interleave(repeats)
            for states in (layer.conv_states, layer.recurrent_states) if has_states(layer) else ():
                for number, state in states.items():
                    states[number] = state if state is None else state.repeat_interleave(repeats, dim=0)


@dataclass(frozen=True)
class CacheForm:
    """`pairs` are keys and values of no tokens, of the layers `layers`; `plain`: of all, and there is nothing else.
    `kv_heads` are those of the whole model, by its configuration; 0: it does not say."""

    pairs: tuple[LayerPair, ...]
    layers: tuple[int, ...]
    states: tuple[StatePlace, ...] = ()
    plain: bool = True
    kv_heads: int = 0


def learn_form(model: Any) -> CacheForm:
    """Return what the model's cache holds, with its heads, head sizes, dtypes and devices.

    Raises `BadLayout` for a model that keeps anything but keys, values and states, for one whose tokens see later ones,
    and for one that does not go on from states that it is given.
    """
    learning = LEARNING.set(True)
    try:
        return _learn(model)
    finally:
        LEARNING.reset(learning)


def _learn(model: Any) -> CacheForm:
    name = type(model).__name__
    if getattr(model.config, "is_encoder_decoder", False):
        raise BadLayout(
            f"{name} is an encoder-decoder", available="decoder models", hint="use the model without the cache"
        )
    text = model.config.get_text_config(decoder=True)
    if not getattr(text, "is_causal", True) or getattr(text, "use_bidirectional_attention", None) in (True, "all"):
        raise BadLayout(
            f"the tokens of {name} attend to later tokens",
            available="causal models",
            hint="use the model without the cache",
        )
    layers = DynamicCache(config=model.config).layers
    check_layers(name, layers)
    if not any(has_pair(layer) for layer in layers):
        kinds = ", ".join(sorted({type(layer).__name__ for layer in layers}))
        raise BadLayout(
            f"{name} has no attention layer to cache, only recurrent states: {kinds}",
            available="models with at least one attention layer, whose cache tells how many tokens it holds",
            hint="use the model without the cache",
        )
    plain = all(has_pair(layer) and not has_states(layer) for layer in layers)
    cache = empty_cache(model.config, plain=plain)
    try:
        Forward(model).compute([0], cache)
    except Exception as error:
        raise BadLayout(
            f"{name} cannot run with a {'plain ' * plain}DynamicCache: {type(error).__name__}: {error}",
            hint="use the model without the cache",
        ) from error
    pairs = layers_of(cache, tokens=1)
    if any(plane.shape[2] != 1 for pair in pairs for plane in pair):
        raise BadLayout(f"{name} keeps KV of more tokens than it was given", hint="use the model without the cache")
    form = CacheForm(
        tuple((keys[:, :, :0], values[:, :, :0]) for keys, values in pairs),
        tuple(index for index, layer in enumerate(cache.layers) if has_pair(layer)),
        tuple(_places(cache)),
        plain,
        _kv_heads(model.config),
    )
    if not plain:
        _prove(model, form)
    return form


def _kv_heads(config: Any) -> int:
    text = config.get_text_config(decoder=True)
    heads = getattr(text, "num_key_value_heads", None) or getattr(text, "num_attention_heads", None)
    return heads if isinstance(heads, int) else 0


def empty_cache(config: Any, *, plain: bool) -> RestoredCache:
    if plain:
        return RestoredCache()
    cache = RestoredCache(config=config)
    cache.layers = [_whole(layer) for layer in cache.layers]
    return cache


def read_states(form: CacheForm, cache: Any) -> tuple[torch.Tensor, ...] | None:
    """Return copies of the cache's states, which are those behind its last token; None if one of them is not there, or
    holds more, as while tokens may be taken back."""
    found = []
    for place in form.states:
        layer = cache.layers[place.layer]
        state = getattr(layer, f"{place.kind}_states")[place.number]
        if state is None or tuple(state.shape) != place.shape or not layer.has_previous_state[place.number]:
            return None
        found.append(state.detach().clone())
    return tuple(found)


def fill(form: CacheForm, cache: Any, pairs: Sequence[LayerPair], states: Sequence[torch.Tensor]) -> None:
    """Put keys, values and states into an empty cache of the model."""
    for index, (keys, values) in zip(form.layers, pairs, strict=True):
        cache.update(keys, values, index)
    for place, state in zip(form.states, states, strict=True):
        update = cache.update_conv_state if place.kind == "conv" else cache.update_recurrent_state
        update(state, place.layer, state_idx=place.number)


def check_empty(form: CacheForm, cache: Any, tokens: int) -> None:
    """Raise `BadLayout` unless the cache is an empty one for this model, with room for `tokens` tokens."""
    layers = checked_cache(cache).layers
    check_layers("the cache", layers)
    states = {index for index, layer in enumerate(layers) if has_states(layer)}
    pairs = tuple(index for index, layer in enumerate(layers) if has_pair(layer))
    if states != {place.layer for place in form.states} or (layers and pairs != form.layers):
        raise BadLayout("the cache and the model have different layers", hint="make the cache with the model's config")
    if any(has_pair(layer) and int(layer.get_seq_length()) for layer in layers) or any(
        any(layer.has_previous_state.values()) for layer in layers if has_states(layer)
    ):
        raise BadLayout("the cache is not empty", hint="give a new cache, or call its reset()")
    room = min((layer.get_max_length() for layer in layers if has_pair(layer) and not layer.is_sliding), default=-1)
    if 0 <= room < tokens:
        raise BadLayout(f"the cache has room for {room} tokens", available=f"{tokens} for this prompt")


def _whole(layer: Any) -> Any:
    if type(layer) is cache_utils.DynamicSlidingWindowLayer:
        return cache_utils.DynamicLayer()
    if type(layer).__name__ == "LinearAttentionAndSlidingWindowAttentionLayer":
        return cache_utils.LinearAttentionAndFullAttentionLayer(number_of_states=layer.number_of_states)
    return layer


def _places(cache: Any) -> list[StatePlace]:
    return [
        StatePlace(index, kind, number, tuple(state.shape), state.dtype, state.device)
        for index, layer in enumerate(cache.layers)
        if has_states(layer)
        for kind in ("conv", "recurrent")
        for number, state in getattr(layer, f"{kind}_states").items()
        if state is not None
    ]


def _prove(model: Any, form: CacheForm) -> None:
    """Raise `BadLayout` unless a cache that is filled with what was read from another one goes on as that one.

    Some models begin without states, or with a part of them, when more than one token follows. Rounding differs by
    itself, so the measure is what it changes to leave states out.
    """
    vocabulary = model.config.get_text_config().vocab_size
    tokens = [(7 * at + 3) % vocabulary for at in range(_BEFORE + _BEHIND)]
    forward = Forward(model)
    whole = forward.compute(tokens, empty_cache(model.config, plain=form.plain)).float()
    first = empty_cache(model.config, plain=form.plain)
    forward.compute(tokens[:_BEFORE], first)
    pairs, states = layers_of(first, tokens=_BEFORE), read_states(form, first)
    if states is None:
        raise BadLayout(
            f"{type(model).__name__} does not fill its recurrent states", hint="use the model without the cache"
        )

    def difference(kind: str = "") -> float:
        """How far the logits are off, without the states of one kind."""
        cache = empty_cache(model.config, plain=form.plain)
        given = zip(form.states, states, strict=True)
        fill(form, cache, pairs, [torch.zeros_like(state) if place.kind == kind else state for place, state in given])
        return float((forward.compute(tokens[_BEFORE:], cache).float() - whole).abs().max())

    off = difference()
    rounding = 8 * torch.finfo(model.dtype).eps * float(whole.abs().max())
    for kind in sorted({place.kind for place in form.states}):
        if off > rounding and off > difference(kind) / 4:
            raise BadLayout(
                f"{type(model).__name__} computes other logits from a restored cache, as without its {kind} states",
                available="models that can continue from a state with several tokens at once",
                hint="this release of transformers cannot continue its prompts; use the model without the cache",
            )
    if not form.states and off > rounding * 16:
        raise BadLayout(f"{type(model).__name__} computes other logits from a restored cache")
