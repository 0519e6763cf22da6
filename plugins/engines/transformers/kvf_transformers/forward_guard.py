"""What a model computes into caches, by whomever it is called: the tokens of its plain passes, which alone may be
stored, and a refusal of others on top of restored KV. Runs in the engine process and thread, as hooks around the
model's forward passes; reads their arguments, and changes none.

Passes within a compiled graph are not seen: their tokens are not stored, unless this package calls the model.
"""

from __future__ import annotations

import inspect
import logging
import threading
import weakref
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from kvf_transformers.cache_form import LEARNING
from kvf_transformers.forward import CACHES, cache_of, departure, rows_in, tokens_in, warn
from kvf_transformers.identity import ModelNow, NamedModel
from kvf_transformers.module_state import by_request, unwrapped
from kvf_transformers.shapes import Snapshots
from kvframework.errors import RequestError
from transformers import cache_utils

_log = logging.getLogger(__name__)

_PLAIN = (
    "give no attention_mask with zeros, no position_ids of your own, no embeddings: drop the padding with "
    "input_ids[attention_mask.bool()], and restore each prompt of a batch separately"
)


@dataclass
class Begun:
    """A cache, the model's state when it was begun, and its tokens, up to the first that was not computed plainly
    (`departure` says how), or not by the model in this state. `ours` was begun by a restore. Of the `restored` tokens
    it is not known yet whether they are those of the model that goes on from them."""

    now: ModelNow | None
    state: object
    tokens: list[int] = field(default_factory=list)
    restored: int = 0
    ours: bool = False
    departure: str = ""
    snapshots: Snapshots | None = None

    def computed(self, first: int, tokens: list[int], departure: str = "") -> None:
        """Note a pass over the tokens from the `first` on, of which the plain ones are given. What follows tokens that
        are not known is not noted."""
        if first > len(self.tokens):
            return
        self.tokens[first:] = tokens
        self.departure = departure

    def plain(self, tokens: list[int]) -> int:
        """Return how many of these tokens, which the cache holds, may be stored. Raises `RequestError` if it holds
        others."""
        for at, (mine, given) in enumerate(zip(self.tokens, tokens, strict=False)):
            if mine != given:
                raise RequestError(
                    f"token {at} of input_ids is {given}, but the cache was computed for {mine}",
                    where="input_ids",
                    hint="give the tokens that the model computed",
                )
        if self.departure and len(tokens) > len(self.tokens):
            raise RequestError(
                f"from token {len(self.tokens)} on the cache does not hold the KV of its tokens: {self.departure}",
                where="cache",
                hint=_PLAIN,
            )
        return min(len(self.tokens), len(tokens))


class _Pass(NamedTuple):
    """`tokens` are None unless they are computed plainly, in the state in which the cache was begun. A pass that fails
    is not ended, so the cache is not kept alive; `cache` is None for a pass that was given none."""

    cache: weakref.ref[Any] | None
    first: int
    tokens: list[int] | None
    departure: str


class ForwardGuard:
    """The hooks of one model, which is borrowed, and the caches that it has computed into. `close` takes the hooks off.
    A copy, as of a model with hooks, does nothing."""

    def __init__(self, model: Any = None, named: NamedModel | None = None) -> None:
        self._named = named
        self._begun: weakref.WeakKeyDictionary[Any, Begun] = weakref.WeakKeyDictionary()
        self._passes: dict[tuple[int, int], _Pass] = {}
        self._handles: list[Any] = []
        if named is None:
            return
        self._model = unwrapped(model)
        # Wrappers of adapters call the model's `forward`, whose parts are called as modules.
        base = getattr(self._model, "base_model", self._model)
        self._arguments = [*inspect.signature(base.forward).parameters]
        # A compiled wrapper runs its own hooks outside of the graph.
        for each in {id(each): each for each in (base, model if "_orig_mod" in model._modules else base)}.values():
            self._handles += [
                each.register_forward_pre_hook(self._before, with_kwargs=True),
                each.register_forward_hook(self._after, with_kwargs=True),
            ]

    def __reduce__(self) -> Any:
        return ForwardGuard, ()

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def begin(self, cache: Any, now: ModelNow | None) -> Begun:
        """Note that a cache is restored into, by the model as it is `now`."""
        begun = self._begun[cache] = Begun(now, self._state(), ours=True)
        return begun

    def begun(self, cache: Any) -> Begun | None:
        return self._begun.get(cache)

    def _state(self) -> object:
        """What may differ between two passes of one model, as it is cheap to ask."""
        device = self._model.device.type
        autocast = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
        return autocast, self._named.signs() if self._named else None

    def _mixed(self) -> str:
        return "rows have different adapters (adapter_names)" if self._named and by_request(self._named.tuners) else ""

    def _now(self) -> ModelNow | None:
        try:
            return self._named.now() if self._named else None
        except Exception as error:  # noqa: BLE001 - a model without a name computes as without a cache
            warn(_log, "the KV computed now is not stored", error)
            return None

    def _before(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if torch.compiler.is_compiling() or self._named is None or LEARNING.get():
            return
        key = (threading.get_ident(), id(module))
        self._passes.pop(key, None)
        given = {**dict(zip(self._arguments, args, strict=False)), **kwargs}
        cache = cache_of(given.get(name) for name in CACHES)
        begun = self._begun.get(cache) if cache is not None else None
        if begun is None and (module.training or given.get("use_cache") is False):
            return
        try:
            first = tokens_in(cache)
            found = departure(given, self._model, cache, first) or self._mixed()
            ids = given.get("input_ids")
            rows = ids.shape[0] if isinstance(ids, torch.Tensor) else 1
            if begun and begun.ours:
                self._check(begun, found, rows, rows_in(cache) if first else rows, cache)
            if not found and rows > 1:
                found = f"a batch of {rows}"
            same = not found and (begun is None or begun.state == self._state())
            tokens = ids[0].tolist() if isinstance(ids, torch.Tensor) and same else None
        except RequestError:
            raise
        except Exception as error:  # noqa: BLE001 - the pass is the caller's
            warn(_log, "the KV computed now is not stored", error)
            first, tokens, found = 0, None, f"its arguments could not be read: {type(error).__name__}"
        self._passes[key] = _Pass(None if cache is None else weakref.ref(cache), first, tokens, found)

    def _check(self, begun: Begun, found: str, rows: int, held_rows: int, cache: Any) -> None:
        """Raise `RequestError` for a pass that would be wrong on top of restored KV."""
        if found:
            raise RequestError(f"{found}; a restored cache takes plain tokens", where="the model", hint=_PLAIN)
        if rows != held_rows:
            static = isinstance(cache, cache_utils.StaticCache)
            raise RequestError(
                f"the input has {rows} rows of tokens, the cache {held_rows}",
                where="the model",
                hint=f"for num_beams or num_return_sequences call {'restore() without a cache, then ' * static}"
                f"cache.batch_repeat_interleave({rows // held_rows or rows})",
            )
        if begun.restored and begun.now != self._now():
            raise RequestError(
                "the model has changed since the cache was restored", where="the model", hint="restore the cache again"
            )
        begun.restored = 0

    def _after(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        if torch.compiler.is_compiling():
            return
        found = self._passes.pop((threading.get_ident(), id(module)), None)
        if found is None:
            return
        cache = found.cache and found.cache()
        if found.cache is None:
            values = output.values() if hasattr(output, "values") else output if isinstance(output, tuple) else ()
            cache = cache_of(values)
        if not isinstance(cache, cache_utils.Cache):
            return
        begun, how = self._begun.get(cache), found.departure
        if begun is None:
            if found.first:
                return  # nobody has seen the tokens before
            now = None if how else self._now()
            begun, how = Begun(now, self._state()), how or self._mixed()
            self._begun[cache] = begun
        tokens = found.tokens or []
        if tokens and tokens_in(cache) != found.first + len(tokens):
            how = "the model's input and output have different numbers of tokens"
        begun.computed(found.first, [] if how else tokens, how)
