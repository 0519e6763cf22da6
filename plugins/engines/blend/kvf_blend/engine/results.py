"""The results of the calls of `BlendTransformers`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class PreComputed:
    """The result of `pre_compute`. The server holds `held` of a text's `segments`; `computed_tokens` of them went
    through the model now, and `nbytes` were copied."""

    segments: int = 0
    held: int = 0
    computed_tokens: int = 0
    nbytes: int = 0
    seconds: float = 0.0


@dataclass(frozen=True)
class Blended:
    """The reuse of a prompt. `hit_tokens` of the prompt's `tokens` were loaded: the first `prefix_tokens`, and segments
    behind them, of which `recomputed` went through the model again. `exact`: no part of the prefix is from a blended
    prompt.

    Copying the `nbytes` that were loaded took `copy_seconds` of `seconds`; the rest is the lookup, the wait for L2,
    rotation and computation.
    """

    tokens: int
    prefix_tokens: int = 0
    hit_tokens: int = 0
    recomputed: int = 0
    exact: bool = True
    nbytes: int = 0
    seconds: float = 0.0
    copy_seconds: float = 0.0


@dataclass(frozen=True)
class BlendedPrompt:
    """Logits `[1, vocabulary]` behind the last token, a `DynamicCache` with the whole prompt, and its reuse."""

    logits: torch.Tensor
    cache: Any
    blended: Blended
