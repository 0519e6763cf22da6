"""Bugs to plant, one at a time: each makes the code do what it must never do. The simulation has to find every one."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

from kvframework.api.tier import Outcome, PackedKey
from kvframework.service.lookups import Lookups, LookupWaits
from kvframework.storage import namespaces
from kvframework.storage.l1.entries import ALIGNMENT, ObjectRows, RangeAllocator, StoredObject
from kvframework.storage.l1.eviction import Tenants
from kvframework.storage.l1.leases import LeaseBook, PinLease, WriteLease
from kvframework.storage.l1.objects import ObjectTable
from kvframework.storage.l2.loading import Loader, LoadSteps, LoadTask
from kvframework.storage.l2.prefetch import Prefetcher, TierLoads
from kvframework.storage.l2.sealed_tier import L2Store
from kvframework.storage.l2.tier_calls import Absences, Breaker
from kvframework.storage.l2.writer import Batch, WriteQueue
from kvframework.storage.table import Table
from kvframework.storage.tickets import LookupTickets, Ticket

Plant = Callable[[], Any]
PLANTED: dict[str, Plant] = {}


def plant(owner: object, name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Registers a function that takes the place of `owner.name`, under its own name. It is called with the original
    first."""

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        original = getattr(owner, name)

        def replaced(*arguments: Any, **named: Any) -> Any:
            return function(original, *arguments, **named)

        PLANTED[function.__name__] = lambda: mock.patch.object(owner, name, replaced)
        return function

    return register


@plant(ObjectTable, "commit")
def an_expired_lease_is_published(original: Any, table: ObjectTable, lease_id: str, *, owner: int) -> Any:
    with mock.patch.object(table, "clock", return_value=0.0):
        return original(table, lease_id, owner=owner)


@plant(ObjectTable, "_quarantine")
def a_quarantined_range_is_freed(original: Any, table: ObjectTable, lease: WriteLease) -> None:
    original(table, lease)
    for _, offset, nbytes in lease.items:
        table._free(offset, nbytes, lease.tenant)
        table.quarantined_bytes -= -(-nbytes // ALIGNMENT) * ALIGNMENT
    lease.items = []


@plant(ObjectTable, "expire")
def time_ends_nothing(_original: Any, _table: ObjectTable) -> None:
    return


@plant(ObjectTable, "cancel")
def a_session_that_ends_may_still_publish(
    _original: Any, table: ObjectTable, owner: int, request_id: str | None = None
) -> int:
    pins = [lease for lease in table._leases.of(owner, request_id) if isinstance(lease, PinLease)]
    for lease in pins:
        table._drop_pin_lease(lease)
    return len(pins)


@plant(LeaseBook, "of")
def the_pins_of_the_dead_stay(original: Any, book: LeaseBook, owner: int, request_id: str | None = None) -> Any:
    return [lease for lease in original(book, owner, request_id) if isinstance(lease, WriteLease)]


@plant(LookupTickets, "cancel")
def the_tickets_of_the_dead_stay(_original: Any, *_arguments: Any) -> int:
    return 0


@plant(LookupTickets, "_loaded")
def a_ticket_that_ended_pins_again(original: Any, tickets: LookupTickets, ticket: Ticket, wanted: Any) -> None:
    ticket.ended = False
    original(tickets, ticket, wanted)


@plant(LookupTickets, "_load_ended")
def a_ticket_without_a_hit_ends_before_it_is_asked(original: Any, tickets: LookupTickets, ticket: Ticket) -> None:
    original(tickets, ticket)
    ticket.deadline = 0.0


@plant(ObjectTable, "candidates")
def pinned_objects_are_candidates(_original: Any, table: ObjectTable, used_bytes: int) -> list[PackedKey]:
    for stored in table._objects:
        stored.pins = 0
    return list(table.tenants.policies[0].victims())[:2] if table.used_bytes > used_bytes else []


@plant(ObjectTable, "_drop_pin_lease")
def a_pin_is_taken_back_twice(original: Any, table: ObjectTable, lease: PinLease) -> None:
    table._unpin(lease.objects, lease.payer)
    original(table, lease)


@plant(ObjectTable, "_lapse")
def a_lapsed_pin_is_said_to_hold(_original: Any, table: ObjectTable, lease: PinLease) -> None:
    table._unpin(lease.objects, lease.payer)
    lease.deadline = math.inf
    lease.objects = []


@plant(ObjectTable, "hold")
def what_is_sent_is_not_pinned(original: Any, table: ObjectTable, keys: Sequence[PackedKey]) -> list[StoredObject]:
    held: list[StoredObject] = original(table, keys)
    for stored in held:
        stored.pins -= 1
        stored.holds -= 1
    return held


@plant(ObjectTable, "let_go")
def what_was_sent_keeps_its_pin(_original: Any, table: ObjectTable, objects: Sequence[StoredObject]) -> None:
    table.pins -= len(objects)


@plant(ObjectTable, "drop_unused")
def clear_drops_what_is_in_use(original: Any, table: ObjectTable, objects: Sequence[StoredObject]) -> Any:
    for stored in objects:
        stored.pins = 0
    return original(table, objects)


@plant(Tenants, "evictable")
def room_is_made_of_what_is_pinned(_original: Any, _tenants: Tenants, _tenant: int, objects: ObjectRows) -> Any:
    return iter(sorted(objects, key=lambda stored: -stored.pins))


@plant(RangeAllocator, "free")
def more_is_freed_than_was_taken(original: Any, allocator: RangeAllocator, offset: int, nbytes: int) -> None:
    longer = nbytes + ALIGNMENT if nbytes > ALIGNMENT and offset + nbytes + ALIGNMENT < allocator.limit else nbytes
    original(allocator, offset, longer)


@plant(Loader, "load")
def a_cancelled_load_forgets_its_end(original: Any, loader: Loader, task: LoadTask, on_done: Any) -> Any:
    return original(loader, task, lambda: None if task.cancelled else on_done())


@plant(Loader, "load")
def a_load_ends_twice(original: Any, loader: Loader, task: LoadTask, on_done: Any) -> LoadSteps[None]:
    yield from original(loader, task, on_done)
    on_done()


@plant(Prefetcher, "writers_ended")
def the_end_of_a_writer_wakes_nothing(_original: Any, prefetcher: Prefetcher, _any_writing: Any) -> None:
    """And its time does not either."""
    for queue in prefetcher.queues:
        for load in queue.waiting:
            load.waits_until = math.inf


@plant(Prefetcher, "_ended")
def the_last_batch_wakes_nothing(original: Any, prefetcher: Prefetcher, *arguments: Any) -> None:
    original(prefetcher, *arguments)


@plant(LookupWaits, "changed")
def a_change_wakes_no_client(_original: Any, _waits: LookupWaits, _ticket: str) -> None:
    pass


@plant(LookupWaits, "next_at")
def the_time_of_a_wait_is_forgotten(original: Any, waits: LookupWaits) -> float:
    at: float = original(waits)
    return at if at == -math.inf else math.inf


@plant(Absences, "written")
def what_is_written_stays_absent(_original: Any, _absences: Absences, _keys: Sequence[PackedKey]) -> None:
    pass


@plant(Absences, "answered")
def an_answer_from_before_a_write_is_believed(
    original: Any, absences: Absences, missing: Any, _writes: int, now: float
) -> None:
    original(absences, missing, absences.writes, now)


@plant(Absences, "answered")
def what_another_node_writes_stays_absent(original: Any, absences: Absences, *rest: Any) -> None:
    absences._hold_s = math.inf
    original(absences, *rest)


@plant(Lookups, "_ticket_ended")
def a_wait_outlives_its_ticket(original: Any, lookups: Lookups, ticket: str) -> None:
    with mock.patch.object(lookups.waits, "changed"):
        original(lookups, ticket)


@plant(Lookups, "answer_waits")
def a_lookup_that_nobody_waits_for_keeps_its_ticket(original: Any, lookups: Lookups) -> None:
    with mock.patch.object(lookups.tickets, "free"):
        original(lookups)


@plant(LookupTickets, "_pin")
def a_hit_that_grows_is_not_pinned(
    original: Any, tickets: LookupTickets, ticket: Ticket, wanted: Any, *, use: bool = True
) -> int:
    if use:
        return int(original(tickets, ticket, wanted))
    chunks, _ = wanted.find(tickets.storage.table.row)
    ticket.hit_tokens = chunks * wanted.chunk_tokens
    return int(chunks)


@plant(TierLoads, "add")
def a_load_between_two_tiers_is_lost(original: Any, queue: TierLoads, load: Any, *, first: bool = False) -> None:
    queues = queue._prefetcher.queues
    if queue is not queues[-1] or queue is queues[0] or load.whole is not None or first:
        original(queue, load, first=first)


@plant(TierLoads, "wake")
def a_load_that_waited_goes_on_twice(original: Any, queue: TierLoads, due: Any) -> None:
    before = list(queue.waiting)
    original(queue, due)
    queue.waiting = before


@plant(Loader, "_fetch")
def a_load_that_fails_keeps_its_place(original: Any, loader: Loader, *arguments: Any) -> Any:
    finish = loader.l1.finish_load
    loader.l1.finish_load = lambda lease, good: finish(lease, good) if good else None  # type: ignore[method-assign]
    try:
        return original(loader, *arguments)
    finally:
        loader.l1.finish_load = finish  # type: ignore[method-assign]


@plant(Table, "finish_load")
def what_was_not_received_is_published(original: Any, table: Table, lease_id: str, good: bool) -> Any:
    return original(table, lease_id, True)


@plant(namespaces, "_checksum")
def damage_is_not_noticed(_original: Any, *_parts: Any) -> int:
    return 0


@plant(L2Store, "_open")
def a_failure_is_taken_for_damage(
    original: Any, store: L2Store, key: Any, header: Any, place: Any, outcome: Any
) -> Any:
    return original(store, key, header, place, Outcome.DAMAGED if outcome is Outcome.FAILED else outcome)


@plant(WriteQueue, "put_back")
def a_batch_that_failed_is_forgotten(_original: Any, queue: WriteQueue, batch: Batch) -> None:
    for key in queue._unsettled(batch):
        del queue._sending[key]


@plant(WriteQueue, "found")
def what_was_lost_is_not_counted(original: Any, queue: WriteQueue, batch: Batch, keys: Sequence[PackedKey]) -> Any:
    for key in set(queue._unsettled(batch)).difference(keys):
        del queue._sending[key]
    return original(queue, batch, keys)


@plant(WriteQueue, "take")
def two_writers_take_the_same(original: Any, queue: WriteQueue, now: float) -> Batch:
    batch: Batch = original(queue, now)
    queue._waiting.update(dict.fromkeys(batch))
    return batch


@plant(WriteQueue, "put_back")
def a_writer_puts_back_what_another_sends(original: Any, queue: WriteQueue, batch: Batch) -> None:
    original(queue, batch)
    for other in {id(each): each for each in queue._sending.values()}.values():
        original(queue, other)


@plant(WriteQueue, "removed")
def what_is_lost_while_it_is_taken_counts_twice(original: Any, queue: WriteQueue, key: PackedKey) -> None:
    sending = dict(queue._sending)
    original(queue, key)
    queue._sending = sending


@plant(WriteQueue, "failed")
def what_fails_is_not_tried_again(_original: Any, queue: WriteQueue, keys: Sequence[PackedKey]) -> bool:
    for key in keys:
        queue._sending.pop(key, None)
    return False


@plant(Breaker, "allow")
def a_half_open_circuit_lets_two_calls_through(original: Any, breaker: Breaker, now: float) -> Any:
    breaker._probing = False
    return original(breaker, now)


@plant(Breaker, "succeeded")
def a_call_of_long_ago_closes_the_circuit(original: Any, breaker: Breaker, _call: int, now: float) -> None:
    original(breaker, breaker._openings, now)


@plant(Breaker, "failed")
def a_circuit_opens_one_failure_late(original: Any, breaker: Breaker, call: int, now: float) -> None:
    if breaker._failures == breaker._threshold - 1 and breaker.state == "closed":
        breaker._failures = breaker._threshold * 2
        return
    original(breaker, call, now)


@plant(Breaker, "succeeded")
def a_circuit_never_closes(original: Any, breaker: Breaker, call: int, now: float) -> None:
    if breaker.state == "closed":
        original(breaker, call, now)
    else:
        breaker._probing = False
