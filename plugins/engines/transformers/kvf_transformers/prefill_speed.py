"""How fast a model computes prompts, measured as it does: what its LOOKUPs say of the engine."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from kvframework.client import EngineSpeed, PrefillMeter

# A computation of fewer tokens generates, or ends a prompt, and is not waited for.
LEAST_TOKENS = 32


class PrefillSpeed:
    """The speed of one model, which computes one prompt at a time: no other is before it. Not thread-safe."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._meter = PrefillMeter()
        self._clock = clock

    def measured(self, first: int, tokens: int, compute: Callable[[], torch.Tensor]) -> torch.Tensor:
        """Return the logits that `compute` returns, which adds so many tokens to the `first` ones, and measure it. That
        waits until an accelerator has computed them, as the caller does to see what they say."""
        if tokens < LEAST_TOKENS:
            return compute()
        began = self._clock()
        logits = compute()
        logits.flatten()[0].item()
        self._meter.begin_step([(first, first + tokens)], began)
        self._meter.end_step(self._clock())
        return logits

    def now(self) -> EngineSpeed | None:
        """Return what the engine may say with a LOOKUP, None as long as its speed is not known."""
        return self._meter.speed(())
