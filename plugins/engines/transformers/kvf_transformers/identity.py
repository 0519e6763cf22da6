"""The current name of a model's KV: two different models, or one model before and after a change, never share KV.

People know a model by name and revision; weights may still differ under them (a checkpoint overwritten in place, an
adapter that is active or merged, rope scaling that was changed). A digest over configuration, modules and every byte of
the weights is therefore part of the revision, unless the user has named the weights too, as engines of other kinds need
it. It is computed before every request, in the engine process.

A model with the name of its KV and the form of its cache, as it is at this moment.

Runs in the engine process and thread; blocks for forward passes of a few tokens when the model is a new one.
"""

from __future__ import annotations

import hashlib
import logging
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from kvf_transformers.cache_form import CacheForm, learn_form
from kvf_transformers.module_state import ModelState, Section, at_work, read_state, unwrapped
from kvf_transformers.shapes import LayerPair
from kvf_transformers.weight_digests import Stamps, WeightDigests, WeightSigns
from kvframework.client import KvIdentity, named_identity
from kvframework.errors import RequestError

log = logging.getLogger(__name__)


class ModelIdentity:
    """The names of one model, which is borrowed. Not thread-safe.

    The name and revision are the model's own unless given; with `weights`, the KV has the same name as in engines of
    other kinds, see `named_identity`: then the names stand for the model as it is now, and no weight is read until the
    model changes.

    Raises `RequestError` when a model has no name of its own (made from a configuration) and none was given, when
    `weights` come without a name or with a revision, and the errors of `current`.
    """

    def __init__(
        self, model: Any, model_name: str | None = None, revision: str | None = None, weights: str | None = None
    ) -> None:
        if weights is not None and revision is not None:
            raise RequestError(
                f"weights {weights!r} and revision {revision!r} name the same thing", where="weights", available="one"
            )
        name = model_name if weights is not None else model_name or getattr(model.config, "_name_or_path", "")
        if not name and weights is None:
            raise RequestError(
                f"this {type(model).__name__} has no name: it was made from a configuration",
                where="model_name",
                hint="give a model_name that differs for different weights",
            )
        self._model = model
        self._name = name or ""
        self._revision = revision if revision is not None else getattr(model.config, "_commit_hash", None) or ""
        self._weights = weights
        # The modules with adapters that `current` has found.
        self.tuners: tuple[Any, ...] = ()
        self._weights_now = WeightSigns(())
        self._digests = WeightDigests()
        self._named_state: tuple[list[str], Stamps] | None = None
        self._last: ModelState | None = None
        self._last_name: KvIdentity | None = None
        if weights is not None:
            self._named_as()
            state = read_state(model)
            self._named_state = (state.model.facts, Stamps(state.model))

    def current(self) -> KvIdentity:
        """Return the name of the KV that the model computes now. Reads weights that are new or have changed, and all
        weights of active adapters.

        Raises `RequestError` for a model whose KV no name can stand for, see `read_state`.
        """
        state = read_state(self._model)
        self.tuners = state.tuners
        self._weights_now = WeightSigns(unwrapped(self._model).modules())
        suffix = ""
        if state.adapters.facts:
            suffix = f"+adapters-{self._digest(state.adapters.facts, self._digests.of(state.adapters, always=True))}"
        if self._weights is None:
            own = self._digest(state.model.facts, self._digests.of(state.model))
            name = KvIdentity(
                self._name, f"{self._revision}+{own}{suffix}", dtype=str(self._model.dtype).removeprefix("torch.")
            )
        else:
            if not self._as_named(state.model):
                own = self._digest(state.model.facts, self._digests.of(state.model))
                suffix = f"+changed-{own}{suffix}"
            named = self._named_as()
            name = named._replace(revision=named.revision + suffix)
        self._log(name, state)
        return name

    def signs(self) -> object:
        """Return what changes with the adapters at work, and with most changes of weights, since the last `current`:
        quickly enough for every forward pass."""
        return at_work(self.tuners), self._weights_now.now()

    def weights_changed(self) -> None:
        """Have every weight read again at the next request, after a write that torch does not see."""
        self._digests.forget()
        self._named_state = None

    def _as_named(self, model: Section) -> bool:
        if self._named_state is None:
            return False
        facts, stamps = self._named_state
        return facts == model.facts and stamps.same(Stamps(model))

    def _named_as(self) -> KvIdentity:
        config = self._model.config
        quantization = getattr(config, "quantization_config", None) or {}
        if not isinstance(quantization, dict):
            quantization = quantization.to_dict()
        return named_identity(
            self._name,
            self._weights or "",
            config=config.to_dict(),
            dtype=str(self._model.dtype),
            quantization=str(quantization.get("quant_method", "")),
        )

    def _log(self, name: KvIdentity, state: ModelState) -> None:
        if self._last is not None and name != self._last_name:
            before = {*self._last.model.facts, *self._last.adapters.facts}
            now = [*state.model.facts, *state.adapters.facts]
            changed = [fact[:200] for fact in now if fact not in before] or ["other weights, or fewer adapters"]
            log.info("the model has changed, so its KV has another name now: %s", "; ".join(changed[:3]))
        self._last, self._last_name = ModelState(Section(state.model.facts), Section(state.adapters.facts)), name

    @staticmethod
    def _digest(facts: Iterable[str], weights: Iterable[str]) -> str:
        digest = hashlib.blake2b(digest_size=16, person=b"kvf-transformers")
        for kind in (facts, weights):
            digest.update("\n".join(kind).encode())
            digest.update(b"\0")
        return digest.hexdigest()


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
