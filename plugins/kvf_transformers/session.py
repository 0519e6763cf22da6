"""One model's session with the server: registration, then loads and stores of keys and values, by token ids or by
digests from another plugin. A model that changes, by other adapters for example, is registered once for each name of
its KV.

Runs in the engine process and thread. Every call blocks, with a deadline on each wait. Raises `KVFrameworkError`; the
caller decides that a failure is only a miss.
"""

from __future__ import annotations

import secrets
import time
import uuid
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from kvf_transformers.named_model import ModelNow
from kvf_transformers.shapes import LayerPair
from kvf_transformers.view import CacheView
from kvframework.api.futures import Future
from kvframework.api.requests import RequestSpec
from kvframework.api.transport import LoadOutcome, Registration, StoreOutcome
from kvframework.client import KVClient, RequestHashes, SchedulerAdapter, WorkerAdapter, current_trace
from kvframework.errors import DeadlineExceeded

if TYPE_CHECKING:
    import torch

# A DynamicCache has no pages; 16 keeps chunks at the configured size for every usual chunk size.
BLOCK_TOKENS = 16
# Registrations that are kept for a model that is switched between adapters.
_KEPT = 8
O = TypeVar("O", LoadOutcome, StoreOutcome)  # noqa: E741


@dataclass(frozen=True, eq=False)
class Attached:
    """The session's state once the server has accepted the registration. `templates` have the layers' shapes."""

    templates: tuple[LayerPair, ...]
    worker: WorkerAdapter
    scheduler: SchedulerAdapter
    registration: Registration


@dataclass(frozen=True)
class Moved:
    """The result of a load or store: `pairs` (of a load) hold the first `tokens` tokens; `nbytes` were copied in
    `seconds`."""

    tokens: int = 0
    nbytes: int = 0
    seconds: float = 0.0
    pairs: tuple[LayerPair, ...] = ()


class CacheSession:
    """A session, whose every call names the model as it is `now`. A missing server is tried again at each call.
    `requests` are specs of plugins' requests for `client`. Not thread-safe."""

    def __init__(
        self,
        *,
        endpoint: str | None,
        cache_salt: str,
        transport: str,
        connect_timeout_s: float,
        deadline_scale: float | None,
        transfer_timeout_s: float,
        requests: Sequence[RequestSpec] = (),
    ) -> None:
        self._salt = cache_salt
        self._transport = transport
        self._timeout_s = transfer_timeout_s
        self._attached: OrderedDict[ModelNow, Attached] = OrderedDict()
        self.client = KVClient(
            endpoint,
            name="transformers",
            connect_timeout_s=connect_timeout_s,
            deadline_scale=deadline_scale,
            requests=requests,
        )

    def attach(self, now: ModelNow, timeout_s: float = 0.0) -> Attached:
        """Register unless done; the client keeps the registration over a server's restart.

        Raises `ServerGone` if there is no server within `timeout_s`, or the server's refusal.
        """
        attached = self._attached.get(now)
        if attached is not None:
            self._attached.move_to_end(now)
            return attached
        if not self.client.wait_up(timeout_s):
            self.client.raise_down()
        while len(self._attached) >= _KEPT:
            self._attached.popitem(last=False)[1].worker.close()
        attached = self._attached[now] = self._registered(now)
        return attached

    def _registered(self, now: ModelNow) -> Attached:
        identity = now.identity
        worker = WorkerAdapter(
            self.client,
            instance_id=secrets.randbits(62),
            model_name=identity.model_name,
            revision=identity.revision,
            quantization=identity.quantization,
            transport=self._transport,
            layout="dynamic_cache",
        )
        # Stored and loaded tensors come with each call; these stand for them, and prove the declaration.
        scratch = _named([(_with_tokens(k, BLOCK_TOKENS), _with_tokens(v, BLOCK_TOKENS)) for k, v in now.templates])
        registration = worker.register_kv_caches(scratch, block_size=BLOCK_TOKENS, view=CacheView(scratch))
        scheduler = SchedulerAdapter(
            self.client,
            model_name=identity.model_name,
            namespace=registration.namespace,
            chunk_tokens=registration.desc.chunk_tokens,
        )
        return Attached(now.templates, worker, scheduler, registration)

    def load(self, now: ModelNow, tokens: Sequence[int]) -> Moved:
        """Return new tensors with the server's part of `tokens`, always leaving at least one token to compute."""
        attached = self.attach(now)
        request = self._hashed(tokens, attached)
        found = attached.scheduler.lookup(request, 0, len(tokens) - 1)
        try:
            # Its ticket is the one to free: the server has ended that of a wait without a hit.
            found = attached.scheduler.wait(found, self._timeout_s)
            return self._retrieve(request, found.hit_tokens, attached)
        finally:
            attached.scheduler.free(found)
            attached.scheduler.end_request(request.request_id)

    def store(self, now: ModelNow, tokens: Sequence[int], pairs: Sequence[LayerPair]) -> Moved:
        """Store the whole chunks of `tokens`, which `pairs` hold from the first one on."""
        attached = self.attach(now)
        return self._store(self._hashed(tokens, attached), pairs, attached)

    def load_named(self, now: ModelNow, digests: bytes) -> Moved:
        """Return new tensors with the chunks that `digests` name, in that order. Nothing if one of them is not in L1:
        pin them before."""
        attached = self.attach(now)
        request = self._request(attached, digests)
        return self._retrieve(request, request.hashed_tokens, attached)

    def store_named(self, now: ModelNow, digests: bytes, pairs: Sequence[LayerPair]) -> Moved:
        """Store one chunk for each of `digests`, which `pairs` hold in that order."""
        attached = self.attach(now)
        return self._store(self._request(attached, digests), pairs, attached)

    def close(self) -> None:
        """Unregister and disconnect. Idempotent."""
        while self._attached:
            self._attached.popitem()[1].worker.close()
        self.client.close()

    def _retrieve(self, request: RequestHashes, end: int, attached: Attached) -> Moved:
        """Return the first `end` tokens, which are pinned; nothing if that fails."""
        if not end:
            return Moved()
        desc = attached.registration.desc
        pairs = tuple((_with_tokens(keys, end), _with_tokens(values, end)) for keys, values in attached.templates)
        started = time.perf_counter()
        try:
            future = attached.worker.submit_retrieve(request, 0, end, self._blocks(end, attached), _named(pairs))
            if not self._settle(future, pairs).ok:
                return Moved()
        finally:
            attached.worker.get_finished()
        return Moved(end, end // desc.chunk_tokens * desc.nbytes, time.perf_counter() - started, pairs)

    def _store(self, request: RequestHashes, pairs: Sequence[LayerPair], attached: Attached) -> Moved:
        end = request.hashed_tokens
        if not end:
            return Moved()
        desc = attached.registration.desc
        started = time.perf_counter()
        future = attached.worker.submit_store(request, 0, end, self._blocks(end, attached), _named(pairs))
        outcome = self._settle(future, pairs)
        seconds = time.perf_counter() - started
        attached.worker.get_finished()
        # Objects of all layer groups of a chunk are written together.
        return Moved(end if outcome.ok else 0, outcome.stored // len(desc.groups) * desc.nbytes, seconds)

    def _hashed(self, tokens: Sequence[int], attached: Attached) -> RequestHashes:
        request = self._request(attached)
        request.extend(tokens)
        return request

    def _request(self, attached: Attached, digests: bytes = b"") -> RequestHashes:
        return RequestHashes(
            self.client.hasher,
            attached.registration.desc.chunk_tokens,
            request_id=uuid.uuid4().hex,
            cache_salt=self._salt,
            digests=digests,
            trace=current_trace(),
        )

    @staticmethod
    def _blocks(tokens: int, attached: Attached) -> list[range]:
        return [range(tokens // group.block_size) for group in attached.registration.layout.groups]

    def _settle(self, future: Future[O], pairs: Sequence[LayerPair]) -> O:
        """Return the outcome within the deadline. The tensors live until the server no longer touches them."""

        def let_go(_done: Future[O], _kept: Sequence[LayerPair] = pairs) -> None:
            """Keep the tensors for as long as the future holds this function."""

        future.add_done_callback(let_go)
        try:
            return future.result(self._timeout_s)
        except DeadlineExceeded:
            future.cancel()
            raise


def _with_tokens(template: torch.Tensor, tokens: int) -> torch.Tensor:
    return template.new_empty(1, template.shape[1], tokens, template.shape[3])


def _named(pairs: Sequence[LayerPair]) -> dict[str, LayerPair]:
    return {f"layers.{index}": pair for index, pair in enumerate(pairs)}
