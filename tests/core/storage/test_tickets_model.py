"""The table of tickets against a model: hypothesis drives both, and books what is pinned and loaded for each ticket."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvframework.errors import LeaseUnknown
from kvframework.storage import tickets as tickets
from kvframework.storage.tickets import Ticket, TicketTable

TICKET_S = 2.0
MOST_LOADS = 3
owners = st.sampled_from([1, 2])
requests = st.sampled_from(["a", "b"])
picks = st.integers(0, 1 << 16)


@dataclass(eq=False)
class Held:
    """A ticket as its client sees it."""

    ticket: Ticket
    owner: int
    request_id: str
    deadline: float
    pins: str = ""
    loading: bool = False
    cancels: int = 0
    ended: bool = False


@dataclass
class Model:
    listed: list[Held] = field(default_factory=list)
    # Tickets with a load under way, also those that have ended.
    loading: list[Held] = field(default_factory=list)
    owners: set[int] = field(default_factory=set)
    # The pin leases that the table has taken over and not given back.
    leases: set[str] = field(default_factory=set)
    opened: int = 0


class TicketTableMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.before, tickets.MAX_LOADS = tickets.MAX_LOADS, MOST_LOADS
        self.table = TicketTable(TICKET_S)
        self.model = Model()
        self.now = 0.0

    def teardown(self) -> None:
        tickets.MAX_LOADS = self.before
        for held in list(self.model.listed):
            self.end(held)
        for held in list(self.model.loading):
            self.load_ends(held)
        assert not len(self.table)
        assert not self.model.leases, "a pin lease was lost"
        assert self.table.loads(1) == self.table.loads(2) == 0

    def pick(self, number: int) -> Held:
        return self.model.listed[number % len(self.model.listed)]

    def lease(self) -> str:
        self.model.opened += 1
        lease_id = f"lease-{self.model.opened}"
        self.model.leases.add(lease_id)
        return lease_id

    def give_back(self, held: Held, lease_id: str) -> None:
        assert lease_id == held.pins, "another ticket's pins, or the same ones twice"
        self.model.leases.discard(lease_id)
        held.pins = ""

    def pin(self, held: Held, *, hit: bool) -> None:
        lease_id = self.lease() if hit else ""
        before = self.table.pin(held.ticket, lease_id, objects=int(hit), hit_tokens=8 * hit, now=self.now)
        self.give_back(held, before)
        held.pins, held.deadline = lease_id, self.now + TICKET_S
        assert held.ticket.hit_tokens == 8 * hit

    def keep(self, held: Held) -> None:
        """The client gets an answer: what pins nothing and waits for nothing leaves the table."""
        self.table.keep(held.ticket)
        self.model.listed = [each for each in self.model.listed if each is not held]
        if held.pins or held.loading:
            self.model.listed.append(held)

    def end(self, held: Held) -> None:
        cancels = held.cancels
        self.give_back(held, self.table.end(held.ticket))
        assert held.cancels == cancels + held.loading, "a load under way is cancelled, no other"
        held.ended = True
        self.model.listed.remove(held)

    def load_ends(self, held: Held) -> None:
        self.table.load_ended(held.ticket, self.now)
        self.model.loading.remove(held)
        held.loading = False
        held.deadline = self.now + TICKET_S

    @rule(owner=owners, request_id=requests, hit=st.booleans(), loads=st.booleans())
    def look_up(self, owner: int, request_id: str, hit: bool, loads: bool) -> None:
        ticket = self.table.open(owner, request_id, self.now)
        held = Held(ticket, owner, request_id, self.now + TICKET_S)
        with pytest.raises(LeaseUnknown):
            self.table.get(ticket.id, owner)
        self.pin(held, hit=hit)
        may = sum(each.owner == owner for each in self.model.loading) < MOST_LOADS
        assert self.table.may_load(owner) is may
        if loads and may:

            def cancel() -> None:
                held.cancels += 1

            self.table.load_begun(ticket, cancel)
            held.loading = True
            self.model.loading.append(held)
        self.keep(held)

    @precondition(lambda self: self.model.loading)
    @rule(number=picks, hit=st.booleans())
    def a_load_ends(self, number: int, hit: bool) -> None:
        """What has ended meanwhile pins nothing more."""
        held = self.model.loading[number % len(self.model.loading)]
        self.load_ends(held)
        assert held.ticket.ended is held.ended
        if not held.ended:
            self.pin(held, hit=hit)

    @precondition(lambda self: self.model.listed)
    @rule(number=picks)
    def ask_again(self, number: int) -> None:
        held = self.pick(number)
        assert self.table.get(held.ticket.id, held.owner) is held.ticket
        assert held.ticket.pending is held.loading
        self.keep(held)

    @precondition(lambda self: self.model.listed)
    @rule(number=picks)
    def free(self, number: int) -> None:
        held = self.pick(number)
        self.end(held)
        with pytest.raises(LeaseUnknown):
            self.table.get(held.ticket.id, held.owner)

    @rule(owner=owners, request_id=st.one_of(st.none(), requests))
    def cancel(self, owner: int, request_id: str | None) -> None:
        ending = [h for h in self.model.listed if h.owner == owner and request_id in (None, h.request_id)]
        assert {id(t) for t in self.table.of(owner, request_id)} == {id(held.ticket) for held in ending}
        for held in ending:
            self.end(held)

    @rule(owner=owners, begins=st.booleans())
    def a_session_begins_or_ends(self, owner: int, begins: bool) -> None:
        if begins:
            self.table.begin_owner(owner)
            self.model.owners.add(owner)
        else:
            self.cancel(owner, None)
            self.table.end_owner(owner)
            self.model.owners.discard(owner)

    @rule()
    def a_stranger_asks(self) -> None:
        for ticket_id in ("", "gone", *(held.ticket.id for held in self.model.listed)):
            with pytest.raises(LeaseUnknown):
                self.table.get(ticket_id, 9)

    @rule(seconds=st.sampled_from([0.5, 1.0, 2.0]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds

    @rule()
    def expire(self) -> None:
        due = [held for held in self.model.listed if not held.loading and self.now >= held.deadline]
        assert {id(t) for t in self.table.due(self.now)} == {id(held.ticket) for held in due}
        for held in due:
            self.end(held)

    @invariant()
    def it_holds_what_the_model_holds(self) -> None:
        assert len(self.table) == len(self.model.listed)
        assert {id(ticket) for ticket in self.table} == {id(held.ticket) for held in self.model.listed}
        for held in self.model.listed:
            assert (held.ticket.pins, held.ticket.pending) == (held.pins, held.loading)
            assert held.ticket.deadline == held.deadline
        assert {held.pins for held in self.model.listed} - {""} == self.model.leases
        for owner in (1, 2):
            assert self.table.loads(owner) == sum(held.owner == owner for held in self.model.loading)
            assert self.table.is_owner(owner) is (owner in self.model.owners)


TestTicketTable = TicketTableMachine.TestCase
TestTicketTable.settings = settings(max_examples=100, stateful_step_count=50)
