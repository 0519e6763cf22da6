"""`TransformersKV`: a model whose prompts skip the prefixes that any process on the node has computed before.

Runs in the engine process and thread; every call blocks, with deadlines on all waits for the server. A server that
fails or is missing costs time, never correctness: a prompt is then computed as without a cache.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import torch

from kvf_transformers.cache_form import check_empty, empty_cache, fill, read_states
from kvf_transformers.forward import Forward, Generated, Restored, Saved, token_list, tokens_in, warn
from kvf_transformers.forward_guard import ForwardGuard
from kvf_transformers.identity import ModelNow, NamedModel
from kvf_transformers.session import CacheSession, Moved
from kvf_transformers.shapes import Snapshots, checked_cache, layers_of
from kvframework.api.keys import retain_of
from kvframework.api.requests import RequestSpec
from kvframework.client import EngineSpeed, PrefillMeter
from kvframework.errors import DeadlineExceeded, RequestError, ServerGone

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


_log = logging.getLogger(__name__)
S = TypeVar("S", bound="ServedModel")


class ServedModel:
    """A model and its session with a server, which `TransformersKV` and blend have in common. Not thread-safe.

    `model` is borrowed and may change: adapters, merges, scalings and writes to its weights are part of its KV's name,
    and are checked before every request. `model_name` is needed for a model made from a configuration; with `weights`,
    a name for these as they are now, KV is shared with engines of other kinds that are given both names.
    `deadline_scale` is that of `KVClient`, `transfer_timeout_s` bounds the wait for L2 and for a copy. A missing server
    is waited for up to `connect_timeout_s`, and tried again at each prompt. Close it, or use it as a context manager.

    Raises `BadLayout` for a model whose cache holds more than keys, values and states, or that does not go on from a
    restored one, `RequestError` without a name or for a model whose KV no name can stand for (see `read_state`), and
    the server's refusal of the registration.
    """

    requests: Sequence[RequestSpec] = ()

    def __init__(
        self,
        model: Any,
        *,
        endpoint: str | None = None,
        model_name: str | None = None,
        revision: str | None = None,
        weights: str | None = None,
        cache_salt: str = "",
        transport: str = "auto",
        connect_timeout_s: float = 5.0,
        deadline_scale: float | None = None,
        transfer_timeout_s: float = 10.0,
    ) -> None:
        self._forward = Forward(model)
        self._model = NamedModel(model, model_name, revision, weights)
        now = self._model.now()
        self._prove(now)
        self._guard = ForwardGuard(model, self._model)
        self._session = CacheSession(
            endpoint=endpoint,
            cache_salt=cache_salt,
            transport=transport,
            connect_timeout_s=connect_timeout_s,
            deadline_scale=deadline_scale,
            transfer_timeout_s=transfer_timeout_s,
            requests=self.requests,
        )
        try:
            self._attach(now, connect_timeout_s)
        except (ServerGone, DeadlineExceeded) as error:
            _log.warning("prompts are computed, because no server answers yet: %s", error)
        except BaseException:
            self.close()
            raise

    def __enter__(self: S) -> S:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Unregister and disconnect. Idempotent."""
        self._guard.close()
        self._session.close()

    def weights_changed(self) -> None:
        """Have all weights read again; needed after writes to them that torch does not count: through `tensor.data`,
        from another process or library, or by merging and unmerging an adapter between two requests."""
        self._model.weights_changed()

    def _prove(self, now: ModelNow) -> None:
        """Raise for a model that cannot be served."""

    def _attach(self, now: ModelNow, timeout_s: float = 0.0) -> object:
        """Register unless that is done. Raises `ServerGone` if there is no server, or the server's refusal."""
        return self._session.attach(now, timeout_s)


class TransformersKV(ServedModel):
    """Stores and restores the cache of one decoder model, dynamic or static, for one request at a time.

    `options` and errors are those of `ServedModel`. Of a model with recurrent states, `state_interval` is how many
    tokens lie between two that are kept, beside the last one of a prompt: a hit ends at one of them; 0: only that.
    """

    def __init__(self, model: Any, *, state_interval: int = 2048, **options: Any) -> None:
        if state_interval < 0:
            raise RequestError(f"state_interval is {state_interval}", available="0 or more tokens")
        self._interval = state_interval
        self._speed = PrefillSpeed()
        self._config = model.config
        super().__init__(model, **options)

    def retain(self, hint: object) -> None:
        """Say for how long the KV of all prompts from now on is of use, None for nothing: as in docs/hints.md. Raises
        `RequestError`."""
        self._session.retain = retain_of(hint)

    def restore(self, input_ids: torch.Tensor | Sequence[int], cache: Any = None) -> Restored:
        """Return a cache with the server's part of this prompt, always leaving at least one token to compute: a new
        one, or `cache`, which is filled: an empty `StaticCache` or `DynamicCache` of the model's.

        The KV is that of plain tokens: a pass over the cache with a mask, positions or rows of its own raises
        `RequestError`. After any failure the cache is empty and `hit_tokens` is 0. Raises `RequestError` for a batch,
        `BadLayout` for a cache that is not empty, too short for the prompt, or of another kind.
        """
        tokens = token_list(input_ids)
        started = time.perf_counter()
        if cache is None:
            cache = empty_cache(self._config, plain=self._model.form.plain)
        else:
            check_empty(self._model.form, cache, len(tokens))
        now, moved = None, Moved()
        try:
            now = self._model.now()
            if now.holds(len(tokens)):
                moved = self._session.load(now, tokens, self._speed.now())
        except Exception as error:  # noqa: BLE001 - whatever fails, the prompt is computed
            warn(_log, "nothing could be restored, so the prompt is computed", error)
        begun = self._guard.begin(cache, now)
        # Without a server there is nobody to say how long a chunk is.
        if now and now.form.states and (chunk := self._session.chunk_tokens(now)):
            begun.snapshots = Snapshots(chunk, self._interval, tokens[: moved.tokens])
        if now and moved.tokens:
            fill(now.form, cache, moved.pairs, moved.states)
            begun.tokens, begun.restored = tokens[: moved.tokens], moved.tokens
        return Restored(cache, moved.tokens, moved.nbytes, time.perf_counter() - started, moved.seconds)

    def save(self, input_ids: torch.Tensor | Sequence[int], cache: Any) -> Saved:
        """Store the whole chunks of `cache`, which holds the first tokens of `input_ids`; chunks that are stored
        already are skipped. Of a model with recurrent states, those up to the last state that `prefill` and `decode`
        have kept, or that behind the cache's last token if it ends a chunk.

        Stored are tokens that this model was seen to compute, and only if it is the same still. Borrows the cache until
        it returns. After any failure `tokens` is 0. Raises `BadLayout` for a cache that does not hold every token of
        each layer or is of another kind, `RequestError` for a batch, and for a cache that holds other tokens, or KV
        that was computed under a mask or at other positions.
        """
        tokens = token_list(input_ids)
        length = tokens_in(checked_cache(cache))
        held = min(len(tokens), length)
        pairs = layers_of(cache, tokens=held) if held else []
        begun = self._guard.begun(cache)
        plain = begun.plain(tokens[:held]) if begun else 0
        started = time.perf_counter()
        moved = Moved()
        try:
            if begun is None or plain < held:
                unseen = RequestError(
                    f"{held - plain} of {held} tokens were computed by an unguarded model, or after the model changed",
                    hint="create the TransformersKV first, then call its model in evaluation mode",
                )
                warn(_log, "part of the prompt's KV is not stored", unseen)
            now = self._model.now()
            if begun is not None and begun.now != now:
                raise RequestError("the model changed after the cache was begun", hint="restore and compute again")
            held = plain
            if begun is not None and held and now.holds(length):
                states = begun.snapshots.of(tokens[:held]) if begun.snapshots else {}
                if length == held and (last := read_states(now.form, cache)):
                    states[length] = last
                moved = self._session.store(now, tokens[:held], pairs, states)
        except Exception as error:  # noqa: BLE001 - a failed store must not cost the engine its answer
            warn(_log, "the prompt's KV could not be stored", error)
        return Saved(moved.tokens, moved.nbytes, time.perf_counter() - started, moved.seconds)

    def prefill(
        self, input_ids: torch.Tensor | Sequence[int], restored: Restored | None = None, *, cache: Any = None
    ) -> tuple[torch.Tensor, Any, Restored]:
        """Restore as many tokens as possible and compute the rest; return logits `[1, vocabulary]` after the last
        token, the full cache, and the restored part. `cache` is that of `restore`; `restored` replaces the method's own
        `restore` of the same prompt; it is not used if the model has changed since."""
        tokens = token_list(input_ids)
        if restored is None or not self._still(restored.cache):
            restored = self.restore(tokens, cache)
        begun = self._guard.begun(restored.cache)
        if begun:
            begun.restored = 0  # the model has just been looked at
        done, end = restored.hit_tokens, len(tokens)
        # A state can be kept only where a computation ends.
        stops = begun.snapshots.stops(end) if begun and begun.snapshots else []
        for stop in sorted({*stops, end}):
            logits = self._compute(tokens[done:stop], restored.cache)
            done = stop
        return logits, restored.cache, restored

    def _still(self, cache: Any) -> bool:
        try:
            now = self._model.now()
        except Exception as error:  # noqa: BLE001 - then it is not known to be
            warn(_log, "the restored KV is computed again", error)
            return False
        begun = self._guard.begun(cache)
        return begun is not None and begun.now == now

    def decode(self, logits: torch.Tensor, cache: Any, max_new_tokens: int) -> Iterator[int]:
        """Yield greedy tokens one by one, after `prefill`; the last one is not in `cache` yet."""
        return self._forward.decode(logits, cache, max_new_tokens, self._compute)

    def _compute(self, tokens: Sequence[int], cache: Any) -> torch.Tensor:
        """Compute, and keep the states at the end of a chunk."""
        begun, first = self._guard.begun(cache), tokens_in(cache)
        if begun and begun.snapshots and begun.snapshots.tokens != first:
            begun.snapshots = None  # others have computed into this cache
        logits = self._speed.measured(first, len(tokens), lambda: self._forward.compute(tokens, cache))
        if begun and len(begun.tokens) == first and not begun.departure:
            begun.computed(first, [*tokens])  # the guard sees nothing within a compiled model
        if begun and begun.now and begun.snapshots and begun.snapshots.computed(tokens):
            states = read_states(begun.now.form, cache)
            if states:
                begun.snapshots.keep(states, passing=len(tokens) == 1)
        return logits

    def generate(
        self,
        input_ids: torch.Tensor | Sequence[int],
        max_new_tokens: int = 32,
        *,
        stop_ids: Sequence[int] = (),
        cache: Any = None,
    ) -> Generated:
        """Decode greedily, with a restore before and a save after it, up to one of `stop_ids`. `cache` is that of
        `restore`, with room for the new tokens."""
        prompt = token_list(input_ids)
        if cache is not None:
            check_empty(self._model.form, cache, len(prompt) + max_new_tokens - 1)
        started = time.perf_counter()
        logits, cache, restored = self.prefill(prompt, cache=cache)
        ttft_s = 0.0
        tokens: list[int] = []
        for token in self.decode(logits, cache, max_new_tokens):
            ttft_s = ttft_s or time.perf_counter() - started
            tokens.append(token)
            if token in stop_ids:
                break
        return Generated(tokens, restored, self.save([*prompt, *tokens], cache), ttft_s)
