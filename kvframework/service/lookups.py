"""LOOKUP, QUERY_PREFETCH_STATUS, FREE_LOOKUP_LOCKS, END_SESSION and CANCEL of a load.

Handlers run on the serving thread and never wait for L2; an answer that a client wants held back follows by a future.
The storage owns the tickets, their pins and their loads."""

from __future__ import annotations

import contextlib
import itertools
import math
from collections import Counter, deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

from kvframework.api.futures import Future, Promise
from kvframework.api.keys import DIGEST_BYTES, sampled_parent
from kvframework.api.requests import ClientInfo, Handler, Message, PrefetchTask
from kvframework.errors import LeaseUnknown, NamespaceMismatch
from kvframework.messaging.polling import Deadlines
from kvframework.pricing import MOST_LOADS
from kvframework.service.engine_driven import Grants
from kvframework.service.key_sets import key_set
from kvframework.service.keys import KeyGrid, KeyResolver, check_key, found_part, prompt_part
from kvframework.service.miss_reasons import MissFacts
from kvframework.service.pricing import Pricing
from kvframework.service.recent_requests import Recording
from kvframework.service.records import PendingLookup, RequestLog
from kvframework.service.usage_counts import LastHour, Use
from kvframework.storage.manager import StorageManager
from kvframework.storage.namespaces import NamespaceRecord
from kvframework.storage.tickets import Answer, LookupTickets, Wanted
from kvframework.wire import messages as m
from kvframework.wire.protocol import REQUESTS

# Waits for one ticket: each is looked at whenever the ticket changes.
MOST_OF_TICKET = 16


class Wait(NamedTuple):
    """One client that waits until `until`, of the clock, for an answer about `ticket`: for the one that `opens` it,
    once the tiers have said what they have, since it does not know the ticket before; or for the end of the load, or
    earlier for a hit of `more_than` tokens, unless that is negative."""

    promise: Promise[Message]
    owner: int
    ticket: str
    until: float
    opens: bool = False
    more_than: int = -1

    @property
    def for_end(self) -> bool:
        return not self.opens and self.more_than < 0

    def enough(self, answer: Answer) -> bool:
        return answer.decided if self.opens else not answer.pending or 0 <= self.more_than < answer.hit_tokens


class LookupWaits:
    """Clients that wait for an answer, instead of asking again and again, by ticket. They are held on the serving
    thread; storage threads say which ticket has changed. `wake`, called from any thread, makes the serving thread call
    `due` soon. With `closing`, set from any thread, the server stops, and every wait ends."""

    def __init__(self) -> None:
        self.closing = False
        self.wake: Callable[[], None] = lambda: None
        self._numbers = itertools.count()
        self._waits: dict[int, Wait] = {}
        self._of_ticket: dict[str, set[int]] = {}
        self._times: Deadlines[int] = Deadlines()
        self._changed: deque[str] = deque()

    def __len__(self) -> int:
        return len(self._waits)

    def has_room(self, ticket: str) -> bool:
        return len(self._of_ticket.get(ticket, ())) < MOST_OF_TICKET

    def add(self, wait: Wait) -> None:
        """Add a wait, while nothing can change its ticket."""
        number = next(self._numbers)
        self._waits[number] = wait
        self._of_ticket.setdefault(wait.ticket, set()).add(number)
        self._times.set(number, wait.until)
        # Also if it is cancelled.
        wait.promise.add_done_callback(lambda _answered: self.changed(wait.ticket))

    def grown(self, ticket: str) -> None:
        """More of what a ticket waits for is there: no news to those who wait for the end. From any thread."""
        # A copy in one step: the serving thread may end one meanwhile.
        waits = [self._waits.get(number) for number in list(self._of_ticket.get(ticket, ()))]
        if any(wait is not None and not wait.for_end for wait in waits):
            self.changed(ticket)

    def changed(self, ticket: str) -> None:
        """A ticket's answer may be another now, or the ticket has ended. From any thread."""
        if ticket in self._of_ticket:
            self._changed.append(ticket)
            self.wake()

    def next_at(self) -> float:
        """Return the time of the next wait that is due, of the clock."""
        if self._changed or (self.closing and self._waits):
            return -math.inf
        return self._times.next() or math.inf

    def due(self, now: float) -> list[tuple[int, Wait]]:
        """Return the waits to look at, by number: their tickets have changed, or their time has come."""
        if self.closing:
            self._changed.clear()
            return list(self._waits.items())
        tickets = {self._changed.popleft() for _ in range(len(self._changed))}
        changed = {number for ticket in tickets for number in self._of_ticket.get(ticket, ())}
        return [(number, self._waits[number]) for number in sorted(changed.union(self._times.due(now)))]

    def end(self, number: int) -> None:
        wait = self._waits.pop(number)
        self._times.discard(number)
        of_ticket = self._of_ticket[wait.ticket]
        of_ticket.discard(number)
        if not of_ticket:
            del self._of_ticket[wait.ticket]


class Lookups:
    """The handlers of lookups. `ticket_s` is the lifetime of a ticket that is not freed, in seconds; `requests`
    receives the record of each lookup; `price`: what is dear to load is computed, see `Pricing`. `trace_memory` is the
    most memory of a recorded trace, in bytes."""

    def __init__(
        self,
        storage: StorageManager,
        resolver: KeyResolver,
        requests: RequestLog,
        grants: Grants,
        *,
        ticket_s: float,
        price: bool = False,
        trace_memory: int = 0,
    ) -> None:
        self._storage = storage
        self._resolver = resolver
        self._clock = storage.clock
        self.waits = LookupWaits()
        self.tickets = LookupTickets(
            storage,
            ticket_s=ticket_s,
            on_end=self._ticket_ended,
            on_change=self.waits.changed,
            on_growth=self.waits.grown,
        )
        # Changed by the serving thread only, like all counters here.
        self._counters = Counter(lookups=0, asked_tokens=0)
        self._requests = requests
        self._grants = grants
        self.pricing = Pricing(storage, on=price)
        self.use = Use(storage, requests)
        self._hour = LastHour(self._clock)
        self.recording = Recording(self._clock, trace_memory)
        self.miss_facts = MissFacts(storage)
        # Lookups whose answers were all pending so far, by ticket.
        self._waiting: dict[str, PendingLookup] = {}

    def status(self) -> dict[str, Any]:
        """Return the counters. `asked_tokens` and `hit_tokens` of the lookups that have ended give the hit rate."""
        found = self.use.lookups()
        totals = self._totals()
        return {**totals, **found, "last_hour": self._hour.status(totals)}

    def _totals(self) -> dict[str, float]:
        return {**self._counters, "hit_tokens": self.use.hit_tokens, "prefill_saved_s": self.use.saved_s}

    def end_session(self, session_id: int) -> None:
        """Forget a session that has ended, once its tickets have."""
        self.use.end_session(session_id)
        self.miss_facts.end_session(session_id)
        self.pricing.end_session(session_id)
        self.recording.end_session(session_id)

    def handlers(self) -> list[Handler]:  # type: ignore[type-arg]
        return [
            Handler(REQUESTS["LOOKUP"], self._lookup),
            Handler(REQUESTS["LOOKUP_KEYS"], self._lookup),
            Handler(REQUESTS["QUERY_PREFETCH_STATUS"], self._query),
            Handler(REQUESTS["FREE_LOOKUP_LOCKS"], self._free),
            Handler(REQUESTS["END_SESSION"], self._end_session),
            Handler(REQUESTS["CANCEL"], self._cancel),
        ]

    def answer_waits(self) -> None:
        """Answer the clients that wait, as far as there is more to say or their time has come. Serving thread."""
        now = self._clock()
        for number, wait in self.waits.due(now):
            if wait.promise.query():  # cancelled: the client of a LOOKUP does not know its ticket
                self.waits.end(number)
                if wait.opens:
                    with contextlib.suppress(LeaseUnknown):
                        self.tickets.free(wait.ticket, wait.owner)
                continue
            goes_on = not self.waits.closing and now < wait.until
            if wait.for_end and goes_on and self.tickets.is_loading(wait.ticket, wait.owner):
                continue  # what has arrived is not pinned again for each batch
            try:
                answer, asked = self._asked_again(wait.ticket, wait.owner)
            except LeaseUnknown:
                answer, asked = Answer(0, "", False), None
            if not goes_on or wait.enough(answer):
                self.waits.end(number)
                wait.promise.set_result(self._reply(answer, asked))

    def _lookup(self, client: ClientInfo, payload: m.Lookup, _buffers: object) -> m.LookupReply | Future[Message]:
        key, groups = payload.key, payload.groups if isinstance(payload, m.LookupKeys) else ()
        if payload.free:
            self.free(client, payload.free)
        check_key(key)
        now = self._clock()
        if not payload.ahead:
            self._hour.lookup(now, self._totals)
            self._counters["lookups"] += 1
            self._counters["asked_tokens"] += key.end - key.start
        record = self._storage.records.get(key.namespace)
        rate = self._requests.tenants.rate(key.cache_salt)
        asked = PendingLookup(client, key, now, payload.speed, payload.grant, groups, rate=rate, ahead=payload.ahead)
        if payload.speed is not None:
            self.pricing.asked(client, key.model_name, payload.speed)
        owner, request_id = client.session_id, key.request_id
        with self._storage.table.lock:  # whatever changes the ticket afterwards finds its wait
            if record is None:
                answer = self.tickets.look_up_record(
                    owner, request_id, key.namespace, lambda found: self._wanted(asked, found)
                )
            else:
                answer = self.tickets.look_up(owner, request_id, self._wanted(asked, record))
            held = self._hold(answer, owner, payload.wait_s, opens=True)
        if payload.ahead:
            return held or self._reply(answer, None)
        asked.l1_tokens = answer.hit_tokens
        self.recording.count += 1
        if self.recording.on:
            tenant = self._requests.tenants.number(key.cache_salt)
            asked.traced = self.recording.add(key, asked.grid, asked.began, tenant)
        if answer.pending:
            self._waiting[answer.ticket] = asked
        else:
            self._ended(asked, answer.hit_tokens)
        return held or self._reply(answer, asked)

    def _query(self, client: ClientInfo, payload: m.PrefetchQuery, _buffers: object) -> m.LookupReply | Future[Message]:
        owner = client.session_id
        with self._storage.table.lock:
            answer, asked = self._asked_again(payload.ticket, owner)
            held = self._hold(answer, owner, payload.wait_s, more_than=payload.more_than)
        return held or self._reply(answer, asked)

    def _asked_again(self, ticket: str, owner: int) -> tuple[Answer, PendingLookup | None]:
        """Return the state of a ticket, and its lookup if that ends with this answer."""
        answer = self.tickets.ask_again(ticket, owner)
        asked = None if answer.pending else self._waiting.pop(ticket, None)
        if asked is not None:
            self._ended(asked, answer.hit_tokens)
        return answer, asked

    def _reply(self, answer: Answer, asked: PendingLookup | None) -> m.LookupReply:
        """Return the answer; the last one of a lookup has the grants that it asked for."""
        if asked is None or not asked.grant or answer.pending or not answer.hit_tokens or not asked.client.local:
            return m.LookupReply(answer.hit_tokens, answer.ticket, answer.pending)
        grid, lease_s = asked.grid, self.tickets.ticket_s
        assert grid is not None
        with self._storage.table.lock:
            objects = self.tickets.pinned(answer.ticket, asked.client.session_id)
            hit = answer.hit_tokens // grid.desc.chunk_tokens
            if not objects:
                return m.LookupReply(answer.hit_tokens, answer.ticket)  # they have lapsed
            grants = self._grants.grant(asked.client, asked.key, grid, hit, objects, asked.grant, lease_s=lease_s)
        return m.LookupReply(answer.hit_tokens, answer.ticket, False, grants, lease_s)

    def _hold(
        self, answer: Answer, owner: int, wait_s: float, *, opens: bool = False, more_than: int = -1
    ) -> Future[Message] | None:
        """Return a future of a later answer, within `wait_s`; None if this one is enough. Under the storage lock."""
        if not wait_s or not answer.pending:
            return None
        wait = Wait(Promise(), owner, answer.ticket, self._clock() + wait_s, opens, more_than)
        if wait.enough(answer) or not self.waits.has_room(answer.ticket):
            return None
        self.waits.add(wait)
        return wait.promise

    def free(self, client: ClientInfo, tickets: Sequence[str]) -> None:
        """End those of `tickets`, and of unused grants among them, that have not ended."""
        for ticket in tickets:
            if not self._grants.give_back(client, ticket):
                with contextlib.suppress(LeaseUnknown):
                    self.tickets.free(ticket, client.session_id)

    def _free(self, client: ClientInfo, payload: m.TicketRef, _buffers: object) -> m.Freed:
        return m.Freed(self.tickets.free(payload.ticket, client.session_id))

    def _cancel(self, client: ClientInfo, payload: m.Cancel, _buffers: object) -> m.CancelReply:
        try:
            self.tickets.free(payload.ticket, client.session_id)
        except LeaseUnknown:
            return m.CancelReply(False)
        return m.CancelReply(True)

    def _end_session(self, client: ClientInfo, payload: m.EndSession, _buffers: object) -> m.SessionEnded:
        request_id = payload.request_id or None
        tickets = self.tickets.cancel(client.session_id, request_id)
        return m.SessionEnded(self._storage.table.cancel(client.session_id, request_id), tickets)

    def _wanted(self, asked: PendingLookup, record: NamespaceRecord) -> Wanted:
        """Return the objects of a LOOKUP. Raises `NamespaceMismatch` unless the key names what was registered."""
        key = asked.key
        if (key.model_name, key.world_size) != (record.model_name, record.world_size):
            raise NamespaceMismatch(
                f"the key has model {key.model_name!r} and world size {key.world_size}",
                where="key",
                available=f"model {record.model_name!r}, world size {record.world_size} in this namespace",
            )
        if asked.groups:
            grid: KeyGrid = key_set(self._resolver, key, record.desc, asked.groups)
        else:
            grid = self._resolver.resolve(key, record.desc)
        asked.grid = grid

        def load(on_done: Callable[[], None], on_change: Callable[[], None]) -> PrefetchTask | None:
            # Without windows the first object that lacks ends every longer hit.
            if asked.missing and not grid.has_windows and self._storage.tiers.lacked(asked.missing[1]):
                return None
            if asked.rate is not None:
                if asked.most is None and asked.rate.loads >= MOST_LOADS:  # those of other tenants must not be refused
                    asked.most = 0
                if asked.most is not None:
                    return None
                asked.rate.loads += 1
            asked.task = self._storage.tiers.submit_prefetch_task(
                grid.flat,
                grid.desc,
                select=lambda available: grid.needed(
                    grid.hit(available, asked.most if asked.priced is None else asked.priced.chunks)
                ),
                on_done=partial(self._loaded, asked, on_done),
                on_change=on_change,
                located=None if asked.speed is None and asked.rate is None else partial(self.pricing.located, asked),
                prompt=prompt_part(key, grid, range(len(grid.flat))),
                client=asked.client.session_id,
                ahead=asked.ahead,
            )
            if asked.task is None:
                self._loaded(asked)
            return asked.task

        tokens, prompt = grid.desc.chunk_tokens, partial(found_part, key, grid)
        return Wanted(grid.main_prefix, grid.digests, tokens, asked.find, load, prompt, asked.ahead)

    def _loaded(self, asked: PendingLookup, on_done: Callable[[], None] = lambda: None) -> None:
        if asked.rate is not None:
            with self._storage.table.lock:
                asked.rate.loads -= 1
        on_done()

    def _ticket_ended(self, ticket: str) -> None:
        """Account for a lookup whose ticket ended before its client had another answer than a pending one."""
        self.waits.changed(ticket)
        asked = self._waiting.pop(ticket, None)
        if asked is not None:
            self._ended(asked, asked.l1_tokens, unanswered=True)

    def _ended(self, asked: PendingLookup, hit_tokens: int, *, unanswered: bool = False) -> None:
        """Make the record of a lookup, with the reason of a miss. 2 us for a hit."""
        key, grid, priced = asked.key, asked.grid, asked.priced
        l1_tokens = min(asked.l1_tokens, hit_tokens)
        chunk_tokens = 0 if grid is None else grid.desc.chunk_tokens
        if priced is not None:
            self.pricing.ended(priced, chunk_tokens)
        if asked.traced:
            self.recording.decided(asked.traced, hit_tokens)
        why, missing = None, -1
        if hit_tokens < key.end - key.start:
            why = self.miss_facts.of_lookup(asked, unanswered=unanswered)
            missing = key.start + (asked.missing[0] * chunk_tokens if asked.missing else 0)
        self._requests.looked_up(
            asked,
            "hit" if missing < 0 else "partial" if hit_tokens else "miss",
            why,
            l1_tokens=l1_tokens,
            l2_tokens=hit_tokens - l1_tokens,
            missing=missing,
            chunk_tokens=chunk_tokens,
            # A copy: the load of a lookup that was given up goes on.
            tier_calls=tuple(asked.task.calls) if asked.task is not None and sampled_parent(key.trace) else (),
            load_s=0.0 if priced is None else priced.load_s,
            compute_s=0.0 if priced is None else priced.compute_s,
            saved_s=self.pricing.saved_s(asked, hit_tokens) if hit_tokens else 0.0,
            prefix=b"" if grid is None else key.namespace + (key.digests[:DIGEST_BYTES] or grid.digests[0]),
        )
