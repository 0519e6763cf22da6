"""The computation of one request: the user's tokens, forward passes, greedy decoding. Runs in the engine process and
thread; blocks for the computation.

Whether a forward pass computes the KV that its tokens alone name: each at the position that it has in the text, and
seeing every token before it. Pure, engine side.

Names of KV cover the model and the tokens. A mask with zeros, other positions, embeddings in place of tokens, images
and the like change KV without changing either, so a pass that is given anything unknown is not a plain one.

The results of the calls of `TransformersKV`, and the log entry of a failure that costs time only.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers.masking_utils import create_masks_for_generate

from kvf_transformers.shapes import has_pair
from kvframework.errors import KVFrameworkError, RequestError
from transformers import cache_utils


class Forward:
    """The model's forward passes. Borrows the model."""

    def __init__(self, model: Any) -> None:
        self._model = model
        parameters = inspect.signature(model.forward).parameters
        self._keeps_logits = "logits_to_keep" in parameters
        # What Mamba calls it.
        self._cache = "cache_params" if "cache_params" in parameters else "past_key_values"

    def compute(self, tokens: Sequence[int], cache: Any) -> torch.Tensor:
        """Return logits `[1, vocabulary]` behind `tokens`, which follow those in `cache` and are added to it."""
        ids = torch.tensor([list(tokens)], dtype=torch.long, device=self._model.device)
        more: dict[str, Any] = {"logits_to_keep": 1} if self._keeps_logits else {}
        with torch.no_grad():
            output = self._model(input_ids=ids, use_cache=True, **{self._cache: cache}, **more)
        logits: torch.Tensor = output.logits[:, -1]
        return logits

    def decode(
        self,
        logits: torch.Tensor,
        cache: Any,
        max_new_tokens: int,
        compute: Callable[[Sequence[int], Any], torch.Tensor] | None = None,
    ) -> Iterator[int]:
        """Yield greedy tokens one by one, after a prefill; the last one is not in `cache` yet. `compute` replaces the
        method."""
        for remaining in range(max_new_tokens - 1, -1, -1):
            token = int(logits[0].argmax())
            yield token
            if remaining:
                logits = (compute or self.compute)([token], cache)


def token_list(input_ids: torch.Tensor | Sequence[int]) -> list[int]:
    """Return the ids of one request. Raises `RequestError` for a batch and for an empty prompt."""
    if isinstance(input_ids, torch.Tensor):
        if input_ids.dim() == 2 and input_ids.shape[0] == 1:
            input_ids = input_ids[0]
        if input_ids.dim() != 1:
            raise RequestError(
                f"input_ids has shape {tuple(input_ids.shape)}",
                available="[tokens] or [1, tokens]",
                hint="restore, compute and save each request of a batch separately",
            )
        input_ids = input_ids.tolist()
    tokens = list(input_ids)
    if not tokens:
        raise RequestError("input_ids has no tokens", where="input_ids")
    return tokens


CACHES = ("past_key_values", "cache_params")
_POSITIONS = ("position_ids", "cache_position")
# Arguments that change no KV, whatever they are, and those that are looked at here.
_KNOWN = frozenset(
    {
        *CACHES,
        *_POSITIONS,
        "attention_mask",
        "input_ids",
        "labels",
        "logits_to_keep",
        "num_items_in_batch",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
        "return_dict",
        "use_cache",
    }
)


def cache_of(values: Iterable[object]) -> Any:
    """Return the first cache among arguments or results, None if there is none."""
    return next((each for each in values if isinstance(each, cache_utils.Cache)), None)


def tokens_in(cache: Any) -> int:
    return int(cache.get_seq_length()) if cache is not None and len(cache) else 0


def rows_in(cache: Any) -> int:
    """Return the requests whose tokens a cache holds, 0 before there are any."""
    return next((int(layer.keys.shape[0]) for layer in cache.layers if has_pair(layer) and layer.is_initialized), 0)


def departure(given: Mapping[str, Any], model: Any, cache: Any, first: int) -> str:
    """Return what makes a pass over the tokens from the `first` on no plain one, "" for nothing. `given` are the
    arguments of the pass, `cache` is as before it."""
    ids = given.get("input_ids")
    if not isinstance(ids, torch.Tensor) or ids.dim() != 2:
        return "the call has inputs_embeds, no input_ids" if ids is None else "input_ids must be [rows, tokens]"
    others = sorted(name for name, value in given.items() if value is not None and name not in _KNOWN)
    if others:
        return f"the call has further arguments: {', '.join(others)}"
    rows, tokens = ids.shape
    positions = torch.arange(first, first + tokens, device=ids.device)
    for name in _POSITIONS:
        at = given.get(name)
        if at is not None and not (at.shape[-1] == tokens and bool((at.to(ids.device) == positions).all())):
            return f"{name} are not {first} to {first + tokens - 1}"
    mask = given.get("attention_mask")
    if isinstance(mask, torch.Tensor) and mask.dim() == 2:
        if mask.shape[1] < first + tokens:
            return f"the attention_mask has {mask.shape[1]} columns for {first + tokens} tokens"
        return "" if bool(mask[:, : first + tokens].all()) else "the attention_mask has zeros"
    if mask is None or any(_same(mask, each) for each in _plain_masks(model, cache, rows, first, ids)):
        return ""
    return "the attention_mask is not the causal mask of plain tokens"


def _plain_masks(model: Any, cache: Any, rows: int, first: int, ids: torch.Tensor) -> Iterator[Any]:
    """Yield the masks that `generate` makes before a pass over plain tokens, for caches with room for more."""
    make = getattr(model, "create_masks_for_generate", create_masks_for_generate)
    for known in (torch.ones(rows, first + ids.shape[1], dtype=torch.long, device=ids.device), None):
        yield make(
            config=model.config,
            inputs_embeds=torch.empty((*ids.shape, 0), dtype=model.dtype, device=ids.device),
            attention_mask=known,
            past_key_values=cache,
        )


def _same(given: Any, plain: Any) -> bool:
    if isinstance(given, Mapping) and isinstance(plain, Mapping):
        return given.keys() == plain.keys() and all(_same(each, plain[name]) for name, each in given.items())
    if isinstance(given, torch.Tensor) and isinstance(plain, torch.Tensor):
        return given.dtype == plain.dtype and given.shape == plain.shape and torch.equal(given, plain)
    return given is None and plain is None


@dataclass(frozen=True)
class Restored:
    """A cache that holds the prompt's first `hit_tokens` tokens. Copying `nbytes` took `copy_seconds` of `seconds`; the
    rest went to hashing, the lookup, waiting for L2, and building the cache."""

    cache: Any
    hit_tokens: int = 0
    nbytes: int = 0
    seconds: float = 0.0
    copy_seconds: float = 0.0


@dataclass(frozen=True)
class Saved:
    """The result of a save: the server holds the first `tokens` tokens. Copying the `nbytes` that it lacked took
    `copy_seconds` of `seconds`."""

    tokens: int = 0
    nbytes: int = 0
    seconds: float = 0.0
    copy_seconds: float = 0.0


@dataclass(frozen=True)
class Generated:
    """Greedy tokens; `ttft_s` is the time to the first of them, the restore included."""

    tokens: list[int]
    restored: Restored
    saved: Saved
    ttft_s: float


def warn(log: logging.Logger, what: str, error: Exception) -> None:
    """Write one entry to `log`; with a traceback only for an unexpected error."""
    if isinstance(error, KVFrameworkError):
        log.warning("%s: %s", what, error)
    else:
        log.warning("%s", what, exc_info=error)
