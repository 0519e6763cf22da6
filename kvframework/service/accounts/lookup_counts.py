"""The counters of lookups: by model, with hits by the tier that they came from, and misses by reason. Serving thread
only; read from any."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

# Models with counters of their own: their names come from clients.
MAX_MODELS = 64
OTHER_MODELS = "other"


class _OfModel:
    __slots__ = ("asked_tokens", "l1_tokens", "l2_tokens", "lookups")

    def __init__(self) -> None:
        self.lookups = self.asked_tokens = self.l1_tokens = self.l2_tokens = 0


class LookupCounts:
    """Counts of lookups that have ended; `reasons` are all that a miss can have."""

    def __init__(self, reasons: tuple[str, ...]) -> None:
        self._models: dict[str, _OfModel] = {}
        self._misses = Counter(dict.fromkeys(reasons, 0))

    def ended(self, model: str, asked_tokens: int, l1_tokens: int, l2_tokens: int, *, named: bool = True) -> None:
        """Count a lookup: `l1_tokens` were present at its begin, `l2_tokens` came by its load. `named` means that the
        name of the model was registered; other names get no counters of their own."""
        counts = self._models.get(model)
        if counts is None:
            counts = self._new(model if named else OTHER_MODELS)
        counts.lookups += 1
        counts.asked_tokens += asked_tokens
        counts.l1_tokens += l1_tokens
        counts.l2_tokens += l2_tokens

    def missed(self, reason: str, lookups: int = 1) -> None:
        """Count lookups that missed a part of their prompt or all of it, by the reason for their first missing
        chunk."""
        self._misses[reason] += lookups

    def status(self) -> dict[str, Mapping[str, Any]]:
        return {
            "by_model": {
                model: {
                    "lookups": counts.lookups,
                    "asked_tokens": counts.asked_tokens,
                    "l1_tokens": counts.l1_tokens,
                    "l2_tokens": counts.l2_tokens,
                }
                # `list` in one step: the serving thread may add a model meanwhile.
                for model, counts in list(self._models.items())
            },
            "misses": dict(self._misses),
        }

    def _new(self, model: str) -> _OfModel:
        if len(self._models) >= MAX_MODELS and model not in self._models:
            model = OTHER_MODELS
        return self._models.setdefault(model, _OfModel())
