"""`SharedPromptCache`: what `mlx_lm.server` asks for the cache of a prompt, with kvframework behind it.

Runs in the engine process. Every call blocks, with a deadline on each wait. After any failure it is mlx-lm's own cache.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import torch
from mlx_lm.models.cache import LRUPromptCache, make_prompt_cache

from kvf_mlx.arrays import fill, learnt, read
from kvframework.api.layout import NO_BLOCK
from kvframework.client import KVClient, KvIdentity, RequestHashes, SchedulerAdapter, WorkerAdapter
from kvframework.errors import KVFrameworkError

log = logging.getLogger(__name__)

BLOCK = 16
WAIT_S = 10.0


class SharedPromptCache(LRUPromptCache):  # type: ignore[misc]
    """The prompt caches of one model, in this process and in the server. `identity` names the model's KV, see
    `by_content`; `key` is what mlx-lm calls the model, None for any. Not thread-safe, as its base class.

    A state can be stored only as it is when `insert_cache` is called: of a hybrid model give it prompts that end with a
    chunk, or use `prefill`. The constructor waits `connect_timeout_s` for a missing server, which is tried again
    at each prompt. Raises `BadLayout` for a model whose caches are of other kinds.
    """

    def __init__(
        self,
        model: Any,
        identity: KvIdentity,
        *,
        key: Any = None,
        cache_salt: str = "",
        endpoint: str | None = None,
        connect_timeout_s: float = 5.0,
        max_size: int = 10,
        max_bytes: int = 1 << 63,
        **client: Any,
    ) -> None:
        super().__init__(max_size, max_bytes)
        self._mlx, self._identity, self._key, self._salt = model, identity, key, cache_salt
        self._form = learnt(model)
        self._client = KVClient(endpoint, name="mlx-lm", connect_timeout_s=connect_timeout_s, **client)
        self._worker: WorkerAdapter | None = None
        self._scheduler: SchedulerAdapter | None = None
        if not self._client.wait_up(connect_timeout_s):
            log.warning("no server yet, prompts are cached in this process only")

    def fetch_nearest_cache(self, model: Any, tokens: list[int]) -> tuple[Any, list[int]]:
        """Return caches of the longest prefix that this process or the server has, and the tokens behind it."""
        caches, rest = super().fetch_nearest_cache(model, tokens)
        try:
            found = self._load(tokens, len(tokens) - len(rest)) if self._mine(model) else None
        except (KVFrameworkError, OSError) as error:
            log.warning("nothing was restored: %s", error)
            found = None
        return found or (caches, rest)

    def insert_cache(
        self, model: Any, tokens: list[int], prompt_cache: list[Any], *, cache_type: str = "assistant"
    ) -> None:
        """Keep the caches of these tokens here, and store their whole chunks in the server."""
        try:
            if self._mine(model):
                self._store(tokens, prompt_cache)
        except (KVFrameworkError, OSError) as error:
            log.warning("the prompt's KV was not stored: %s", error)
        super().insert_cache(model, tokens, prompt_cache, cache_type=cache_type)

    def prefill(self, model: Any, tokens: list[int]) -> tuple[list[Any], list[int]]:
        """Return caches that hold all whole chunks of the prompt, computed where neither side had them, and the rest:
        one token at least. Both are for `generate_step(mx.array(rest), model, prompt_cache=caches)`."""
        caches, rest = self.fetch_nearest_cache(model, tokens)
        caches = caches or make_prompt_cache(self._mlx)
        done, end = len(tokens) - len(rest), (len(tokens) - 1) // self.chunk_tokens * self.chunk_tokens
        if done < end:
            self._mlx(mx.array([tokens[done:end]]), cache=caches)
            mx.eval([cache.state for cache in caches])
            self.insert_cache(model, tokens[:end], caches)
            # What was inserted must not grow.
            caches, _ = super().fetch_nearest_cache(model, tokens[:end])
            done = end
        return caches, tokens[done:]

    @property
    def chunk_tokens(self) -> int:
        """Tokens of a chunk; 256, a server's default, before one has answered."""
        registration = self._worker.registration if self._worker else None
        return registration.desc.chunk_tokens if registration else 256

    def close(self) -> None:
        """Unregister and disconnect; the caches of this process remain."""
        if self._worker is not None:
            self._worker.close()
        self._client.close()

    def _mine(self, key: Any) -> bool:
        return self._key is None or key == self._key

    def _attached(self) -> tuple[WorkerAdapter, SchedulerAdapter]:
        if self._worker is None or self._scheduler is None:
            if not self._client.wait_up(0.0):
                self._client.raise_down()
            worker = WorkerAdapter(
                self._client,
                instance_id=secrets.randbits(62),
                model_name=self._identity.model_name,
                revision=self._identity.revision,
                quantization=self._identity.quantization,
                layout="dynamic_cache",
                layout_options={"states": ["states.*"]} if self._form.states else {},
            )
            worker.register_kv_caches(self._form.empty(BLOCK), block_size=BLOCK)
            self._worker, self._scheduler = worker, worker.scheduler()
        return self._worker, self._scheduler

    def _load(self, tokens: Sequence[int], own: int) -> tuple[Any, list[int]] | None:
        """Return caches with more than `own` tokens; None if the server has no more."""
        worker, scheduler = self._attached()
        request = self._request(tokens)
        found = scheduler.lookup(request, 0, len(tokens) - 1)
        try:
            found = scheduler.wait(found, WAIT_S)
            hit = found.hit_tokens
            if hit <= own:
                return None
            tensors = self._form.empty(hit)
            future = worker.submit_retrieve(request, 0, hit, self._blocks(hit, storing=False), tensors)
            if not future.result(WAIT_S).ok:
                return None
        finally:
            worker.get_finished()
            scheduler.free(found)
            scheduler.end_request(request.request_id)
        caches = make_prompt_cache(self._mlx)
        fill(self._form, caches, tensors, hit)
        return caches, list(tokens[hit:])

    def _store(self, tokens: Sequence[int], caches: Sequence[Any]) -> None:
        worker, _ = self._attached()
        request = self._request(tokens)
        end = request.hashed_tokens
        # KV without its states is no hit, so it is not stored.
        if not end or (self._form.states and end != len(tokens)):
            return
        tensors = read(caches)
        if tensors is None or any(pair[0].shape[2] != len(tokens) for pair in tensors.values() if type(pair) is tuple):
            return  # quantised meanwhile, or of other tokens
        flat = {name: each.reshape(1, -1) if isinstance(each, torch.Tensor) else each for name, each in tensors.items()}
        worker.submit_store(request, 0, end, self._blocks(end, storing=True), flat).result(WAIT_S)
        worker.get_finished()

    def _request(self, tokens: Sequence[int]) -> RequestHashes:
        request = RequestHashes(
            self._client.hasher, self.chunk_tokens, request_id=secrets.token_hex(8), cache_salt=self._salt
        )
        request.extend(tokens)
        return request

    def _blocks(self, end: int, *, storing: bool) -> list[list[int]]:
        """The blocks of the first `end` tokens. Of a state there is only that behind them."""
        registration = self._attached()[0].registration
        assert registration
        absent = NO_BLOCK if storing else 0
        return [
            [*[absent] * (end // BLOCK - 1), 0] if group.state else list(range(end // BLOCK))
            for group in registration.layout.groups
        ]
