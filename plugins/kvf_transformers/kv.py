"""Owns `TransformersKV`: a model whose prompts skip what any process on the node has computed before.

Runs in the engine process and thread; every call blocks, with deadlines on all waits for the server. A server that
fails or is not there costs time, never correctness: a prompt is then computed as without a cache.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import Any

import torch
from transformers import DynamicCache

from kvf_transformers.forward import Forward, token_list
from kvf_transformers.identity import identify
from kvf_transformers.misses import warn
from kvf_transformers.results import Generated, Restored, Saved
from kvf_transformers.session import CacheSession, Moved
from kvf_transformers.shapes import layers_of, learn_layers
from kvframework.errors import DeadlineExceeded, ServerGone

_log = logging.getLogger(__name__)


class TransformersKV:
    """Stores and restores the `DynamicCache` of one decoder model, for one request at a time.

    `model` is borrowed; its weights must not change while this object lives. `model_name` is needed for a model made
    from a configuration; with `weights`, a name for these, KV is shared with engines of other kinds that are given both
    names. `control_timeout_s` bounds each question to the server, `transfer_timeout_s` the wait for L2 and for a copy.
    Close it, or use it as a context manager. Not thread-safe.

    Raises `BadLayout` for a model whose cache holds other things than keys and values of every token, `RequestError`
    without a name, and whatever the server refuses the registration with. A server that is not there is waited for
    `connect_timeout_s` and tried again at each prompt.
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
        control_timeout_s: float = 0.05,
        transfer_timeout_s: float = 10.0,
    ) -> None:
        self._forward = Forward(model)
        self._session = CacheSession(
            identify(model, model_name, revision, weights),
            learn_layers(model),
            endpoint=endpoint,
            cache_salt=cache_salt,
            transport=transport,
            connect_timeout_s=connect_timeout_s,
            control_timeout_s=control_timeout_s,
            transfer_timeout_s=transfer_timeout_s,
        )
        try:
            self._session.attach(connect_timeout_s)
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
        """Unregisters and disconnects. Idempotent."""
        self._session.close()

    def restore(self, input_ids: torch.Tensor | Sequence[int]) -> Restored:
        """A new cache with what the server has of this prompt, always leaving at least one token to compute.

        Whatever fails, the cache is empty and `hit_tokens` 0. Raises `RequestError` for a batch.
        """
        tokens = token_list(input_ids)
        started = time.perf_counter()
        cache = DynamicCache()
        try:
            moved = self._session.load(tokens)
        except Exception as error:  # noqa: BLE001 - whatever fails, the prompt is computed
            warn(_log, "the prompt is computed, nothing was restored", error)
            moved = Moved()
        for index, (keys, values) in enumerate(moved.pairs):
            cache.update(keys, values, index)
        return Restored(cache, moved.tokens, moved.nbytes, time.perf_counter() - started, moved.seconds)

    def save(self, input_ids: torch.Tensor | Sequence[int], cache: Any) -> Saved:
        """Stores the whole chunks of `cache`, which holds the first tokens of `input_ids`; what is stored is skipped.

        Borrows the cache until it returns. Whatever fails, `tokens` is 0. Raises `BadLayout` for a cache that does not
        hold every token of each layer, `RequestError` for a batch.
        """
        tokens = token_list(input_ids)
        held = min(len(tokens), cache.get_seq_length()) if len(cache) else 0
        pairs = layers_of(cache, tokens=held) if held else []
        started = time.perf_counter()
        try:
            moved = self._session.store(tokens[:held], pairs)
        except Exception as error:  # noqa: BLE001 - a failed store must not cost the engine its answer
            warn(_log, "the prompt's KV was not stored", error)
            moved = Moved()
        return Saved(moved.tokens, moved.nbytes, time.perf_counter() - started, moved.seconds)

    def prefill(
        self, input_ids: torch.Tensor | Sequence[int], restored: Restored | None = None
    ) -> tuple[torch.Tensor, Any, Restored]:
        """Restores what it can and computes the rest: logits `[1, vocabulary]` after the last token, the full
        cache, and what was restored. `restored` takes the place of an own `restore` of the same prompt."""
        tokens = token_list(input_ids)
        restored = restored if restored is not None else self.restore(tokens)
        logits = self._forward.compute(tokens[restored.hit_tokens :], restored.cache)
        return logits, restored.cache, restored

    def decode(self, logits: torch.Tensor, cache: Any, max_new_tokens: int) -> Iterator[int]:
        """Greedy tokens one by one, after `prefill`; the last one is not in `cache` yet."""
        return self._forward.decode(logits, cache, max_new_tokens)

    def generate(
        self, input_ids: torch.Tensor | Sequence[int], max_new_tokens: int = 32, *, stop_ids: Sequence[int] = ()
    ) -> Generated:
        """Greedy decoding with restore before and save behind it, up to one of `stop_ids`."""
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
