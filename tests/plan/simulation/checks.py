"""The full check: everything that must be true between any two steps, taken from the code's own tables."""

from __future__ import annotations

from kvframework.storage.l1.entries import rounded
from kvframework.storage.l1.leases import INTERNAL_OWNER
from kvframework.storage.l2.tier_calls import HOLD_S
from tests.plan.simulation.model import must, total
from tests.plan.simulation.prompts import CHUNK, CHUNKS, SIZES
from tests.plan.simulation.world import World


def check(world: World) -> None:
    _arena(world)
    _objects(world)
    _leases(world)
    for ledger in world.ledgers:
        ledger.check()
    _waits(world)
    _absences(world)


def glance(world: World) -> None:
    table = world.manager.table
    must(table.used_bytes + table.allocator.free_bytes == table.allocator.limit, "bytes were lost or found")
    must(table.pins >= 0, "more was unpinned than pinned")


def check_deadlines(world: World) -> None:
    """After a tick nothing that was to end by then goes on."""
    book = world.manager.table._leases
    for write in book.writes.values():
        must(write.quarantined or world.now < write.deadline, "a write lease outlived its deadline")
    for pin in book.pins.values():
        must(not pin.held or world.now < pin.deadline, "a pin outlived its deadline")
    for ticket in world.lookups.tickets._tickets.values():
        must(ticket.pending or world.now < ticket.deadline, "a ticket outlived its deadline")
    for held, until in world.held:
        must(held.query() or world.now < until, "an answer was held back for too long")
    world.held = [each for each in world.held if not each[0].query()]


def check_at_rest(world: World) -> None:
    """Nobody claims anything any more."""
    check(world)
    for ledger in world.ledgers:
        ledger.check_at_rest()
    must(not world.lookups.waits and all(held.query() for held, _ in world.held), "an answer was never given")
    table = world.manager.table
    must(not table.pins and not table.pin_leases and not table.write_leases, "something is still held")
    must(not table.quarantined_bytes, "something is still in quarantine")
    must(all(count == 1 for count in world.manager.tiers.accepted.values()), "an on_done never ran")


def _arena(world: World) -> None:
    table, model = world.manager.table, world.model
    taken = sorted(model.ranges())
    must(table.used_bytes == total(taken), "the used bytes are not those of objects and leases")
    end = 0
    for offset, nbytes in taken:
        must(offset >= end, "two ranges overlap")
        end = offset + rounded(nbytes)
    free = sorted(table.allocator._length_at.items())
    must(sum(length for _, length in free) == table.allocator.free_bytes, "the free bytes are not those that are free")
    for offset, length in free:
        units = range(offset // 4096, (offset + length) // 4096)
        must(all(model.units[unit] is None for unit in units), "a range is free, and somebody has it")


def _objects(world: World) -> None:
    table, model = world.manager.table, world.model
    here = {stored.key: (stored.offset, stored.length) for stored in table._objects}
    must(here == model.objects, "other objects are here than were published and not evicted")
    must(world.policy.order.keys() == here.keys(), "the eviction policy knows other objects")
    for key, (offset, nbytes) in here.items():
        world.manager.table.check_bytes(key, offset, nbytes)


def _leases(world: World) -> None:
    table, model = world.manager.table, world.model
    book = table._leases
    owners = {client.owner for client in world.clients} | {INTERNAL_OWNER}
    must(set(book._of) <= owners, "somebody who is dead holds a lease")
    must(
        {ticket.owner for ticket in world.lookups.tickets._tickets.values()} <= owners,
        "somebody who is dead holds a ticket",
    )
    must(book.writes.keys() == model.writings.keys(), "other write leases are open than were given")
    known = {ticket.pins for ticket in world.lookups.tickets._tickets.values()}
    known |= {guard.id for client in world.clients for guard in client.reads}
    pins = {lease.id for lease in book.pins.values() if lease.owner != INTERNAL_OWNER}
    must(pins <= known, "a pin is left that nobody will end")
    held = [stored for lease in book.pins.values() for stored in lease.objects]
    held += [stored for stored, guards in table.holds.items() for _ in guards]
    held += [stored for lease in book.writes.values() for stored in lease.present]
    must(table.pins == len(held), "the number of pins is not that of what is pinned")
    must(sum(stored.pins for stored in table._objects) == len(held), "an object is pinned by nobody")
    quarantined = [item for lease in book.writes.values() if lease.quarantined for item in lease.items]
    must(table.quarantined_bytes == sum(rounded(item[2]) for item in quarantined), "the quarantine is miscounted")
    if not world.jobs and not world.manager.tiers._prefetcher.in_flight:
        internal = any(lease.owner == INTERNAL_OWNER for lease in book.pins.values())
        must(not internal and not any(table.holds.values()), "a job left a pin behind")
        copies = {writing.id for writing in world.copies.writings}
        own = {lease.id for lease in book.writes.values() if lease.owner == INTERNAL_OWNER}
        must(own == copies, "a job left a reservation behind")


def _waits(world: World) -> None:
    """Whoever waits, waits for a load that goes on."""
    world.serve()
    tickets = list(world.lookups.tickets._tickets.values())
    going_on = {ticket.id for ticket in tickets if ticket.pending}
    waited_for = world.lookups.waits._of_ticket.keys()
    must(waited_for <= {ticket.id for ticket in tickets}, "an answer is held back, and its ticket is over")
    if not world.manager.tiers._prefetcher.in_flight:  # else it may be about to tell its end
        must(waited_for <= going_on, "an answer is held back, and nothing is to come")

    known = {ticket for client in world.clients for ticket in client.tickets} | waited_for
    must({ticket.id for ticket in tickets} <= known, "there is a ticket that no client knows")
    lasting = {
        ticket
        for client in world.clients
        for ticket, (_, lasts_until, _) in client.tickets.items()
        if world.now < lasts_until
    }
    must(lasting <= {ticket.id for ticket in tickets}, "a ticket ended before its time")
    pins = world.manager.table._leases.pins
    for ticket in tickets:
        pinned = pins.get(ticket.pins)
        chunks = len(pinned.objects) // len(SIZES) if pinned is not None and pinned.held else CHUNKS
        must(ticket.hit_tokens <= chunks * CHUNK, "more is said to be a hit than is pinned")


def _absences(world: World) -> None:
    """Nothing that this server wrote is taken for absent, and what others wrote only for a moment."""
    for store, tier in zip(world.stores, world.tiers, strict=True):
        for key, seen_at in list(tier.from_others.items()):
            if seen_at is None and not world.jobs:
                tier.from_others[key] = world.now
            elif seen_at is not None and world.now >= seen_at + HOLD_S:
                del tier.from_others[key]
        if not any(call.name == "put" for call in store._pending.values()):
            here = [key for key in tier.values if key not in tier.from_others]
            must(not any(store.lacked(here)), "what is there is taken for absent")
