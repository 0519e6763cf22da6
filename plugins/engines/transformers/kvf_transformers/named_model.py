"""A model with the name of its KV and the form of its cache, as it is at this moment.

Runs in the engine process and thread; blocks for forward passes of a few tokens when the model is a new one.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from kvf_transformers.cache_form import CacheForm, learn_form
from kvf_transformers.identity import ModelIdentity
from kvf_transformers.shapes import LayerPair
from kvframework.client import KvIdentity
from kvframework.errors import RequestError

_KEPT = 8
# A forward pass may change a model once: tables are made, disabled adapters are taken out.
_ATTEMPTS = 3


@dataclass(frozen=True)
class ModelNow:
    """The current state of a model; equal for models that compute the same KV into the same kind of memory. Prompts of
    `max_tokens` and more have KV that depends on later tokens; 0: none do."""

    identity: KvIdentity
    device: str
    form: CacheForm = field(compare=False, default=CacheForm((), ()))
    max_tokens: int = field(compare=False, default=0)

    @property
    def templates(self) -> tuple[LayerPair, ...]:
        """Keys and values of no tokens, of each layer that has them."""
        return self.form.pairs

    def holds(self, tokens: int) -> bool:
        """Return whether the KV of a text of that length is that of its prefixes."""
        return not self.max_tokens or tokens < self.max_tokens


class NamedModel:
    """A model and its names. Borrows the model. Raises as `ModelIdentity` and `learn_form` do. Not thread-safe."""

    def __init__(
        self, model: Any, model_name: str | None = None, revision: str | None = None, weights: str | None = None
    ) -> None:
        self._model = model
        # The first forward pass creates the parts that some models create late.
        form = learn_form(model)
        self._identity = ModelIdentity(model, model_name, revision, weights)
        self._known: OrderedDict[ModelNow, ModelNow] = OrderedDict()
        self._last = self._know(ModelNow(self._identity.current(), str(model.device), form, length_limit(model.config)))

    @property
    def form(self) -> CacheForm:
        """The form of the cache when the model was last looked at."""
        return self._last.form

    @property
    def tuners(self) -> tuple[Any, ...]:
        """The modules with adapters when the model was last looked at."""
        return self._identity.tuners

    def signs(self) -> object:
        return self._identity.signs()

    def now(self) -> ModelNow:
        """Return the current state. Raises `RequestError` for a model whose KV no name can stand for, `BadLayout` as
        `learn_form` does."""
        for _ in range(_ATTEMPTS):
            found = ModelNow(self._identity.current(), str(self._model.device))
            known = self._known.get(found)
            if known is not None:
                self._known.move_to_end(known)
                self._last = known
                return known
            form = learn_form(self._model)
            now = ModelNow(self._identity.current(), str(self._model.device), form, length_limit(self._model.config))
            if now == found:
                self._last = self._know(now)
                return self._last
        raise RequestError("the model changes with every forward pass", hint="use the model without the cache")

    def weights_changed(self) -> None:
        """Have every weight read again, see `ModelIdentity.weights_changed`."""
        self._identity.weights_changed()

    def _know(self, now: ModelNow) -> ModelNow:
        self._known[now] = now
        while len(self._known) > _KEPT:
            self._known.popitem(last=False)
        return now


def length_limit(config: Any) -> int:
    """Return the length from which texts get other positions for all of their tokens (dynamic NTK, LongRoPE); 0 if the
    position of a token depends on no later one."""
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    given = getattr(text, "rope_parameters", None) or {}
    limits = [
        int(each.get("original_max_position_embeddings") or getattr(text, "max_position_embeddings", 1) or 1)
        for each in (given, *(value for value in given.values() if isinstance(value, Mapping)))
        if each.get("rope_type") == "longrope" or "dynamic" in str(each.get("rope_type"))
    ]
    return min(limits, default=0)
