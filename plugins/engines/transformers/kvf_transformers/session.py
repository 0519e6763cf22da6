"""One model's session with the server: registration, then loads and stores of keys, values and states, by token ids or
by digests from another plugin. A model that changes, by other adapters for example, is registered once for each name of
its KV.

Runs in the engine process and thread. Every call blocks, with a deadline on each wait. Raises `KVFrameworkError`; the
caller decides that a failure is only a miss.
"""

from __future__ import annotations

import math
import time
import uuid
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar, cast

import torch

from kvf_transformers.cache_form import CacheForm
from kvf_transformers.identity import ModelNow
from kvf_transformers.shapes import LayerPair, States
from kvframework.api.futures import Future
from kvframework.api.keys import Retain
from kvframework.api.layout import NO_BLOCK, EngineView, KVLayout, LayerTensors
from kvframework.api.requests import RequestSpec
from kvframework.api.transport import LoadOutcome, Registration, StoreOutcome
from kvframework.client import (
    EngineSpeed,
    KVClient,
    ModelPart,
    RequestHashes,
    SchedulerAdapter,
    WorkerAdapter,
    current_trace,
)
from kvframework.errors import DeadlineExceeded, KVFrameworkError


class CacheView(EngineView):
    """One scratch block per layer, keys and values each `[1, heads, tokens, dim]`, or a state `[1, elements]`. Borrows
    the tensors."""

    def __init__(self, tensors: Mapping[str, LayerTensors]) -> None:
        self.spare_blocks = ()
        self._tensors = tensors
        self._planes: list[list[tuple[torch.Tensor, ...]]] = []

    def declared(self, layout: KVLayout) -> None:
        self.spare_blocks = (0,) * len(layout.groups)
        self._planes = [
            [self._planes_of(name, group.planes, (group.heads, group.head_dim)) for name in group.layer_names]
            for group in layout.groups
        ]

    def read(self, group: int, layer: int, plane: int, block: int) -> torch.Tensor:
        return self._slots(group, layer, plane).clone()

    def write(self, group: int, layer: int, plane: int, block: int, values: torch.Tensor) -> None:
        self._slots(group, layer, plane).copy_(values)

    def _slots(self, group: int, layer: int, plane: int) -> torch.Tensor:
        """`[tokens, heads, dim]`, of a state `[1, 1, elements]`."""
        tensor = self._planes[group][layer][plane]
        return tensor[None] if tensor.dim() == 2 else tensor[0].transpose(0, 1)

    def _planes_of(self, name: str, planes: int, heads_and_dim: tuple[int, int]) -> tuple[torch.Tensor, ...]:
        """Return a state, or keys and values; of a layer that was split because they differ in shape, only the one with
        this shape."""
        held = self._tensors[name]
        if isinstance(held, torch.Tensor):
            return (held,)
        pair = cast("Sequence[torch.Tensor]", held)
        if planes == len(pair):
            return tuple(pair)
        return tuple(tensor for tensor in pair if (tensor.shape[1], tensor.shape[3]) == heads_and_dim)


# A DynamicCache has no pages; 16 keeps chunks at the configured size for every usual chunk size.
BLOCK_TOKENS = 16
# Registrations that are kept for a model that is switched between adapters.
_KEPT = 8
O = TypeVar("O", LoadOutcome, StoreOutcome)  # noqa: E741


@dataclass(frozen=True, eq=False)
class Attached:
    """The session's state once the server has accepted the registration."""

    form: CacheForm
    worker: WorkerAdapter
    scheduler: SchedulerAdapter
    registration: Registration


@dataclass(frozen=True)
class Moved:
    """The result of a load or store: `pairs` (of a load) hold the first `tokens` tokens, perhaps as views of more,
    `states` are those behind them; `nbytes` were copied in `seconds`."""

    tokens: int = 0
    nbytes: int = 0
    seconds: float = 0.0
    pairs: tuple[LayerPair, ...] = ()
    states: States = ()


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
        self.cache_salt = cache_salt
        # What requests say of the future of their KV from now on.
        self.retain: Sequence[Retain] = ()
        self._transport = transport
        self.timeout_s = transfer_timeout_s
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

    def chunk_tokens(self, now: ModelNow) -> int:
        """Return the tokens of a chunk; 0 before a server has answered."""
        attached = self._attached.get(now)
        return attached.registration.desc.chunk_tokens if attached else 0

    def _registered(self, now: ModelNow) -> Attached:
        identity = now.identity
        worker = WorkerAdapter(
            self.client,
            model_name=identity.model_name,
            revision=identity.revision,
            quantization=identity.quantization,
            model_dtype=identity.dtype,
            transport=self._transport,
            layout="dynamic_cache",
            layout_options={"states": ["states.*"]} if now.form.states else {},
            part=ModelPart(now.form.kv_heads) if now.form.kv_heads else None,
        )
        # Stored and loaded tensors come with each call; these stand for them, and prove the declaration.
        scratch = _named(now.form, _new_pairs(now.form, BLOCK_TOKENS), _new_states(now.form))
        registration = worker.register_kv_caches(scratch, block_size=BLOCK_TOKENS, view=CacheView(scratch))
        return Attached(now.form, worker, worker.scheduler(), registration)

    def load(self, now: ModelNow, tokens: Sequence[int], speed: EngineSpeed | None = None) -> Moved:
        """Return new tensors with the server's part of `tokens`, always leaving at least one token to compute. With the
        engine's `speed` a server may leave out what is sooner computed than loaded."""
        attached = self.attach(now)
        request = self._hashed(tokens, attached)
        scheduler = attached.scheduler
        # The ticket of the last answer is the one to free: the server has ended that of a wait without a hit.
        last = scheduler.lookup(request, 0, len(tokens) - 1, wait_s=self.timeout_s, speed=speed)

        def arrived() -> Iterator[int]:
            nonlocal last
            for found in scheduler.arrivals(last, self.timeout_s):
                last = found
                yield found.hit_tokens

        try:
            if now.form.states:
                # Only the states behind the last token are wanted.
                last = scheduler.wait(last, self.timeout_s)
            room = last.asked_tokens if last.pending else last.hit_tokens
            return self._retrieve(request, arrived(), room, attached)
        finally:
            scheduler.free(last)
            scheduler.end_request(request.request_id)

    def store(
        self,
        now: ModelNow,
        tokens: Sequence[int],
        pairs: Sequence[LayerPair],
        states: Mapping[int, States] | None = None,
    ) -> Moved:
        """Store the whole chunks of `tokens`, which `pairs` hold from the first one on. Of a model with states, those
        up to the last end of a chunk that has `states`: without them nothing could be hit."""
        attached = self.attach(now)
        request = self._hashed(tokens, attached)
        if not now.form.states:
            return self._store(request, pairs, attached)
        parts: list[Moved] = []
        for end, behind in sorted((states or {}).items()):
            if 0 < end <= request.hashed_tokens and not end % attached.registration.desc.chunk_tokens:
                start = parts[-1].tokens if parts else 0
                parts.append(self._store(request, pairs, attached, start, end, behind))
                if parts[-1].tokens != end:
                    break
        whole = [part.tokens for part in parts if part.tokens]
        return Moved(max(whole, default=0), sum(part.nbytes for part in parts), sum(part.seconds for part in parts))

    def load_named(self, now: ModelNow, digests: bytes) -> Moved:
        """Return new tensors with the chunks that `digests` name, in that order. Nothing if one of them is not in L1:
        pin them before."""
        attached = self.attach(now)
        request = self._request(attached, digests)
        return self._retrieve(request, [request.hashed_tokens], request.hashed_tokens, attached)

    def store_named(self, now: ModelNow, digests: bytes, pairs: Sequence[LayerPair]) -> Moved:
        """Store one chunk for each of `digests`, which `pairs` hold in that order."""
        attached = self.attach(now)
        return self._store(self._request(attached, digests), pairs, attached)

    def close(self) -> None:
        """Unregister and disconnect. Idempotent."""
        while self._attached:
            self._attached.popitem()[1].worker.close()
        self.client.close()

    def _retrieve(self, request: RequestHashes, ends: Iterable[int], room: int, attached: Attached) -> Moved:
        """Return the tokens up to the last of `ends`, at most `room`; each end is pinned when it comes. A part that
        fails is the last one: what came before it is there, and without that the error is raised."""
        desc, form = attached.registration.desc, attached.form
        done, seconds = 0, 0.0
        pairs: tuple[LayerPair, ...] = ()
        states: States = ()
        tensors: dict[str, LayerTensors] = {}
        for end in ends:
            if end <= done:
                continue
            if not tensors:
                pairs, states = _new_pairs(form, room), _new_states(form)
                tensors = _named(form, pairs, states)
            started = time.perf_counter()
            try:
                blocks = self._blocks(done, end, attached)
                if not self._settle(attached.worker.submit_retrieve(request, done, end, blocks, tensors), tensors).ok:
                    break
            except KVFrameworkError:
                if not done:
                    raise
                break
            finally:
                attached.worker.get_finished()
            done, seconds = end, seconds + time.perf_counter() - started
        if not done:
            return Moved()
        shaped = tuple(state.view(place.shape) for place, state in zip(form.states, states, strict=True))
        # Of a state there is one, however long the prompt.
        nbytes = sum(group.nbytes * (1 if group.window else done // desc.chunk_tokens) for group in desc.groups)
        # A part that failed may still be written, behind the tokens that are there.
        there = tuple((keys[:, :, :done], values[:, :, :done]) for keys, values in pairs)
        return Moved(done, nbytes, seconds, there, shaped)

    def _store(
        self,
        request: RequestHashes,
        pairs: Sequence[LayerPair],
        attached: Attached,
        start: int = 0,
        end: int | None = None,
        states: States = (),
    ) -> Moved:
        """Store the chunks from `start` to `end`, with the states behind the last one."""
        end = request.hashed_tokens if end is None else end
        if end <= start:
            return Moved()
        desc = attached.registration.desc
        tensors = _named(attached.form, pairs, states)
        started = time.perf_counter()
        future = attached.worker.submit_store(
            request, start, end, self._blocks(start, end, attached, states_at_the_end=True), tensors
        )
        outcome = self._settle(future, tensors)
        seconds = time.perf_counter() - started
        attached.worker.get_finished()
        # Objects of all layer groups of a chunk, and all shards, are written together; of states there is one each.
        stored = outcome.stored // max(attached.registration.shards, 1)
        behind = [group.nbytes for group in desc.groups if group.window]
        of_states = min(stored, len(behind))
        chunks = (stored - of_states) // max(len(desc.groups) - len(behind), 1)
        nbytes = sum(behind) * bool(of_states) + chunks * (desc.nbytes - sum(behind))
        return Moved(end if outcome.ok else start, nbytes, seconds)

    def _hashed(self, tokens: Sequence[int], attached: Attached) -> RequestHashes:
        request = self._request(attached)
        request.extend(tokens)
        return request

    def _request(self, attached: Attached, digests: bytes = b"") -> RequestHashes:
        return RequestHashes(
            self.client.hasher,
            attached.registration.desc.chunk_tokens,
            request_id=uuid.uuid4().hex,
            cache_salt=self.cache_salt,
            digests=digests,
            trace=current_trace(),
            retain=self.retain,
            keep_tokens=self.client.wants_tokens(self.cache_salt),
        )

    @staticmethod
    def _blocks(start: int, end: int, attached: Attached, *, states_at_the_end: bool = False) -> list[Sequence[int]]:
        """The blocks of tokens `[start, end)`. A state's only block is that behind the last token."""
        found: list[Sequence[int]] = []
        for group in attached.registration.layout.groups:
            first, last = start // group.block_size, end // group.block_size
            absent = NO_BLOCK if states_at_the_end else 0
            found.append([*[absent] * (last - first - 1), 0] if group.state else range(first, last))
        return found

    def _settle(self, future: Future[O], tensors: Mapping[str, LayerTensors]) -> O:
        """Return the outcome within the deadline. The tensors live until the server no longer touches them."""

        def released(_done: Future[O], _kept: Mapping[str, LayerTensors] = tensors) -> None:
            """Keep the tensors for as long as the future holds this function."""

        future.add_done_callback(released)
        try:
            return future.result(self.timeout_s)
        except DeadlineExceeded:
            future.cancel()
            raise


def _new_pairs(form: CacheForm, tokens: int) -> tuple[LayerPair, ...]:
    def with_tokens(template: torch.Tensor) -> torch.Tensor:
        return template.new_empty(1, template.shape[1], tokens, template.shape[3])

    return tuple((with_tokens(keys), with_tokens(values)) for keys, values in form.pairs)


def _new_states(form: CacheForm) -> States:
    return tuple(
        torch.empty(1, math.prod(place.shape), dtype=place.dtype, device=place.device) for place in form.states
    )


def _named(form: CacheForm, pairs: Sequence[LayerPair], states: Sequence[torch.Tensor]) -> dict[str, LayerTensors]:
    named: dict[str, LayerTensors] = {f"layers.{index}": pair for index, pair in zip(form.layers, pairs, strict=True)}
    named |= {place.name: state.reshape(1, -1) for place, state in zip(form.states, states, strict=True)}
    return named
