"""The computation of one request: the user's tokens, forward passes, greedy decoding. Runs in the engine process and
thread; blocks for the computation."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from kvframework.errors import RequestError


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
                hint="restore, compute and save the requests of a batch one by one",
            )
        input_ids = input_ids.tolist()
    tokens = list(input_ids)
    if not tokens:
        raise RequestError("input_ids has no tokens", where="input_ids")
    return tokens
