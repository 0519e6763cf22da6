"""The scheduler's half: vLLM asks it which chunks are there, and where to load and store them; the server answers.

One lookup a prompt is waited for. Places for stores are asked for without waiting, and known when the step's plan goes
to the workers; ends of loads and stores are told without waiting. Any failure is a miss, or a store that is left out.
"""

from __future__ import annotations

import array
import hashlib
import itertools
import logging
import math
import sys
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
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
    make_offload_key,
)

from kvf_vllm.adapters import NOT_LOADED, AdapterNames
from kvf_vllm.engine_names import EngineNames
from kvf_vllm.events import Announcements, BlocksRemoved, BlocksStored
from kvf_vllm.offloading.messages import NOWHERE, ArenaPlaces, StepReport
from kvf_vllm.requests import Wish, chunk_extras, current_wish, salted, traceparent
from kvf_vllm.speed import Prefill
from kvf_vllm.step_messages import AdapterUse
from kvf_vllm.tally import Tally
from kvframework.api.futures import Future
from kvframework.api.keys import DIGEST_BYTES
from kvframework.api.process import LogLimit
from kvframework.api.transport import StorePlan
from kvframework.client import ErrorNotes, KeyGroup, OpaqueInstance, Prompt, granted_objects, harmless
from kvframework.errors import DeadlineExceeded, ServerGone

if TYPE_CHECKING:
    from kvf_vllm.options import VllmOptions
    from kvf_vllm.requests import EngineRequest
    from kvf_vllm.step_messages import Served
    from kvf_vllm.weights import EngineWeights
    from kvframework.api.transport import StoreOutcome
    from kvframework.client import LookupReply

log = logging.getLogger(__name__)

# The engine's thread waits so long for the answer to a lookup; later the request is asked about again.
ANSWER_S = 0.05
# How long an idle engine waits for L2 to say whether it has more than L1.
DECIDED_S = 0.002
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
    """The lookup of one request's tokens from `start` to `end`, and what it has found: offsets by key, of `lease` until
    a time of the monotonic clock."""

    start: int
    end: int
    began: float
    keys: list[KeyGroup]
    names: list[list[OffloadKey]]
    sent: Future[LookupReply]
    ticket: str = ""
    lease: str = ""
    until: float = 0.0
    session: bytes = b""
    found: dict[OffloadKey, int] = field(default_factory=dict)
    # The token up to which all is found.
    hit_end: int = 0
    decided: bool = False
    unanswered: bool = False


@dataclass(eq=False)
class Tracked:
    """A request. `computed` are the tokens that vLLM had when it asked last, `external` those that it then took of what
    was found, and `miss` is the reason if there were none.
    `was_asked_again`: it waited a step for news of the weights."""

    request: EngineRequest
    wish: Wish
    search: Search | None = None
    computed: int = 0
    external: int = 0
    # The token up to which vLLM has computed it or this connector loads it; `is_foreign`: in this step another
    # connector loads more, which may fail.
    own_end: int = sys.maxsize
    is_foreign: bool = False
    miss: str = ""
    # How long the last lookup took.
    found_s: float = 0.0
    was_asked_again: bool = False
    failed: bool = False
    finished: bool = False
    # None without an adapter, or as long as it has no name.
    adapter: AdapterUse | None = None
    # Its whole chunks by key, and how many of each group are among them.
    chunks: dict[OffloadKey, _Chunk] = field(default_factory=dict)
    known: dict[int, int] = field(default_factory=dict)
    # The names of its content, if vLLM's will not do.
    own: bytearray = field(default_factory=bytearray)
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
    event: BlocksStored | None = None
    plan: StorePlan | None = None
    is_doomed: bool = False


class ArenaManager(OffloadingManager):  # type: ignore[misc]
    """See `OffloadingManager`. `register` makes the instance for the names of the workers' blocks. `loads` and `stores`
    are vLLM's role for this engine; `unread`: it must not use KV that it has not computed itself, so it does neither.
    With an `event_block_size` (that of vLLM's block hashes) there are `events`. For the scheduler's thread."""

    def __init__(
        self,
        options: VllmOptions,
        register: Callable[[Sequence[Served]], OpaqueInstance],
        *,
        unit_tokens: int,
        workers: int,
        loads: bool,
        stores: bool,
        unread: bool,
        adapters: AdapterNames,
        weights: EngineWeights,
        event_block_size: int = 0,
    ) -> None:
        self.tally = Tally()
        self.errors = ErrorNotes(lambda: self.tally.count("errors"))
        self.events = Announcements(event_block_size, salts=options.announce_salts)
        self.prefill = Prefill()
        # None until the workers have told what their blocks are named by.
        self.instance: OpaqueInstance | None = None
        self.names = EngineNames(workers, weights, self._serve)
        self.step = 0
        # Set once vLLM has made them of the specification.
        self.groups: Sequence[Group] = ()
        self.align: int | None = None
        self._register = register
        self._options, self._unit, self._workers = options, unit_tokens, workers
        self._loads, self._stores, self._unread = loads and not unread, stores and not unread, unread
        self._adapters = adapters
        self._spoils_base = False
        self._awaits_until: float | None = None
        self._is_up_to_date = True
        self._once = LogLimit.once()
        self._tracked: dict[str, Tracked] = {}
        self._numbers = itertools.count(1)
        self._preparing: list[Store] = []
        self._under_way: dict[int, Store] = {}
        self._committing: list[tuple[Future[StoreOutcome], BlocksStored]] = []

    # what vLLM's connector passes on, since vLLM's manager does not see requests

    @harmless()
    def came(self, request: EngineRequest) -> None:
        self.prefill.came(request)
        self._track(request)

    @harmless(lambda: True)
    def ask(self, request: EngineRequest, computed: int) -> bool:
        """Look up what a request may load behind the tokens that vLLM has. Returns False if the answer is still to
        come."""
        self.prefill.asked_for(request.request_id)
        tracked = self._tracked.get(request.request_id) or self._track(request)
        tracked.computed, tracked.own_end, tracked.miss = computed, computed, ""
        if self._awaits_weights(tracked):
            return False
        loads, stores = self._loads and tracked.wish.load, self._stores and tracked.wish.store
        if (loads or stores) and self._awaits_names():
            return False
        tracked.miss = self._why_unasked(tracked, self._adapter_lacks(tracked))
        return bool(tracked.miss) or self._search(tracked, computed // self._unit * self._unit)

    @harmless()
    def allocated(self, request: EngineRequest, external: int) -> None:
        """The request has its blocks, and so many tokens are loaded into them."""
        tracked = self._tracked.get(request.request_id)
        self.prefill.has_blocks(request, tracked.computed + external if tracked is not None and external else 0)
        if tracked is None:
            return
        if external:
            tracked.external, tracked.own_end = external, tracked.computed + external
            self.tally.count("hit_requests")
            self.tally.count("hit_tokens", external)
            self.tally.took("lookup", tracked.found_s)
        elif tracked.miss:
            self._release(tracked)
            self.tally.missed(tracked.miss)
            tracked.miss = ""

    @harmless()
    def begin_step(self, scheduled: Mapping[str, int]) -> None:
        """A step is about to be planned that computes so many tokens of each request."""
        self._is_up_to_date = True
        self.prefill.begin_step(scheduled)
        for request_id in scheduled:
            if tracked := self._tracked.get(request_id):
                tracked.is_foreign = tracked.request.num_computed_tokens > tracked.own_end
                tracked.own_end = sys.maxsize

    @harmless(list)
    def take_announcements(self) -> list[BlocksStored | BlocksRemoved]:
        """Return the events since the last call. vLLM asks once for each step, when it takes in what that computed."""
        self.prefill.end_step()
        committing, self._committing = self._committing, []
        for ended, event in committing:
            if not ended.query():
                self._committing.append((ended, event))
            elif ended.exception() is None and not ended.result(0).dropped:
                self.events.stored(event)
        return self.events.take()

    @harmless()
    def heard(self, report: StepReport) -> None:
        """Apply the report of the workers after a step."""
        if self.names.heard(report):
            self._leave_all_out("weights_changed")
        for worker, each in report.adapters.items():
            self._adapters.heard(worker, each)
        self._spoils_base |= report.spoils_base
        self._ended(report.ended, report.failed)

    @harmless()
    def cache_was_reset(self) -> None:
        """vLLM has emptied its own prefix cache, and no request has blocks. Often the weights were updated just before,
        so the next requests wait a step for the workers' word."""
        self._is_up_to_date = False
        if self.names.cache_was_reset(self.step):
            self._leave_all_out("weights_changed")

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

    def _ended(self, ended: Counter[int], failed: Collection[int]) -> None:
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

    def _track(self, request: EngineRequest) -> Tracked:
        wish = current_wish(request, self._once, weights_updated=bool(self.names.weights.updates))
        tracked = self._tracked[request.request_id] = Tracked(request, wish)
        return tracked

    def _awaits_weights(self, tracked: Tracked) -> bool:
        """True once for each request while the next step may bring news of the workers' weights."""
        if tracked.was_asked_again or (self._is_up_to_date and not self.names.weights.are_changing):
            return False
        tracked.was_asked_again = tracked.wish.load or tracked.wish.store
        return tracked.was_asked_again

    def _awaits_names(self) -> bool:
        """True for a moment from the first question on, until the workers have reported and this side has reached a
        server."""
        now = time.monotonic()
        if self._awaits_until is None:
            self._awaits_until = now + self._options.lookup_deadline_s
        is_known = self.names.have_come if self.names.served is None else self._is_ready
        if is_known:
            self._awaits_until = now
        return now < self._awaits_until

    def _why_unasked(self, tracked: Tracked, unnamed: str) -> str:
        """Return why no lookup is made for a request, "" if one is."""
        if self._unread:
            return "no_prefix_caching"
        if unnamed or not (self._loads and tracked.wish.load):
            return unnamed or tracked.wish.reason or "opted_out"
        if tracked.failed:
            return "load_failed"
        return "" if self._is_ready else self.names.why_none

    @property
    def _is_ready(self) -> bool:
        return self.names.served is not None and self.instance is not None and self.instance.is_ready

    def _serve(self, names: Sequence[Served]) -> None:
        before, self.instance = self.instance, None
        if before is not None:
            before.close()
        self.instance = self._register(names)

    def _leave_all_out(self, reason: str, *, is_reset: bool = False) -> None:
        """End the part of all requests: their KV may be from before and after. Those without blocks begin again. After
        a reset vLLM no longer tells of the ends of loads: their pins lapse, since workers may still copy."""
        self.events.forget()
        self._committing.clear()
        for store in self._under_way.values():
            store.is_doomed = True
        for request_id, tracked in list(self._tracked.items()):
            self._release(tracked)
            if tracked.finished and is_reset:
                del self._tracked[request_id]
            elif request_id in self.prefill or tracked.finished:
                tracked.wish = Wish(False, False, reason=reason)
            else:
                self._track(tracked.request)

    def _adapter_lacks(self, tracked: Tracked) -> str:
        """Return why the request's adapter has no name, "" if it has one, or there is none. A request whose adapter
        gets none, or another one than before, is left out."""
        lora = tracked.request.lora_request
        if lora is None or not (tracked.wish.load or tracked.wish.store):
            return ""
        found = self._adapters.use_of(lora)
        if isinstance(found, AdapterUse):
            before, tracked.adapter = tracked.adapter, found
            if before in (None, found):
                return ""
            found = "lora_changed"
        if found != NOT_LOADED:
            self._release(tracked)
            tracked.wish = Wish(False, False, reason=found)
            for store in self._under_way.values():
                store.is_doomed |= store.tracked is tracked
        return found

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
        places = ArenaPlaces(next(self._numbers), [NOWHERE] * len(keys), adapter=tracked.adapter)
        if search is None:
            return places
        places.offsets = [search.found.get(key, NOWHERE) for key in keys]
        places.session, places.until = search.session, search.until + SPARE_S
        places.tokens = tracked.external
        tracked.loads.append((search.lease, time.monotonic()))
        if self.instance is not None:
            self.instance.release(search.ticket)
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
        if self.instance is None or not self._is_ready or self._is_spoiled(tracked):
            return nothing
        unnamed = self._adapter_lacks(tracked)
        if tracked.is_foreign or unnamed == NOT_LOADED:
            return None  # vLLM asks again with the next step
        if unnamed:
            return nothing
        chunks = self._chunks(keys, tracked)
        if not chunks:
            return nothing
        groups, placed = self._grouped(tracked, chunks)
        end = max(chunk.end for chunk in chunks)
        prompt = self._prompt(tracked, 0, -(-end // self._unit) * self._unit)
        number = next(self._numbers)
        ticket = self.instance.ticket
        session = ticket.session if ticket is not None else b""
        # Beyond its lease a place is still this engine's to write, though never published.
        places = ArenaPlaces(number, [NOWHERE] * len(chunks), session, math.inf)
        main = self.groups[self._main]
        ends = [chunk.end for chunk in chunks if chunk.group == self._main]
        places.tokens = len(ends) * main.tokens
        event = None
        if ends and max(ends) - min(ends) + main.tokens == places.tokens:
            event = self.events.of(tracked.request, tracked.wish, min(ends) - main.tokens, max(ends))
        planning = self.instance.prepare_store(prompt, groups)
        store = Store(number, planning, placed, places, self._workers, tracked, event)
        self._preparing.append(store)
        self._under_way[number] = store
        return PrepareStoreOutput([chunk.key for chunk in chunks], places, [])

    def on_new_request(self, req_context: Any) -> RequestOffloadingContext:
        return RequestOffloadingContext()

    @harmless()
    def on_request_finished(self, req_context: Any) -> None:
        self.prefill.ended(req_context.req_id)
        tracked = self._tracked.get(req_context.req_id)
        if tracked is None:
            return
        self._release(tracked)
        tracked.finished = True
        if not tracked.loads:
            del self._tracked[req_context.req_id]

    @harmless()
    def reset_cache(self) -> None:
        """Hide all KV so far from this engine: the weights may have changed. Objects in the server belong to others,
        too. Stores under way end without being published, once the workers no longer write."""
        self.names.hide()
        for tracked in self._tracked.values():
            tracked.loads.clear()
        self._leave_all_out("reset", is_reset=True)

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
        salt = salted(wish.salt, self.names.generation)
        if tracked.adapter is not None:
            salt = salted(salt, f"lora {tracked.adapter.content}")
        return Prompt(request.request_id, start, end, salt, traceparent(request), wish.retain)

    @property
    def _main(self) -> int:
        """The place of the group whose chunks stand for the prompt: the first of full attention, else the first."""
        return next((place for place, group in enumerate(self.groups) if not group.window), 0)

    def _is_spoiled(self, tracked: Tracked) -> bool:
        """Whether the request, which has no adapter, may have been computed by one."""
        return tracked.request.lora_request is None and self._spoils_base

    def _search(self, tracked: Tracked, start: int) -> bool:
        """Ask, or hear the answer; returns False if it is still to come."""
        now, search = time.monotonic(), tracked.search
        if search is not None and (search.start != start or (search.decided and search.lease and now > search.until)):
            self._release(tracked)
            search = None
        if search is None:
            search = self._begin(tracked, start, now)
            if search is None:
                tracked.miss = "held_locally" if tracked.computed else "too_short"
                return True
            tracked.search = search
        if not search.decided:
            self._hear(tracked, search, is_late=now - search.began >= self._options.lookup_deadline_s)
            search = tracked.search or search
            if not search.decided:
                return False
            tracked.found_s = time.monotonic() - search.began
        external = search.hit_end - tracked.computed
        if search.unanswered:
            tracked.miss = "no_answer"
        else:
            self.events.looked_up(tracked.request, tracked.wish, max(search.hit_end, start), search.end)
        if external < max(self._options.min_hit_tokens, 1):
            tracked.miss = tracked.miss or ("not_stored" if external < 1 else "too_few")
            search.found.clear()
        return True

    def _begin(self, tracked: Tracked, start: int, now: float, most: int = sys.maxsize) -> Search | None:
        request = tracked.request
        end = min(request.num_tokens, most)
        if end < most and any(group.window for group in self.groups):
            # vLLM computes the last token of a prompt, whose window then needs the state before it.
            end -= 1
        unit = self.align or self._unit
        end = end // unit * unit
        if end - start < self._unit or end <= tracked.computed:
            return None
        keys, names = [], []
        for group in self.groups:
            first, last = start // group.tokens, -(-end // group.tokens)
            hashes = request.block_hashes[(first + 1) * group.hashes - 1 : last * group.hashes : group.hashes]
            packed = b"".join(
                self._digest(tracked, each, chunk * group.tokens) for chunk, each in enumerate(hashes, first + 1)
            )
            keys.append(KeyGroup(packed, group.tokens, first, group.window, aligned=group.ends_hits))
            names.append([make_offload_key(each, group.index) for each in hashes])
        if not all(each.digests for each in keys):
            return None
        assert self.instance is not None
        prompt, wait_s = self._prompt(tracked, start, end), 0.0 if self.prefill else DECIDED_S
        sent = self.instance.lookup(prompt, keys, wait_s=wait_s, speed=self.prefill.speed())
        ticket = self.instance.ticket
        return Search(start, end, now, keys, names, sent, session=ticket.session if ticket is not None else b"")

    def _hear(self, tracked: Tracked, search: Search, *, is_late: bool) -> None:
        """Take the answer that is there, or comes within a moment. A load from L2 is waited for until it is late; then
        what is in L1 has to do, and is asked for alone."""
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
            search.unanswered = isinstance(error, (DeadlineExceeded, TimeoutError, NotYet))
            return
        search.ticket = reply.ticket
        if reply.pending:
            end = search.start + reply.hit_tokens
            if not is_late:
                search.sent = instance.ask_again(reply.ticket)
            elif search.start < end < search.end and (shorter := self._begin(tracked, search.start, search.began, end)):
                tracked.search = shorter
                self._free(search)
                self._hear(tracked, shorter, is_late=True)
            else:
                self._give_up(search)
            return
        search.decided = True
        if not reply.grants or not search.session:
            return
        grant = reply.grants[0]
        search.lease, search.until = grant.lease, search.began + reply.lease_s - SPARE_S
        search.hit_end = search.start + reply.hit_tokens
        for group, index, offset in granted_objects(reply, search.keys):
            search.found[search.names[group][index]] = offset

    def _failed(self, what: str, error: Exception) -> None:
        """Log why the server did not answer a call, if it is not a matter of time."""
        if not isinstance(error, (ServerGone, DeadlineExceeded, TimeoutError, NotYet)):
            self.errors.note(what, error)

    def _give_up(self, search: Search) -> None:
        self._free(search)
        search.decided, search.unanswered, search.ticket = True, True, ""

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

    def _chunks(self, keys: Iterable[OffloadKey], tracked: Tracked) -> list[_Chunk]:
        """Return the chunks of keys in vLLM's order; those of partial tails, which are not looked up, are left out."""
        hashes, chunks = tracked.request.block_hashes, tracked.chunks
        for place, group in enumerate(self.groups):
            while (last := (known := tracked.known.get(place, 0)) * group.hashes + group.hashes - 1) < len(hashes):
                tracked.known[place] = known + 1
                key = make_offload_key(hashes[last], group.index)
                chunks[key] = _Chunk(key, place, (known + 1) * group.tokens)
        return [chunks[key] for key in keys if key in chunks]

    def _digest(self, tracked: Tracked, block_hash: bytes, end: int) -> bytes:
        """Return the name of the content up to token `end`: vLLM's hash, which has the name and the path of an adapter
        in it; so with one, whose content is in the salt, a hash of the tokens and images."""
        if tracked.adapter is None:
            return _digest(block_hash)
        request, unit, own = tracked.request, self._unit, tracked.own
        if len(own) < end // unit * DIGEST_BYTES:
            extras = chunk_extras(request, unit)
            for chunk in range(len(own) // DIGEST_BYTES, request.num_tokens // unit):
                tokens = array.array("I", request.all_token_ids[chunk * unit : (chunk + 1) * unit]).tobytes()
                own += _digest(bytes(own[-DIGEST_BYTES:]) + tokens + extras.get(chunk, b"") + b"lora")
        return bytes(own[end // unit * DIGEST_BYTES - DIGEST_BYTES :][:DIGEST_BYTES])

    def _grouped(self, tracked: Tracked, chunks: Sequence[_Chunk]) -> tuple[list[KeyGroup], list[tuple[int, int]]]:
        """Return the keys by group, and for each chunk its group and its place there."""
        groups: list[KeyGroup] = []
        places: dict[OffloadKey, tuple[int, int]] = {}
        for place, group in enumerate(self.groups):
            mine = [chunk for chunk in chunks if chunk.group == place]
            first = mine[0].end // group.tokens - 1 if mine else 0
            digests = b"".join(self._digest(tracked, get_offload_block_hash(chunk.key), chunk.end) for chunk in mine)
            groups.append(KeyGroup(digests, group.tokens, first, group.window))
            places.update((chunk.key, (place, index)) for index, chunk in enumerate(mine))
        return groups, [places[chunk.key] for chunk in chunks]

    def _end(self, store: Store) -> None:
        plan = store.plan
        if plan is None:
            store.planning.cancel()
        elif store.is_doomed or self._is_spoiled(store.tracked) or self._adapter_lacks(store.tracked):
            plan.abort()
        else:
            committing = plan.commit()
            if store.event is not None:
                self._committing.append((committing, store.event))


@dataclass(frozen=True)
class _Chunk:
    key: OffloadKey
    group: int
    end: int


def _digest(block_hash: bytes) -> bytes:
    if len(block_hash) == DIGEST_BYTES:
        return block_hash
    return hashlib.blake2b(block_hash, digest_size=DIGEST_BYTES, person=b"kvf-vllm-hash").digest()
