"""The scheduler's half: vLLM asks it which chunks are there, and where to load and store them; the server answers.

One lookup a prompt is waited for, and nothing else. Any failure is a miss, or a store that is left out.
"""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from vllm.v1.kv_offload.base import (
    LookupResult,
    OffloadingManager,
    OffloadKey,
    PrepareStoreOutput,
    RequestOffloadingContext,
)

from kvf_vllm.adapters import NOT_LOADED, AdapterNames
from kvf_vllm.engine_names import EngineNames
from kvf_vllm.events import Announcements, BlocksRemoved, BlocksStored
from kvf_vllm.offloading.messages import NOWHERE, ArenaPlaces, StepReport
from kvf_vllm.offloading.searches import SPARE_S, Searches
from kvf_vllm.offloading.stores import Stores
from kvf_vllm.offloading.tracked import Engine, Tracked
from kvf_vllm.pace import LoadPace
from kvf_vllm.requests import Wish, current_wish
from kvf_vllm.tally import Tally
from kvframework.api.process import LogLimit
from kvframework.client import ErrorNotes, OpaqueInstance, harmless

if TYPE_CHECKING:
    from kvf_vllm.options import VllmOptions
    from kvf_vllm.requests import EngineRequest
    from kvf_vllm.step_messages import Served
    from kvf_vllm.weights import EngineWeights


class ArenaManager(OffloadingManager):  # type: ignore[misc]
    """See `OffloadingManager`. `register` makes the instance for the names of the workers' blocks. `loads` and `stores`
    are vLLM's role for this engine; `unread`: it must not use KV that it has not computed itself, so it does neither.
    `within_step` has the tokens of a block and the bytes of a worker's chunk where vLLM accepts reports of blocks that
    failed, and so loads within a step. With an `event_block_size` (that of vLLM's block hashes) there are `events`. For
    the scheduler's thread."""

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
        within_step: tuple[int, int] | None = None,
    ) -> None:
        self.tally = Tally()
        self.errors = ErrorNotes(lambda: self.tally.count("errors"))
        self.engine = Engine(
            options,
            unit_tokens,
            workers,
            adapters,
            EngineNames(workers, weights, self._serve),
            self.tally,
            self.errors,
            Announcements(event_block_size, salts=options.announce_salts),
        )
        self.prefill, self.names = self.engine.prefill, self.engine.names
        self.pace = LoadPace()
        self._register = register
        self._options, self._within_step = options, within_step
        self._loads, self._stores, self._unread = loads and not unread, stores and not unread, unread
        self._awaits_until: float | None = None
        self._once = LogLimit.once()
        self._tracked: dict[str, Tracked] = {}
        # Requests that have their blocks, or are of another connector, and were in no step since.
        self._settling: set[str] = set()
        # Times to be learned from: begins of steps that compute no prompt, and, negative, the ends of steps.
        self._noted: list[float] = []
        # The last step, and how many like it complete no chunk.
        self._scheduled: Mapping[str, int] = {}
        self._room = 0
        self._numbers = itertools.count(1)
        self.searches = Searches(self.engine)
        self.stores = Stores(self.engine, self._numbers)
        # Loads within steps: whose they are, their leases, when they began, and the workers that have not ended them.
        self._within: dict[int, list[Any]] = {}

    # what vLLM's connector passes on, since vLLM's manager does not see requests

    def came(self, request: EngineRequest) -> None:
        self.prefill.came(request)
        self._track(request)

    @harmless(lambda: True)
    def ask(self, request: EngineRequest, computed: int) -> bool:
        """Look up what a request may load behind the tokens that vLLM has. Returns False if the answer is still to
        come."""
        self._take_noted()
        self.prefill.asked_for(request.request_id)
        tracked = self._tracked.get(request.request_id) or self._track(request)
        tracked.computed, tracked.own_end, tracked.miss = computed, computed, ""
        if self.names.are_awaited(tracked):
            return False
        loads, stores = self._loads and tracked.wish.load, self._stores and tracked.wish.store
        if (loads or stores) and self._awaits_names():
            return False
        tracked.miss = self._why_unasked(tracked, self.engine.adapters.lacks(tracked))
        return bool(tracked.miss) or self.searches.ask(tracked, computed // self.engine.unit * self.engine.unit)

    @harmless(lambda: 0)
    def within_step(self, request: EngineRequest, tokens: int) -> int:
        """Return how many of the found tokens are loaded within the step, 0 for none: then all are loaded between
        steps. Within a step at least one token is computed."""
        tracked, mode = self._tracked[request.request_id], self._options.load
        tracked.is_within = False
        if self._within_step is None or mode == "async":
            return 0
        block, _ = self._within_step
        most = (request.num_tokens - 1) // block * block - tracked.computed
        if mode == "auto":
            prompt_s = self.prefill.takes_s(tracked.computed + tokens, request.num_tokens)
            is_short = self.pace.is_short(self._nbytes(tokens), idle=not self.prefill, prompt_s=prompt_s)
            if tokens > most or not is_short:
                return 0
        tracked.is_within = most > 0
        return max(min(tokens, most), 0)

    def is_within_step(self, request_id: str) -> bool:
        tracked = self._tracked.get(request_id)
        return tracked is not None and tracked.is_within

    @harmless()
    def allocated(self, request: EngineRequest, external: int) -> None:
        """The request has its blocks, and so many tokens are loaded into them."""
        tracked = self._tracked.get(request.request_id)
        self.prefill.has_blocks(request, tracked.computed + external if tracked is not None and external else 0)
        if tracked is None:
            return
        self._settling.add(request.request_id)
        if external:
            tracked.external, tracked.own_end = external, tracked.computed + external
            if tracked.is_within:
                self.pace.plan(self._nbytes(external))
            self.tally.count("hit_requests")
            self.tally.count("hit_tokens", external)
            self.tally.took("lookup", tracked.found_s)
        elif tracked.miss:
            self.searches.release(tracked)
            self.tally.missed(tracked.miss)
            tracked.miss = ""

    @harmless(lambda: True)
    def begin_step(self, scheduled: Mapping[str, int]) -> bool:
        """A step is about to be planned that computes so many tokens of each request. Returns whether it completes a
        chunk of any."""
        # Nearly all steps compute one token of each of the same requests.
        if sum(scheduled.values()) == len(scheduled) > 0 and not self.pace.has_planned:
            self._noted.append(time.monotonic())
            self._room -= 1
            if self._room > 0 and not self._settling and scheduled.keys() == self._scheduled.keys():
                return False
        else:
            self._take_noted()
            self.prefill.begin_step(scheduled, counts=not self.pace.has_planned)
            self.pace.begin_step(computes=bool(scheduled))
        self._scheduled, self._room = scheduled, sys.maxsize
        for request_id in self._settling & scheduled.keys() if self._settling else ():
            tracked = self._tracked.get(request_id)
            if tracked is not None:
                tracked.is_foreign = tracked.request.num_computed_tokens > tracked.own_end
                tracked.own_end = sys.maxsize
            if tracked is None or not tracked.is_foreign:
                self._settling.discard(request_id)
        completes, unit, all_tracked = False, self.engine.unit, self._tracked
        for request_id, tokens in scheduled.items():
            if (tracked := all_tracked.get(request_id)) is not None:
                request = tracked.request
                # Tokens that are only drafted do not count yet.
                chunks, rest = divmod(min(request.num_computed_tokens + tokens, request.num_tokens), unit)
                completes |= chunks != tracked.chunks
                tracked.chunks, self._room = chunks, min(self._room, unit - rest)
        return completes

    def _take_noted(self) -> None:
        noted, self._noted = self._noted, []
        for at in noted:
            if at > 0:
                self.prefill.begin_step({}, now=at)
                self.pace.begin_step(computes=True, now=at)
            else:
                self.prefill.end_step(-at)
                self.pace.end_step(-at)

    def take_announcements(self) -> list[BlocksStored | BlocksRemoved]:
        """Return the events since the last call. vLLM asks once for each step, when it takes in what that computed."""
        self._noted.append(-time.monotonic())
        if len(self._noted) > 64:
            self._take_noted()
        return self.stores.announcements()

    @harmless()
    def heard(self, report: StepReport) -> None:
        if self.names.heard(report):
            self._leave_all_out("weights_changed")
        for worker, each in report.adapters.items():
            self.engine.adapters.heard(worker, each)
        self.engine.spoils_base |= report.spoils_base
        if (copied := report.transfer_stats.load).bytes:
            self.pace.copied(copied.bytes, copied.time)
        if report.spoils_step:
            # Also what others have computed who share the blocks, and what a step computes that is planned already.
            self.stores.doom()
        for number in self._within.keys() & report.failed:
            self._within[number][0].failed = True
        for number in self._within.keys() & report.ended.keys():
            self._ended_within(number, report.ended[number])
        self.stores.ended(report.ended, report.failed)

    @harmless()
    def cache_was_reset(self) -> None:
        """vLLM has emptied its own prefix cache, and no request has blocks."""
        if self.names.cache_was_reset():
            self._leave_all_out("weights_changed")

    @harmless()
    def load_failed(self, request_id: str) -> None:
        """A worker could not load the request's KV: vLLM computes it, and a second try might fail again."""
        if request_id in self._tracked:
            self._tracked[request_id].failed = True

    def _track(self, request: EngineRequest) -> Tracked:
        wish = current_wish(request, self._once, weights_updated=bool(self.names.weights.updates))
        tracked = self._tracked[request.request_id] = Tracked(request, wish)
        return tracked

    def _awaits_names(self) -> bool:
        """True for a moment from the first question on, until the workers have reported and this side has reached a
        server."""
        if self.engine.is_ready:
            self._awaits_until = 0.0
            return False
        now = time.monotonic()
        if self._awaits_until is None:
            self._awaits_until = now + self._options.lookup_deadline_s
        if self.names.served is None and self.names.have_come:
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
        return "" if self.engine.is_ready else self.names.why_none

    def _serve(self, names: Sequence[Served]) -> None:
        before, self.engine.instance = self.engine.instance, None
        if before is not None:
            before.close()
        self.engine.instance = self._register(names)

    def _leave_all_out(self, reason: str, *, is_reset: bool = False) -> None:
        """End the part of all requests: their KV may be from before and after. Those without blocks begin again. After
        a reset vLLM no longer tells of the ends of loads: their pins lapse, since workers may still copy."""
        self.engine.events.forget()
        self.stores.announce_none()
        self.stores.doom()
        for request_id, tracked in list(self._tracked.items()):
            self.searches.release(tracked)
            if tracked.finished and is_reset:
                del self._tracked[request_id]
            elif request_id in self.prefill or tracked.finished:
                tracked.wish = Wish(False, False, reason=reason)
            else:
                self._track(tracked.request)

    def _nbytes(self, tokens: int) -> int:
        """Return the bytes that a worker loads of so many tokens, where it can load within a step."""
        assert self._within_step is not None
        return -(-tokens // self.engine.unit) * self._within_step[1]

    def _ended_within(self, number: int, workers: int) -> None:
        load = self._within[number]
        load[3] -= workers
        if load[3] <= 0:
            _, lease, began, _ = self._within.pop(number)
            if self.engine.instance is not None:
                self.engine.instance.loaded(lease, time.monotonic() - began)

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
        began = time.monotonic()
        if tracked.is_within:
            self._within[places.number] = [tracked, search.lease, began, self.engine.workers]
        else:
            tracked.loads.append(([each.lease for each in search.parts if each.lease], began))
        if self.engine.instance is not None:
            self.engine.instance.release(*[each.ticket for each in search.parts])
        return places

    @harmless()
    def complete_load(self, keys: Collection[OffloadKey], req_context: Any) -> None:
        tracked = self._tracked.get(req_context.req_id)
        if tracked is not None and tracked.loads and self.engine.instance is not None:
            leases, began = tracked.loads.pop(0)
            for lease in leases:
                self.engine.instance.loaded(lease, time.monotonic() - began)
            if tracked.finished and not tracked.loads:
                del self._tracked[req_context.req_id]

    @harmless()
    def prepare_store(self, keys: Collection[OffloadKey], req_context: Any) -> PrepareStoreOutput | None:
        tracked = self._tracked.get(req_context.req_id)
        nothing = PrepareStoreOutput([], ArenaPlaces(0), [])
        if tracked is None or not (self._stores and tracked.wish.store):
            return nothing
        if not self.engine.is_ready or self.engine.is_spoiled(tracked):
            return nothing
        unnamed = self.engine.adapters.lacks(tracked)
        if tracked.is_foreign or unnamed == NOT_LOADED:
            tracked.chunks, self._room = -1, 0
            return None  # vLLM asks again with the next step
        if unnamed:
            return nothing
        stored, places = self.stores.begin(tracked, keys)
        return PrepareStoreOutput(stored, places, [])

    def has_pending_work(self) -> bool:
        """See `OffloadingManager`: an engine without requests steps on as long as this is true."""
        return self.stores.are_open

    def on_new_request(self, req_context: Any) -> RequestOffloadingContext:
        return RequestOffloadingContext()

    @harmless()
    def on_request_finished(self, req_context: Any) -> None:
        self.prefill.ended(req_context.req_id)
        self._settling.discard(req_context.req_id)
        tracked = self._tracked.get(req_context.req_id)
        if tracked is None:
            return
        self.searches.release(tracked)
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
        self.stores.forget()

    @harmless()
    def shutdown(self) -> None:
        for tracked in self._tracked.values():
            self.searches.release(tracked)
        self._tracked.clear()
        if self.engine.instance is not None:
            self.engine.instance.close()
