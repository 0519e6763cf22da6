"""Tickets against a model: hypothesis looks up, loads and ends over a real object table, and books what is pinned and
loaded for each ticket."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvframework.errors import LeaseUnknown
from kvframework.storage import tickets as tickets
from kvframework.storage.l1.entries import ALIGNMENT
from kvframework.storage.tickets import Answer, LookupTickets, Wanted
from tests.core.storage.memory import ClockedTable, OrderedLru, packed_key

TICKET_S, CHUNK, MOST_LOADS = 2.0, 8, 3
KEY = packed_key(0)
owners = st.sampled_from([1, 2])
requests = st.sampled_from(["a", "b"])
picks = st.integers(0, 1 << 16)


@dataclass(eq=False)
class Held:
    """A ticket as its client sees it. `end` and `change` are what its load calls; `hits`: whether it finds its object
    from now on."""

    owner: int
    request_id: str
    id: str = ""
    deadline: float = 0.0
    pinned: bool = False
    hits: bool = False
    loading: bool = False
    grown: bool = False
    cancels: int = 0
    end: Callable[[], None] = field(default=lambda: None)
    change: Callable[[], None] = field(default=lambda: None)


class TicketsMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.before, tickets.MAX_LOADS = tickets.MAX_LOADS, MOST_LOADS
        self.table = ClockedTable(OrderedLru(), nbytes=ALIGNMENT)
        cast("Any", self.table).looked_up = lambda *_: None
        lease = self.table.reserve([(KEY, 1)], owner=0).lease
        self.objects = self.table.commit(lease.id, owner=0)
        storage = SimpleNamespace(table=self.table, clock=self.table.clock, tiers=SimpleNamespace(stores=[object()]))
        self.ended: list[str] = []
        self.changed: list[str] = []
        self.tickets = LookupTickets(
            cast("Any", storage), ticket_s=TICKET_S, on_end=self.ended.append, on_change=self.changed.append
        )
        self.listed: list[Held] = []
        # Tickets with a load under way, also those that have ended.
        self.loads: list[Held] = []
        self.owners: set[int] = set()

    def teardown(self) -> None:
        tickets.MAX_LOADS = self.before
        for held in list(self.listed):
            self.tickets.free(held.id, held.owner)
        for held in list(self.loads):
            held.end()
        assert not len(self.tickets)
        assert not self.table.pins, "a pin was lost"
        assert not self.tickets._loading

    def pick(self, number: int) -> Held:
        return self.listed[number % len(self.listed)]

    def gone(self, ending: list[Held]) -> None:
        assert sorted(self.ended) == sorted(held.id for held in ending)
        self.ended.clear()
        for held in ending:
            assert held.cancels == held.loading, "a load under way is cancelled, no other"
            self.listed.remove(held)

    def answered(self, held: Held, answer: Answer) -> None:
        """What pins nothing and waits for nothing has no ticket."""
        assert (bool(answer.ticket), answer.pending) == (held.pinned or held.loading, held.loading)
        assert answer.hit_tokens == CHUNK * held.pinned
        self.listed = [each for each in self.listed if each is not held]
        if answer.ticket:
            held.id = answer.ticket
            self.listed.append(held)

    @rule(owner=owners, request_id=requests, hit=st.booleans(), loads=st.booleans())
    def look_up(self, owner: int, request_id: str, hit: bool, loads: bool) -> None:
        held = Held(owner, request_id, deadline=self.table.now + TICKET_S, pinned=hit, hits=hit)
        asked: list[bool] = []

        def cancel() -> None:
            held.cancels += 1

        def load(on_done: Callable[[], None], on_change: Callable[[], None]) -> Any:
            asked.append(True)
            if not loads:
                return None
            held.end, held.change, held.loading = on_done, on_change, True
            return SimpleNamespace(cancel=cancel)

        wanted = Wanted(
            KEY[:40], [KEY[40:], b""], CHUNK, lambda _: (1, list(self.objects)) if held.hits else (0, []), load
        )
        may = sum(each.owner == owner for each in self.loads) < MOST_LOADS
        self.answered(held, self.tickets.look_up(owner, request_id, wanted))
        assert bool(asked) is may
        if held.loading:
            self.loads.append(held)

    @precondition(lambda self: self.loads)
    @rule(number=picks)
    def a_load_brings_something(self, number: int) -> None:
        held = self.loads[number % len(self.loads)]
        held.hits = True
        held.change()
        held.grown = held in self.listed

    @precondition(lambda self: self.loads)
    @rule(number=picks, hit=st.booleans())
    def a_load_ends(self, number: int, hit: bool) -> None:
        """What has ended meanwhile pins nothing more."""
        held = self.loads.pop(number % len(self.loads))
        held.hits = hit
        held.end()
        held.change()
        assert self.changed.pop() == held.id
        held.loading = held.grown = False
        held.deadline = self.table.now + TICKET_S
        if held in self.listed:
            held.pinned = hit

    @precondition(lambda self: self.listed)
    @rule(number=picks)
    def ask_again(self, number: int) -> None:
        held = self.pick(number)
        if held.grown:
            held.pinned, held.grown = held.hits, False
            held.deadline = self.table.now + TICKET_S
        assert self.tickets.is_loading(held.id, held.owner) is held.loading
        self.answered(held, self.tickets.ask_again(held.id, held.owner))

    @precondition(lambda self: self.listed)
    @rule(number=picks)
    def free(self, number: int) -> None:
        held = self.pick(number)
        pins = held.pinned and bool(self.tickets.pinned(held.id, held.owner))
        assert self.tickets.free(held.id, held.owner) == pins
        self.gone([held])
        with pytest.raises(LeaseUnknown):
            self.tickets.ask_again(held.id, held.owner)

    @rule(owner=owners, request_id=st.one_of(st.none(), requests))
    def cancel(self, owner: int, request_id: str | None) -> None:
        ending = [h for h in self.listed if h.owner == owner and request_id in (None, h.request_id)]
        assert self.tickets.cancel(owner, request_id) == len(ending)
        self.gone(ending)

    @rule(owner=owners, begins=st.booleans())
    def a_session_begins_or_ends(self, owner: int, begins: bool) -> None:
        if begins:
            self.tickets.begin_owner(owner)
            self.owners.add(owner)
        else:
            ending = [held for held in self.listed if held.owner == owner]
            assert self.tickets.end_owner(owner) == len(ending)
            self.gone(ending)
            self.owners.discard(owner)

    @rule(owner=owners, request_id=requests)
    def a_plugin_pins(self, owner: int, request_id: str) -> None:
        ticket = self.tickets.pin(owner, [KEY], request_id)
        assert bool(ticket) is (owner in self.owners)
        if ticket:
            self.listed.append(Held(owner, request_id, ticket, self.table.now + TICKET_S, pinned=True))
            self.tickets.free(ticket, owner)
            self.gone([self.listed[-1]])

    @rule()
    def a_stranger_asks(self) -> None:
        for ticket_id in ("", "gone", *(held.id for held in self.listed)):
            with pytest.raises(LeaseUnknown):
                self.tickets.ask_again(ticket_id, 9)

    @rule(seconds=st.sampled_from([0.5, 1.0, 2.0]))
    def time_passes(self, seconds: float) -> None:
        self.table.now += seconds

    @rule()
    def expire(self) -> None:
        due = [held for held in self.listed if not held.loading and self.table.now >= held.deadline]
        self.tickets.expire()
        self.gone(due)

    @invariant()
    def it_holds_what_the_model_holds(self) -> None:
        assert self.tickets._tickets.keys() == {held.id for held in self.listed}
        for held in self.listed:
            assert self.tickets._tickets[held.id].deadline == held.deadline
        assert self.table.pin_leases == sum(held.pinned for held in self.listed)


TestTickets = TicketsMachine.TestCase
TestTickets.settings = settings(max_examples=100, stateful_step_count=50)
