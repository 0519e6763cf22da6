"""The scheduler's half: vLLM asks it which chunks are there, and where to load and store them; the server answers.

One lookup a prompt is waited for. Places for stores are asked for without waiting, and known when the step's plan goes
to the workers; ends of loads and stores are told without waiting. Any failure is a miss, or a store that is left out.
"""

from __future__ import annotations

import hashlib
import itertools
import logging
import math
import secrets
import time
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from concurrent.futures import TimeoutError as NotYet
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from vllm.v1.kv_offload.base import (
    LookupResult,
    OffloadingManager,
    OffloadKey,
    PrepareStoreOutput,
    RequestOffloadingContext,
    get_offload_block_hash,
    get_offload_group_idx,
    make_offload_key,
)

from kvf_vllm.adapters import NOT_LOADED, AdapterNames
from kvf_vllm.offloading.messages import NOWHERE, ArenaPlaces
from kvf_vllm.requests import Wish, salted, traceparent, wish_of
from kvframework.api.futures import Future
from kvframework.api.keys import DIGEST_BYTES
from kvframework.api.transport import StorePlan
from kvframework.client import ErrorNotes, KeyGroup, OpaqueInstance, Prompt, granted_objects, harmless
from kvframework.errors import DeadlineExceeded, ServerGone

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kvf_vllm.requests import EngineRequest
    from kvf_vllm.step_messages import AdapterNews
    from kvframework.client import LookupReply

log = logging.getLogger(__name__)

# The engine's thread waits so long for the answer to a lookup; later the request is asked about again.
ANSWER_S = 0.05
# The time that a grant must have left for its load to be begun.
SPARE_S = 5.0


@dataclass(frozen=True)
class Group:
    """One of vLLM's groups: its index, the tokens and the block hashes of a chunk, and how many tokens before its end a
    hit needs, 0 for all. `ends_hits`: a hit ends only where one of its chunks ends."""

    index: int
    tokens: int
    hashes: int
    window: int = 0
    ends_hits: bool = False


@dataclass(eq=False)
class Search:
    """The lookup of one request from token `start` on, and what it has found: offsets by key, of `lease` until a time
    of the monotonic clock."""

    start: int
    began: float
    keys: list[KeyGroup]
    names: list[list[OffloadKey]]
    sent: Future[LookupReply]
    ticket: str = ""
    lease: str = ""
    until: float = 0.0
    boot_id: bytes = b""
    found: dict[OffloadKey, int] = field(default_factory=dict)
    decided: bool = False


@dataclass(eq=False)
class Tracked:
    request: EngineRequest
    wish: Wish
    salt: str
    search: Search | None = None
    first_asked: float | None = None
    failed: bool = False
    finished: bool = False
    # The adapter's content, "" without one or as long as it has no name.
    adapter: str = ""
    # Loads under way: their leases and when they began.
    loads: list[tuple[str, float]] = field(default_factory=list)


@dataclass(eq=False)
class Store:
    """A store under way: the plan that the server makes of it, its keys by group, and its workers."""

    number: int
    planning: Future[StorePlan]
    keys: Sequence[tuple[int, int]]
    places: ArenaPlaces
    workers: int
    tracked: Tracked
    plan: StorePlan | None = None
    is_doomed: bool = False


class ArenaManager(OffloadingManager):  # type: ignore[misc]
    """See `OffloadingManager`. `instance` is None until the workers have told what their blocks are packed by, and
    while they cannot take part. For the scheduler's thread. `deadline_s` bounds how long a request waits for its
    load from L2."""

    def __init__(
        self,
        *,
        unit_tokens: int,
        workers: int,
        deadline_s: float,
        min_hit_tokens: int = 0,
        loads: bool,
        stores: bool,
        adapters: AdapterNames,
    ) -> None:
        self.errors = ErrorNotes()
        self.instance: OpaqueInstance | None = None
        # Whether the workers' word is still to come.
        self.is_expected = True
        # Set once vLLM has made them of the specification.
        self.groups: Sequence[Group] = ()
        self.align: int | None = None
        self._unit, self._workers, self._deadline_s = unit_tokens, workers, deadline_s
        self._min_hit, self._loads, self._stores = min_hit_tokens, loads, stores
        self._adapters = adapters
        self._spoils_base = False
        self._generation = ""
        self._tracked: dict[str, Tracked] = {}
        self._numbers = itertools.count(1)
        self._preparing: list[Store] = []
        self._under_way: dict[int, Store] = {}
        self.counts: Counter[str] = Counter()

    # what vLLM's connector passes on, since vLLM's manager does not see requests

    @harmless()
    def came(self, request: EngineRequest) -> None:
        wish = wish_of(request)
        if wish.reason:
            self.counts[wish.reason] += 1
        self._tracked[request.request_id] = Tracked(request, wish, salted(wish.salt, self._generation))

    @harmless(lambda: True)
    def ask(self, request: EngineRequest, computed: int) -> bool:
        """Look up what a request may load behind the tokens that vLLM has. Returns False if the answer is still to
        come."""
        tracked = self._tracked.get(request.request_id)
        if tracked is None or not (self._loads and tracked.wish.load) or tracked.failed:
            return True
        now = time.monotonic()
        if tracked.first_asked is None:
            tracked.first_asked = now
        is_late = now - tracked.first_asked >= self._deadline_s
        if self.instance is None or not self.instance.is_ready:
            return is_late or not self.is_expected
        if not self._named(tracked):
            return True
        search, start = tracked.search, computed // self._unit * self._unit
        if search is not None and (search.start != start or (search.decided and search.lease and now > search.until)):
            self._release(tracked)
            search = None
        if search is None:
            search = self._begin(tracked, start, now)
            if search is None:
                return True
            tracked.search = search
        if not search.decided:
            self._hear(search, is_late=is_late)
        return search.decided

    @property
    def is_left(self) -> bool:
        return not (self._loads or self._stores)

    @harmless()
    def leave(self) -> None:
        """Load and store nothing from now on; what is under way ends without being published."""
        self._loads = self._stores = self.is_expected = False
        for store in self._under_way.values():
            store.is_doomed = True
        for tracked in self._tracked.values():
            self._release(tracked)

    @harmless()
    def load_failed(self, request_id: str) -> None:
        """A worker could not load the request's KV: vLLM computes it, and a second try might fail again."""
        if request_id in self._tracked:
            self._tracked[request_id].failed = True

    @harmless()
    def places(self) -> None:
        """Fill in the places of the stores that this step has planned: wait for the server's answers, that are on their
        way already."""
        until = time.monotonic() + ANSWER_S
        preparing, self._preparing = self._preparing, []
        for store in preparing:
            try:
                plan = store.plan = store.planning.result(max(until - time.monotonic(), 0.0))
            except Exception as error:  # noqa: BLE001 - of whatever kind, nothing is stored
                store.planning.cancel()
                self._failed("a store", error)
                continue
            placed = {(place.group, place.chunk): place.offset for place in plan.ranges}
            store.places.offsets[:] = [placed.get(each, NOWHERE) for each in store.keys]

    @harmless()
    def ended(self, ended: Counter[int], failed: Collection[int]) -> None:
        """Hear of the workers' ends of stores."""
        for number in failed:
            if number in self._under_way:
                self._under_way[number].is_doomed = True
        for number, workers in ended.items():
            store = self._under_way.get(number)
            if store is None:
                continue
            store.workers -= workers
            if store.workers <= 0:
                del self._under_way[number]
                self._end(store)

    @harmless()
    def heard_of_adapters(
        self, news: Mapping[int, Mapping[int, AdapterNews | None]], *, spoils_base: bool = False
    ) -> None:
        for worker, each in news.items():
            self._adapters.heard(worker, each)
        self._spoils_base |= spoils_base

    def _named(self, tracked: Tracked) -> bool:
        """Whether the request's KV has a name: without an adapter, or with one that all workers hold alike. One that
        changes leaves the request out."""
        lora = tracked.request.lora_request
        if lora is None:
            return True
        use = self._adapters.use_of(lora)
        if use == NOT_LOADED:
            return False
        if isinstance(use, str) or tracked.adapter not in ("", use.content):
            self._release(tracked)
            tracked.wish = Wish(False, False, reason=use if isinstance(use, str) else "lora_changed")
            return False
        if not tracked.adapter:
            tracked.adapter = use.content
            tracked.salt = salted(tracked.salt, f"lora {use.content}")
        return True

    # vLLM's own calls

    @harmless(lambda: LookupResult.MISS)
    def lookup(self, key: OffloadKey, req_context: Any) -> LookupResult:
        tracked = self._tracked.get(req_context.req_id)
        search = tracked.search if tracked is not None else None
        return LookupResult.HIT if search is not None and key in search.found else LookupResult.MISS

    @harmless(lambda: ArenaPlaces(0))
    def prepare_load(self, keys: Collection[OffloadKey], req_context: Any) -> ArenaPlaces:
        tracked = self._tracked[req_context.req_id]
        search, tracked.search = tracked.search, None
        places = ArenaPlaces(next(self._numbers), [NOWHERE] * len(keys))
        if search is None:
            return places
        places.offsets = [search.found.get(key, NOWHERE) for key in keys]
        places.boot_id, places.until = search.boot_id, search.until + SPARE_S
        tracked.loads.append((search.lease, time.monotonic()))
        if self.instance is not None:
            self.instance.release(search.ticket)
        self.counts["loads"] += 1
        return places

    @harmless()
    def complete_load(self, keys: Collection[OffloadKey], req_context: Any) -> None:
        tracked = self._tracked.get(req_context.req_id)
        if tracked is not None and tracked.loads and self.instance is not None:
            lease, began = tracked.loads.pop(0)
            self.instance.loaded(lease, time.monotonic() - began)
            if tracked.finished and not tracked.loads:
                del self._tracked[req_context.req_id]

    @harmless()
    def prepare_store(self, keys: Collection[OffloadKey], req_context: Any) -> PrepareStoreOutput | None:
        tracked = self._tracked.get(req_context.req_id)
        nothing = PrepareStoreOutput([], ArenaPlaces(0), [])
        if tracked is None or not (self._stores and tracked.wish.store):
            return nothing
        if self.instance is None or not self.instance.is_ready:
            self.counts["no_server"] += 1
            return nothing
        if (tracked.request.lora_request is None and self._spoils_base) or not self._named(tracked):
            return nothing
        chunks = self._chunks(keys, req_context)
        if not chunks:
            return nothing
        groups, placed = self._grouped(chunks)
        end = max(chunk.end for chunk in chunks)
        prompt = self._prompt(tracked, 0, -(-end // self._unit) * self._unit)
        number = next(self._numbers)
        ticket = self.instance.ticket
        boot_id = ticket.boot_id if ticket is not None else b""
        # Beyond its lease a place is still this engine's to write, though never published.
        places = ArenaPlaces(number, [NOWHERE] * len(chunks), boot_id, math.inf)
        store = Store(number, self.instance.prepare_store(prompt, groups), placed, places, self._workers, tracked)
        self._preparing.append(store)
        self._under_way[number] = store
        self.counts["stores"] += 1
        return PrepareStoreOutput([chunk.key for chunk in chunks], places, [])

    def on_new_request(self, req_context: Any) -> RequestOffloadingContext:
        return RequestOffloadingContext()

    @harmless()
    def on_request_finished(self, req_context: Any) -> None:
        tracked = self._tracked.get(req_context.req_id)
        if tracked is None:
            return
        self._release(tracked)
        tracked.finished = True
        if not tracked.loads:
            del self._tracked[req_context.req_id]

    @harmless()
    def reset_cache(self) -> None:
        """Hide all KV so far from this engine. Objects in the server belong to others, too. Stores under way end
        without being published, once the workers no longer write."""
        self._generation = secrets.token_hex(8)
        for store in self._under_way.values():
            store.is_doomed = True
        for tracked in self._tracked.values():
            self._release(tracked)
            tracked.salt, tracked.adapter = salted(tracked.wish.salt, self._generation), ""

    @harmless()
    def shutdown(self) -> None:
        for tracked in self._tracked.values():
            self._release(tracked)
        self._tracked.clear()
        if self.instance is not None:
            self.instance.close()

    # the server

    def _prompt(self, tracked: Tracked, start: int, end: int) -> Prompt:
        request, wish = tracked.request, tracked.wish
        return Prompt(request.request_id, start, end, tracked.salt, traceparent(request), wish.retain)

    def _begin(self, tracked: Tracked, start: int, now: float) -> Search | None:
        request = tracked.request
        end = request.num_tokens
        if any(group.window for group in self.groups):
            # vLLM computes the last token of a prompt, whose window then needs the state before it.
            end -= 1
        unit = self.align or self._unit
        end = end // unit * unit
        if end - start < max(self._unit, self._min_hit):
            return None
        keys, names = [], []
        for group in self.groups:
            first, last = start // group.tokens, -(-end // group.tokens)
            hashes = request.block_hashes[(first + 1) * group.hashes - 1 : last * group.hashes : group.hashes]
            packed = b"".join(map(_digest, hashes))
            keys.append(KeyGroup(packed, group.tokens, first, group.window, aligned=group.ends_hits))
            names.append([make_offload_key(each, group.index) for each in hashes])
        if not all(each.digests for each in keys):
            return None
        assert self.instance is not None
        sent = self.instance.lookup(self._prompt(tracked, start, end), keys)
        ticket = self.instance.ticket
        self.counts["lookups"] += 1
        return Search(start, now, keys, names, sent, boot_id=ticket.boot_id if ticket is not None else b"")

    def _hear(self, search: Search, *, is_late: bool) -> None:
        """Take the answer that is there, or comes within a moment. A load from L2 is waited for until it is late."""
        instance = self.instance
        assert instance is not None
        try:
            reply = search.sent.result(0.0 if search.ticket else ANSWER_S)
        except (TimeoutError, NotYet):
            if is_late:
                self._give_up(search)
            return
        except Exception as error:  # noqa: BLE001 - of whatever kind, it is a miss
            self._failed("a lookup", error)
            search.decided = True
            return
        search.ticket = reply.ticket
        if reply.pending:
            if is_late:
                self._give_up(search)
            else:
                search.sent = instance.ask_again(reply.ticket)
            return
        search.decided = True
        if not reply.grants or not search.boot_id:
            return
        grant = reply.grants[0]
        search.lease, search.until = grant.lease, search.began + reply.lease_s - SPARE_S
        for group, index, offset in granted_objects(reply, search.keys):
            search.found[search.names[group][index]] = offset

    def _failed(self, what: str, error: Exception) -> None:
        """Count a call that the server did not answer, and log what is not a matter of time."""
        self.counts[f"failed: {getattr(error, 'code', type(error).__name__)}"] += 1
        if not isinstance(error, (ServerGone, DeadlineExceeded, TimeoutError, NotYet)):
            self.errors.note(what, error)

    def _give_up(self, search: Search) -> None:
        self.counts["late"] += 1
        self._free(search)
        search.decided, search.ticket = True, ""

    def _release(self, tracked: Tracked) -> None:
        search, tracked.search = tracked.search, None
        if search is not None:
            self._free(search)

    def _free(self, search: Search) -> None:
        """Give back what a search has, and what an answer that is still to come will have."""
        instance = self.instance
        if instance is None:
            return

        def answered(sent: Future[LookupReply]) -> None:
            if sent.exception() is None:
                reply = sent.result(0)
                instance.release(reply.ticket, *[grant.lease for grant in reply.grants])

        instance.release(search.ticket, search.lease)
        if not search.decided:
            search.sent.add_done_callback(answered)

    def _chunks(self, keys: Iterable[OffloadKey], req_context: Any) -> list[_Chunk]:
        """Return the chunks of keys in vLLM's order; those of partial tails, which are not looked up, are left out."""
        by_index = {group.index: (place, group) for place, group in enumerate(self.groups)}
        chunks = []
        for key in keys:
            end = req_context.get_offload_key_position(key)
            place, group = by_index[get_offload_group_idx(key)]
            if end is not None and end % group.tokens == 0:
                chunks.append(_Chunk(key, place, end))
        return chunks

    def _grouped(self, chunks: Sequence[_Chunk]) -> tuple[list[KeyGroup], list[tuple[int, int]]]:
        """Return the keys by group, and for each chunk its group and its place there."""
        groups: list[KeyGroup] = []
        places: dict[OffloadKey, tuple[int, int]] = {}
        for place, group in enumerate(self.groups):
            mine = [chunk for chunk in chunks if chunk.group == place]
            first = mine[0].end // group.tokens - 1 if mine else 0
            digests = b"".join(_digest(get_offload_block_hash(chunk.key)) for chunk in mine)
            groups.append(KeyGroup(digests, group.tokens, first, group.window))
            places.update((chunk.key, (place, index)) for index, chunk in enumerate(mine))
        return groups, [places[chunk.key] for chunk in chunks]

    def _end(self, store: Store) -> None:
        plan = store.plan
        if plan is None:
            store.planning.cancel()
        elif store.is_doomed or not self._named(store.tracked):
            self.counts["unstored"] += 1
            plan.abort()
        else:
            plan.commit()


@dataclass(frozen=True)
class _Chunk:
    key: OffloadKey
    group: int
    end: int


def _digest(block_hash: bytes) -> bytes:
    if len(block_hash) == DIGEST_BYTES:
        return block_hash
    return hashlib.blake2b(block_hash, digest_size=DIGEST_BYTES, person=b"kvf-vllm-hash").digest()
