"""The scheduler side: the tokens of a request to load, the chunks to store and when, and the stores that must end
before their blocks are written.

A pure state machine; vLLM's scheduler thread drives it, and only `ServerLookups` does I/O.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

from kvf_vllm.adapters import AdapterNames
from kvf_vllm.engine_names import EngineNames
from kvf_vllm.events import Announcements, BlocksStored
from kvf_vllm.layouts import (
    GroupFacts,
    Handover,
    blocks_between,
    complete_states,
    only_between_steps,
    storable,
    whole_prompt_loadable,
)
from kvf_vllm.lookups import ServerLookups
from kvf_vllm.options import VllmOptions
from kvf_vllm.pace import LoadPace
from kvf_vllm.requests import EngineRequest, Wish, chunk_extras, content_of, current_wish, salted, traceparent
from kvf_vllm.search import PrefixSearch
from kvf_vllm.speed import Prefill
from kvf_vllm.step_messages import AdapterUse, GroupBlocks, StepPlan, StepReport, TransferOp
from kvf_vllm.tally import Tally
from kvf_vllm.weights import EngineWeights
from kvframework.api.keys import ChunkContent
from kvframework.api.process import LogLimit
from kvframework.client import RequestHashes

# How long an idle engine waits for L2 to say whether it has more than L1, which a quick tier does in a millisecond: a
# new prompt is then computed in this step of the scheduler. A slower tier answers to later steps.
DECIDED_S = 0.002


@dataclass
class _Tracked:
    """A request from its first mention until vLLM has finished it. `stored` is the token up to which stores were
    planned, `hit_end` the token up to which the last answer to vLLM promised KV, `own_end` the token up to which vLLM
    had computed it or this connector loads it, `loading` the number of workers that still load, `miss` the reason of
    the last miss; `is_within`: the step waits for the load. `adapter` is None without one, and as long as it has no
    name. `was_asked_again`: it waited a step for news of the weights."""

    request: EngineRequest
    wish: Wish
    search: PrefixSearch
    hashes: RequestHashes | None = None
    fed: int = 0
    stored: int = 0
    start: int = 0
    hit_end: int = 0
    own_end: int = sys.maxsize
    loading: int = 0
    failed: bool = False
    miss: str = ""
    is_within: bool = False
    adapter: AdapterUse | None = None
    was_asked_again: bool = False


@dataclass
class _Unfinished:
    """A store that not all workers have ended: they may still read its blocks."""

    blocks: set[int]
    workers: int
    stored: int
    event: BlocksStored | None


class SchedulerSide:
    """`workers` is the number of reporting workers; `loads` and `stores` are vLLM's role for this engine; `unread`: it
    must not use KV that it has not computed itself, so it does neither; with an `event_block_size` (that of vLLM's
    block hashes) there are `events`. For one thread."""

    def __init__(
        self,
        service: ServerLookups,
        groups: Sequence[GroupFacts],
        options: VllmOptions,
        *,
        workers: int = 1,
        loads: bool = True,
        stores: bool = True,
        unread: bool = False,
        event_block_size: int = 0,
        adapters: AdapterNames | None = None,
        weights: EngineWeights | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.tally = Tally()
        self._adapters = adapters or AdapterNames(workers)
        self._event_block_size = event_block_size
        self.events = Announcements(event_block_size, salts=options.announce_salts)
        self._service = service
        self._groups = tuple(groups)
        self._options = options
        self._workers = workers
        self._loads = loads
        self._stores = stores and not unread
        self._unread = unread
        self._clock = clock
        self._mode = "async" if only_between_steps(self._groups) else options.load
        self._whole_prompt = self._mode != "sync" and whole_prompt_loadable(self._groups)
        self._pace = LoadPace(clock)
        self.names = EngineNames(workers, weights or EngineWeights(), service.serve)
        self._first_asked: float | None = None
        self._tracked: dict[str, _Tracked] = {}
        # A step that computes any request is held up by no lookup, others by one at most.
        self._prefill = Prefill(clock)
        self._has_waited = False
        self._planned_loads: list[TransferOp] = []
        # Blocks that another connector may load into, which begins before vLLM schedules them.
        self._foreign: set[int] = set()
        self._unfinished: dict[int, _Unfinished] = {}
        self._next_store = 0
        self._once = LogLimit.once()

    # Requests of vLLM's scheduler.

    def came(self, request: EngineRequest) -> None:
        """vLLM's `on_new_request`: it waits, and is asked for when its turn is near."""
        if request.request_id not in self._tracked:
            self._prefill.came(request)

    def matched_tokens(self, request: EngineRequest, computed: int) -> tuple[int | None, bool]:
        """vLLM's `get_num_new_matched_tokens`: the number of tokens beyond `computed` that can be loaded, and True if
        they are loaded between steps; a number of None asks vLLM to call again."""
        self._prefill.asked_for(request.request_id)
        tracked = self._track(request)
        tracked.miss, tracked.own_end = "", computed
        if self._unread:
            return self._no_hit(tracked, "no_prefix_caching")
        if self.names.are_awaited(tracked):
            return None, False
        if unnamed := self._adapters.lacks(tracked):
            return self._no_hit(tracked, unnamed)
        loads = self._loads and tracked.wish.load
        if (loads or (self._stores and tracked.wish.store)) and self._awaits_names(tracked):
            return None, False
        if not loads:
            return self._no_hit(tracked, tracked.wish.reason or "opted_out")
        if tracked.failed:
            return self._no_hit(tracked, "load_failed")
        hashes = self._hashed(tracked) if self.names.served is not None else None
        if self.names.served is None or hashes is None:
            return self._no_hit(tracked, self.names.why_none)
        chunk = self.names.served.chunk_tokens
        start = computed // chunk * chunk
        end = min(request.num_tokens - (0 if self._whole_prompt else 1), hashes.hashed_tokens) // chunk * chunk
        if end <= computed:
            tracked.search.release()
            return self._no_hit(tracked, "too_short" if not computed else "held_locally")
        wait_s = 0.0 if self._prefill or self._has_waited else DECIDED_S
        hit_end = tracked.search.hit_end(hashes, start, end, wait_s, self._prefill.speed)
        if hit_end is None:
            self._has_waited = True
            return None, False
        if not tracked.search.unanswered:
            self.events.looked_up(request, tracked.wish, hit_end, end)
        external = hit_end - computed
        if external < max(self._options.min_hit_tokens, 1):
            unknown = "no_answer" if tracked.search.unanswered else "not_stored"
            return self._no_hit(tracked, unknown if external < 1 else "too_few")
        tracked.start, tracked.hit_end = start, hit_end
        tracked.is_within = self._mode == "sync" or (
            self._mode == "auto"
            # A step computes one token at least of a request that it loads for.
            and hit_end < request.num_tokens
            and self._pace.is_short(
                external, idle=not self._prefill, prompt_s=self._prefill.takes_s(hit_end, request.num_tokens)
            )
        )
        return external, not tracked.is_within

    def allocated(self, request: EngineRequest, table: GroupBlocks, external: int) -> None:
        """vLLM's `update_state_after_alloc`: the request has its blocks, all of them in `table`."""
        tracked = self._tracked.get(request.request_id)
        self._prefill.has_blocks(request, tracked.hit_end if tracked is not None else 0)
        if tracked is None or tracked.loading:
            return
        if not external or tracked.hashes is None:
            computed = 0 if tracked.own_end == sys.maxsize else tracked.own_end
            self._foreign.update(_behind(self._groups, table, computed))
            tracked.search.release()
            if tracked.miss:
                self.tally.missed(tracked.miss)
                tracked.miss = ""
            return
        start, end = tracked.start, tracked.hit_end
        tracked.own_end = end
        self._planned_loads.append(
            replace(
                self._op(tracked, tracked.hashes, start, end, blocks_between(self._groups, table, start, end)),
                skip=end - external - start,
                grants=tracked.search.take_grants(),
                is_within=tracked.is_within,
            )
        )
        if tracked.is_within:
            self._pace.plan(external)
        tracked.loading = self._workers
        if tracked.stored >= start:
            tracked.stored = max(tracked.stored, end)
        self.tally.count("hit_requests")
        self.tally.count("hit_tokens", external)
        self.tally.took("lookup", tracked.search.found_after_s)

    def allocated_in_vain(self, request_id: str, table: GroupBlocks, external: int) -> None:
        """Replace `allocated` after that has raised: the load promised to vLLM fails."""
        self.leave_out(request_id)
        tracked = self._tracked.get(request_id)
        if tracked is None or not external or tracked.loading:
            return
        end = tracked.hit_end
        in_vain = TransferOp(request_id, 0, end, b"", "", table, skip=end - external, is_within=tracked.is_within)
        self._planned_loads.append(in_vain)
        tracked.loading = self._workers

    def leave_out(self, request_id: str) -> None:
        """Stop loads and stores for this request after an error in its handling."""
        tracked = self._tracked.get(request_id)
        if tracked is not None:
            tracked.wish = Wish(False, False, reason="error")
            tracked.search.release()

    def plan_step(
        self,
        scheduled: Mapping[str, int],
        tables: Callable[[str], GroupBlocks | None],
        new_blocks: Iterable[int] = (),
        states: Mapping[str, Iterable[Handover]] = MappingProxyType({}),
    ) -> StepPlan:
        """The plan of the workers for this step, vLLM's `build_connector_meta`. `scheduled` gives the number of
        tokens to compute for each request; `tables` gives a request's blocks; `new_blocks` were given out since the
        last step; `states` are complete after it."""
        self.names.planned(writes=bool(scheduled or self._planned_loads))
        self._has_waited = False
        written = self._foreign.union(new_blocks)
        self._foreign = set()
        for load in self._planned_loads:
            written.update(_behind(self._groups, load.block_ids, load.skip))
        fence = [number for number, store in self._unfinished.items() if not written.isdisjoint(store.blocks)]
        stores: list[TransferOp] = []
        if self._stores and self.names.served is not None:
            for request_id, tokens in scheduled.items():
                tracked = self._tracked.get(request_id)
                if tracked is not None and tracked.wish.store:
                    stores += self._plan_store(tracked, tokens, tables, states.get(request_id, ()))
        loads, self._planned_loads = self._planned_loads, []
        self._prefill.begin_step(scheduled, counts=not any(load.is_within for load in loads))
        self._pace.begin_step(computes=bool(scheduled))
        return StepPlan(loads, stores, fence, bool(scheduled), self.names.step, self.names.weights.updates)

    def step_ended(self) -> None:
        self._prefill.end_step()
        self._pace.end_step()

    def plan_in_doubt(self) -> StepPlan:
        """Replace `plan_step` after that has raised: planned loads stay, nothing is stored, and all stores end before
        the step, since any of their blocks may be written in it."""
        self.names.planned(writes=True)
        loads, self._planned_loads = self._planned_loads, []
        self._prefill.begin_step({}, counts=False)
        self._pace.begin_step(computes=False)
        self._foreign = set()
        self._has_waited = False
        return StepPlan(loads, [], list(self._unfinished), step=self.names.step, updates=self.names.weights.updates)

    def heard(self, report: StepReport) -> None:
        if self.names.heard(report):
            self._leave_all_out("weights_changed")
        for worker, news in report.adapters.items():
            self._adapters.heard(worker, news)
        if report.copied_tokens:
            self._pace.copied(report.copied_tokens, report.copied_s)
        for number, count in report.ended.items():
            store = self._unfinished.get(number)
            if store is None:
                continue
            store.workers -= count
            store.stored += report.stored[number]
            if store.workers <= 0:
                del self._unfinished[number]
                if store.event is not None and store.stored >= self._workers:
                    self.events.stored(store.event)
        for request_id in report.failed:
            if request_id in self._tracked:
                tracked = self._tracked[request_id]
                # A second attempt might fail again, and so on without end.
                tracked.failed = True
                tracked.stored = min(tracked.stored, tracked.start)
        for request_id, start in report.unstored.items():
            if request_id in self._tracked:
                tracked = self._tracked[request_id]
                tracked.stored = min(tracked.stored, start)
        for request_id, count in report.loaded.items():
            if request_id in self._tracked:
                tracked = self._tracked[request_id]
                tracked.loading = max(tracked.loading - count, 0)
                if not tracked.loading:
                    tracked.search.release()

    def finished(self, request: EngineRequest) -> None:
        """vLLM's `request_finished`, aborts included. A load in progress goes on, with a pin of its own: vLLM keeps the
        blocks until the workers have reported its end."""
        self._prefill.ended(request.request_id)
        tracked = self._tracked.pop(request.request_id, None)
        if tracked is not None:
            tracked.search.release()

    def reset(self) -> None:
        """Hide all earlier KV from this engine: the weights may have changed. Objects in the server stay, since they
        belong to other engines too."""
        self.names.hide()
        self._leave_all_out("reset")

    def cache_was_reset(self) -> None:
        """vLLM has emptied its own prefix cache, and no request has blocks."""
        if self.names.cache_was_reset():
            self._leave_all_out("weights_changed")

    def close(self) -> None:
        for tracked in self._tracked.values():
            tracked.search.release()
        self._tracked.clear()

    def _track(self, request: EngineRequest) -> _Tracked:
        tracked = self._tracked.get(request.request_id)
        if tracked is None:
            search = PrefixSearch(self._service, deadline_s=self._options.lookup_deadline_s, clock=self._clock)
            wish = current_wish(request, self._once, weights_updated=bool(self.names.weights.updates))
            tracked = self._tracked[request.request_id] = _Tracked(request, wish, search)
        return tracked

    def _leave_all_out(self, reason: str) -> None:
        """End the part of all requests: their KV may be from before and after. Those without blocks begin again."""
        self.events.forget()
        for store in self._unfinished.values():
            store.event = None
        for request_id, tracked in list(self._tracked.items()):
            tracked.search.release()
            if request_id in self._prefill:
                tracked.wish = Wish(False, False, reason=reason)
            else:
                del self._tracked[request_id]

    def _awaits_names(self, tracked: _Tracked) -> bool:
        """True for a moment from the first question on, until the workers have reported, in their first step, whether a
        server runs, and this side has reached it, too. A request of one step would not be stored otherwise."""
        now = self._clock()
        if self._first_asked is None:
            self._first_asked = now
        if now - self._first_asked >= self._options.lookup_deadline_s:
            return False
        return not self.names.have_come if self.names.served is None else self._hashed(tracked) is None

    def _hashed(self, tracked: _Tracked) -> RequestHashes | None:
        """The request's digests of all tokens that are known now, None as long as they have no name."""
        assert self.names.served is not None
        if tracked.adapter is None and self._adapters.lacks(tracked):
            return None
        if tracked.hashes is None:
            salt = salted(tracked.wish.salt, self.names.generation)
            wish = tracked.wish
            tracked.hashes = self._service.hashes(
                tracked.request.request_id, salt, traceparent(tracked.request), wish.retain, wish.conversation
            )
        if tracked.hashes is not None and tracked.fed < tracked.request.num_tokens:
            tokens = tracked.request.all_token_ids[tracked.fed :]
            content = tracked.adapter.content if tracked.adapter is not None else ""
            has_more = bool(content or tracked.request.mm_features)
            extras = chunk_extras(tracked.request, self.names.served.chunk_tokens, content) if has_more else None
            tracked.hashes.extend(tokens, extras)
            tracked.fed += len(tokens)
        return tracked.hashes

    def _plan_store(
        self, tracked: _Tracked, scheduled: int, tables: Callable[[str], GroupBlocks | None], handed: Iterable[Handover]
    ) -> Iterable[TransferOp]:
        assert self.names.served is not None
        request, chunk = tracked.request, self.names.served.chunk_tokens
        # Drafted tokens may be rejected: only known tokens count.
        end = min(request.num_computed_tokens + scheduled, request.num_tokens) // chunk * chunk
        # A load of another connector within this step may fail: the next step shows it.
        is_foreign, tracked.own_end = request.num_computed_tokens > tracked.own_end, sys.maxsize
        # So may another worker's part of a load within this step, which spoils what all of them compute.
        is_open = tracked.is_within and tracked.loading > 0 and self._workers > 1
        if end <= tracked.stored or is_foreign or is_open:
            return
        hashes, table = self._hashed(tracked), tables(request.request_id)
        if hashes is None or table is None:
            return
        states = complete_states(self._groups, handed)
        # A store has room for one state, after its last token.
        inner = sorted(tokens for tokens in states if tracked.stored < tokens < end and not tokens % chunk)
        for each in (*inner, end):
            yield from self._store_up_to(each, tracked, hashes, table, states.get(each, {}))

    def _store_up_to(
        self, end: int, tracked: _Tracked, hashes: RequestHashes, table: GroupBlocks, states: Mapping[int, int]
    ) -> Iterable[TransferOp]:
        start = tracked.stored
        block_ids = storable(self._groups, blocks_between(self._groups, table, start, end), end - start, states)
        tracked.stored = end
        if block_ids is None:
            self.tally.count("unstorable_chunks")
            return
        number, self._next_store = self._next_store, self._next_store + 1
        op = replace(self._op(tracked, hashes, start, end, block_ids), number=number)
        # What the server tells is not announced twice.
        event = self.events.of(tracked.request, tracked.wish, start, end) if op.content is None else None
        self._unfinished[number] = _Unfinished({block for ids in block_ids for block in ids}, self._workers, 0, event)
        yield op

    def _op(self, tracked: _Tracked, hashes: RequestHashes, start: int, end: int, block_ids: GroupBlocks) -> TransferOp:
        return TransferOp(
            tracked.request.request_id,
            start,
            end,
            hashes.digests(end),
            hashes.cache_salt,
            block_ids,
            hashes.trace,
            tracked.adapter,
            self._content(tracked, hashes, start, end),
            tracked.wish.retain,
            tracked.wish.conversation,
        )

    def _content(self, tracked: _Tracked, hashes: RequestHashes, start: int, end: int) -> ChunkContent | None:
        """The content of tokens `[start, end)`, None unless the server tells routers of them."""
        if not self._service.tells(hashes.cache_salt):
            return None
        return content_of(
            tracked.request,
            tracked.wish,
            start,
            end,
            chunk_tokens=hashes.chunk_tokens,
            block_size=self._event_block_size,
            adapter=tracked.adapter.content if tracked.adapter is not None else "",
        )

    def _no_hit(self, tracked: _Tracked, reason: str) -> tuple[int, bool]:
        tracked.search.give_up()
        tracked.miss = reason
        return 0, False


def _behind(groups: Sequence[GroupFacts], table: GroupBlocks, tokens: int) -> Iterable[int]:
    """The blocks behind the first `tokens`."""
    return [block for group, ids in zip(groups, table, strict=True) for block in ids[tokens // group.block_size :]]
