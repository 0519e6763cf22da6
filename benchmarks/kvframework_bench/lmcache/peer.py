"""An engine instance at LMCache's server, through LMCache's own client classes, as its vLLM connector uses
them.

For one thread; every call blocks until the bytes are moved. Import it only where LMCache is installed.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any

import torch
from lmcache.v1.multiprocess.custom_types import IPCCacheServerKey
from lmcache.v1.multiprocess.transfer_context import create_transfer_context
from lmcache.v1.multiprocess.transport.factory import RequestClientFactory

from kvframework_bench.engine import block_ids
from kvframework_bench.errors import BenchFailed

CHUNK_TOKENS = 256
_TIMEOUT_S = 60.0

_instances = itertools.count(1)


class Peer:
    """An instance at LMCache's server, registered by the constructor. `way` is the class of LMCache that moves the
    bytes.

    `kv` are the tensors of the layers; `tokens` the token ids of the one request that is stored and loaded. The key of
    a request, with its tokens, is made outside all times.
    """

    def __init__(
        self, endpoint: str, kv: Mapping[str, torch.Tensor], *, model: str, block_tokens: int, tokens: Sequence[int]
    ) -> None:
        self._client: Any = RequestClientFactory.create(endpoint)
        if (chunk := self._client.get_chunk_size().result(timeout=_TIMEOUT_S)) != CHUNK_TOKENS:
            raise BenchFailed(f"LMCache's server has chunks of {chunk} tokens")
        self._kv = dict(kv)
        self._model = model
        self._tokens = tuple(tokens)
        self._names = (f"{model} {number}" for number in itertools.count())
        self._blocks_in_chunk = CHUNK_TOKENS // block_tokens
        self._context = create_transfer_context(
            self._kv, instance_id=next(_instances), req_client=self._client, mode="engine_driven"
        )
        # Tokens before heads, as vLLM says; left to guess, it takes small tensors for the other order.
        hints: Any = {"kv_layout": "NHD"}
        self._context.register(self._kv, model, 1, self._blocks_in_chunk, _TIMEOUT_S, layout_hints=hints)
        moved_by: Any = self._context
        # It falls back to pickle by itself where memory cannot be shared.
        self.way = type(moved_by.engine_driven_context).__name__

    def __enter__(self) -> Peer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.clear()
        future = self._context.unregister()
        if future is not None:
            future.result(timeout=_TIMEOUT_S)
        self._context.close()
        self._client.close()

    def clear(self) -> None:
        """Empty L1."""
        self._client.clear(True).result(timeout=_TIMEOUT_S)

    def store(self, blocks: Sequence[int]) -> float:
        """Return the seconds of one store into an empty L1, until it is a hit. Raises `BenchFailed` unless all is
        stored."""
        self.clear()
        key = self._key(len(self._tokens))
        started = time.perf_counter()
        ok = self._submit(self._context.submit_store, key, blocks)
        seconds = time.perf_counter() - started
        # The answer is True also when there was no room; then the lookup finds less.
        found = self._look(key)
        self._let_go(key)
        if not ok or found != len(self._tokens):
            raise BenchFailed(f"LMCache's store ended with {ok} and {found} of {len(self._tokens)} tokens")
        return seconds

    def retrieve(self, blocks: Sequence[int]) -> float:
        """Return the seconds of one retrieve; a LOOKUP outside the time locks it. Raises `BenchFailed` on a miss."""
        key = self._key(len(self._tokens))
        self._look(key)
        started = time.perf_counter()
        ok = self._submit(self._context.submit_retrieve, key, blocks)
        seconds = time.perf_counter() - started
        self._client.end_session(key.request_id).result(timeout=_TIMEOUT_S)
        if not ok:
            raise BenchFailed("LMCache's retrieve of stored chunks is a miss")
        return seconds

    def lookup(self, tokens: int) -> float:
        """Return the seconds from LOOKUP of the first `tokens` until the answer, all in L1; freed outside the time."""
        key = self._key(tokens)
        started = time.perf_counter()
        found = self._look(key)
        seconds = time.perf_counter() - started
        self._let_go(key)
        if found != tokens:
            raise BenchFailed(f"LMCache's lookup found {found} of {tokens} tokens")
        return seconds

    def found(self, tokens: int) -> int:
        """Return how many of the first `tokens` a lookup finds."""
        key = self._key(tokens)
        found = self._look(key)
        self._let_go(key)
        return found

    def _key(self, tokens: int) -> IPCCacheServerKey:
        return IPCCacheServerKey(
            model_name=self._model,
            world_size=1,
            worker_id=0,
            token_ids=self._tokens[:tokens],
            start=0,
            end=tokens,
            request_id=next(self._names),
            num_kv_readers=1,
        )

    def _submit(self, submit: Any, key: IPCCacheServerKey, blocks: Sequence[int]) -> bool:
        event = self._context.create_recorded_event()
        future = submit(key.request_id, key, self._kv, block_ids(blocks), event, self._blocks_in_chunk)
        return bool(future.result(timeout=_TIMEOUT_S))

    def _look(self, key: IPCCacheServerKey) -> int:
        """Return the tokens that are a hit, which are locked now."""
        self._client.lookup(key.no_worker_id_version(), 1).result(timeout=_TIMEOUT_S)
        deadline = time.monotonic() + _TIMEOUT_S
        while time.monotonic() < deadline:
            chunks = self._client.query_prefetch_status(key.request_id).result(timeout=_TIMEOUT_S)
            if chunks is not None:
                return int(chunks) * CHUNK_TOKENS
        raise BenchFailed("LMCache's lookup did not end in time")

    def _let_go(self, key: IPCCacheServerKey) -> None:
        self._client.free_lookup_locks(key.no_worker_id_version(), 1).result(timeout=_TIMEOUT_S)
        self._client.end_session(key.request_id).result(timeout=_TIMEOUT_S)
