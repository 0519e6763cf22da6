"""`TransformersKV`: a model whose prompts skip the prefixes that any process on the node has computed before.

Runs in the engine process and thread; every call blocks, with deadlines on all waits for the server. A server that
fails or is missing costs time, never correctness: a prompt is then computed as without a cache.
"""

from __future__ import annotations

import logging
import time
import weakref
from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import Any

import torch
from transformers import DynamicCache

from kvf_transformers.forward import Forward, token_list
from kvf_transformers.misses import warn
from kvf_transformers.named_model import ModelNow, NamedModel
from kvf_transformers.results import Generated, Restored, Saved
from kvf_transformers.session import CacheSession, Moved
from kvf_transformers.shapes import layers_of
from kvframework.errors import DeadlineExceeded, RequestError, ServerGone

_log = logging.getLogger(__name__)


class TransformersKV:
    """Stores and restores the `DynamicCache` of one decoder model, for one request at a time.

    `model` is borrowed and may change: adapters, merges, scalings and writes to its weights are part of its KV's name,
    and are checked before every request. `model_name` is needed for a model made from a configuration; with `weights`,
    a name for these as they are now, KV is shared with engines of other kinds that are given both names.
    `deadline_scale` is that of `KVClient`, `transfer_timeout_s` bounds the wait for L2 and for a copy. Close it, or use
    it as a context manager. Not thread-safe.

    Raises `BadLayout` for a model whose cache holds more than keys and values of every token, `RequestError` without a
    name or for a model whose KV no name can stand for (see `read_state`), and the server's refusal of the registration.
    The constructor waits `connect_timeout_s` for a missing server, which is tried again at each prompt.
    """

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
        # The model's state when a cache was begun.
        self._begun: weakref.WeakKeyDictionary[DynamicCache, ModelNow | None] = weakref.WeakKeyDictionary()
        self._session = CacheSession(
            endpoint=endpoint,
            cache_salt=cache_salt,
            transport=transport,
            connect_timeout_s=connect_timeout_s,
            deadline_scale=deadline_scale,
            transfer_timeout_s=transfer_timeout_s,
        )
        try:
            self._session.attach(self._model.now(), connect_timeout_s)
        except (ServerGone, DeadlineExceeded) as error:
            _log.warning("no server yet, prompts are computed: %s", error)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> TransformersKV:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Unregister and disconnect. Idempotent."""
        self._session.close()

    def weights_changed(self) -> None:
        """Have all weights read again; needed after writes to them that torch does not count: through `tensor.data`,
        from another process or library, or by merging and unmerging an adapter between two requests."""
        self._model.weights_changed()

    def restore(self, input_ids: torch.Tensor | Sequence[int]) -> Restored:
        """Return a new cache with the server's part of this prompt, always leaving at least one token to compute.

        After any failure the cache is empty and `hit_tokens` is 0. Raises `RequestError` for a batch.
        """
        tokens = token_list(input_ids)
        started = time.perf_counter()
        cache = DynamicCache()
        now, moved = None, Moved()
        try:
            now = self._model.now()
            if now.holds(len(tokens)):
                moved = self._session.load(now, tokens)
        except Exception as error:  # noqa: BLE001 - whatever fails, the prompt is computed
            warn(_log, "the prompt is computed, nothing was restored", error)
        self._begun[cache] = now
        for index, (keys, values) in enumerate(moved.pairs):
            cache.update(keys, values, index)
        return Restored(cache, moved.tokens, moved.nbytes, time.perf_counter() - started, moved.seconds)

    def save(self, input_ids: torch.Tensor | Sequence[int], cache: Any) -> Saved:
        """Store the whole chunks of `cache`, which holds the first tokens of `input_ids`; chunks that are stored
        already are skipped.

        The cache must be computed by the model as it is now; one that `restore` began before the model changed is not
        stored. Borrows the cache until it returns. After any failure `tokens` is 0. Raises `BadLayout` for a cache that
        does not hold every token of each layer, `RequestError` for a batch.
        """
        tokens = token_list(input_ids)
        held = min(len(tokens), cache.get_seq_length()) if len(cache) else 0
        pairs = layers_of(cache, tokens=held) if held else []
        started = time.perf_counter()
        moved = Moved()
        try:
            now = self._model.now()
            if self._begun.get(cache, now) != now:
                raise RequestError("the model has changed since the cache was begun", hint="restore and compute again")
            if now.holds(cache.get_seq_length()):
                moved = self._session.store(now, tokens[:held], pairs)
        except Exception as error:  # noqa: BLE001 - a failed store must not cost the engine its answer
            warn(_log, "the prompt's KV was not stored", error)
        return Saved(moved.tokens, moved.nbytes, time.perf_counter() - started, moved.seconds)

    def prefill(
        self, input_ids: torch.Tensor | Sequence[int], restored: Restored | None = None
    ) -> tuple[torch.Tensor, Any, Restored]:
        """Restore as many tokens as possible and compute the rest; return logits `[1, vocabulary]` after the last
        token, the full cache, and the restored part. `restored` replaces the method's own `restore` of the same prompt;
        it is not used if the model has changed since."""
        tokens = token_list(input_ids)
        if restored is None or not self._still(restored.cache):
            restored = self.restore(tokens)
        logits = self._forward.compute(tokens[restored.hit_tokens :], restored.cache)
        return logits, restored.cache, restored

    def _still(self, cache: DynamicCache) -> bool:
        """Return whether the model is the same as when the cache was begun."""
        try:
            now = self._model.now()
        except Exception as error:  # noqa: BLE001 - then it is not known to be
            warn(_log, "what was restored is computed again", error)
            return False
        return self._begun.get(cache, now) == now

    def decode(self, logits: torch.Tensor, cache: Any, max_new_tokens: int) -> Iterator[int]:
        """Yield greedy tokens one by one, after `prefill`; the last one is not in `cache` yet."""
        return self._forward.decode(logits, cache, max_new_tokens)

    def generate(
        self, input_ids: torch.Tensor | Sequence[int], max_new_tokens: int = 32, *, stop_ids: Sequence[int] = ()
    ) -> Generated:
        """Decode greedily, with a restore before and a save after it, up to one of `stop_ids`."""
        prompt = token_list(input_ids)
        started = time.perf_counter()
        logits, cache, restored = self.prefill(prompt)
        ttft_s = 0.0
        tokens: list[int] = []
        for token in self.decode(logits, cache, max_new_tokens):
            ttft_s = ttft_s or time.perf_counter() - started
            tokens.append(token)
            if token in stop_ids:
                break
        return Generated(tokens, restored, self.save([*prompt, *tokens], cache), ttft_s)
