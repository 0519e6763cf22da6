"""What clients do: engine processes that store, look up and read, are stopped, wake up, and die. Each action returns
what it did, or None if it could not be done now."""

from __future__ import annotations

from functools import partial
from typing import Any

from kvframework.api.futures import Future
from kvframework.errors import LeaseUnknown
from kvframework.wire import messages as m
from tests.plan.simulation.model import Writing, must
from tests.plan.simulation.prompts import CHUNK, CHUNKS, CONTENT, NAMESPACE, RECORD, items_of, lookup_key
from tests.plan.simulation.world import TICKET_S, Client, World

LEASES_S = (0.5, 3.0, 30.0)


def _client(world: World) -> Client | None:
    client = world.dice.of(world.clients)
    return None if client.stopped else client


def _writer(world: World) -> tuple[Client, Writing] | None:
    client = world.copies if world.dice.chance(15) else _client(world)
    if client is None or not client.writings:
        return None
    return client, world.dice.of(client.writings)


def store(world: World) -> str | None:
    client = world.copies if world.dice.chance(10) else _client(world)
    if client is None or len(client.writings) >= 3:
        return None
    first = world.dice.pick(CHUNKS) if world.dice.chance(50) else 0
    items = items_of(world.prompt(), first, first + 1 + world.dice.pick(CHUNKS - first))
    world.manager.records.add(NAMESPACE, RECORD)
    lease_s = None if client is world.copies else world.dice.of(LEASES_S)
    request_id = f"r{world.dice.pick(3)}"
    result = world.manager.table.reserve(items, owner=client.owner, request_id=request_id, lease_s=lease_s)
    if result.lease is not None:
        client.writings.append(world.model.writings[result.lease.id])
    return f"client {client.owner} reserves {len(result.placed)} of {len(items)} objects for {lease_s} s"


def write(world: World) -> str | None:
    """Also what has expired meanwhile, without knowing it, and what was written already."""
    chosen = _writer(world)
    if chosen is None:
        return None
    client, writing = chosen
    key, offset, nbytes = item = world.dice.of(writing.unwritten or writing.items)
    world.memory.fill(offset, CONTENT[key])
    if item in writing.unwritten:
        writing.unwritten.remove(item)
    return f"client {client.owner} writes {nbytes} bytes at {offset} (lease {writing.id})"


def commit(world: World) -> str | None:
    chosen = _writer(world)
    if chosen is None:
        return None
    client, writing = chosen
    for key, offset, _ in writing.unwritten:
        world.memory.fill(offset, CONTENT[key])
    writing.unwritten = []
    client.writings.remove(writing)
    published = len(world.manager.table.commit(writing.id, owner=client.owner))
    world.counts["published"] += published
    world.counts["late"] += not published
    return f"client {client.owner} commits lease {writing.id}: {published} published"


def abort(world: World) -> str | None:
    chosen = _writer(world)
    if chosen is None:
        return None
    client, writing = chosen
    client.writings.remove(writing)
    world.manager.table.abort(writing.id, owner=client.owner)
    return f"client {client.owner} aborts lease {writing.id}"


def lookup(world: World) -> str | None:
    client = _client(world)
    if client is None or len(client.tickets) >= 4:
        return None
    prompt, end = world.prompt(), 1 + world.dice.pick(CHUNKS)
    client.requests += 1
    key = lookup_key(prompt, end, f"r{world.dice.pick(3)}")
    wait_s = world.dice.of([0.0, 0.0, 0.3, 1.0])
    reply = world.lookups._lookup(client.session, m.Lookup(key, wait_s), b"")
    told = partial(_answered, world, client, (key.request_id, world.now + TICKET_S, prompt))
    if isinstance(reply, Future):
        world.held.append((reply, world.now + wait_s))
        reply.add_done_callback(lambda later: None if later.exception() else told(later.result(0)))
        return f"client {client.owner} looks up {end} chunks of prompt {prompt}, and waits {wait_s} s"
    told(reply)
    return f"client {client.owner} looks up {end} chunks of prompt {prompt}: {reply.hit_tokens} tokens, {reply.pending}"


def _answered(world: World, client: Client, asked: tuple[str, float, int], reply: Any) -> None:
    _here(world, asked[1], asked[2], reply)
    if reply.ticket:
        client.tickets[reply.ticket] = asked


def _answered_again(world: World, client: Client, ticket: str, reply: Any) -> None:
    if ticket in client.tickets:
        _, lasts_until, prompt = client.tickets[ticket]
        _here(world, lasts_until, prompt, reply)
        if not reply.ticket:
            del client.tickets[ticket]


def _here(world: World, lasts_until: float, prompt: int, reply: Any) -> None:
    """The pins of a ticket lapse even if its load takes longer."""
    for object_key, _ in items_of(prompt, 0, reply.hit_tokens // CHUNK):
        must(world.now >= lasts_until or object_key in world.model.objects, "a hit is not here")
    world.counts["hits"] += reply.hit_tokens > 0


def query(world: World) -> str | None:
    client = _client(world)
    if client is None or not client.tickets:
        return None
    ticket = world.dice.of(list(client.tickets))
    _, lasts_until, _ = client.tickets[ticket]
    wait_s, more_than = world.dice.of([0.0, 0.0, 0.3, 1.0]), world.dice.of([-1, 0, CHUNK])
    try:
        reply = world.lookups._query(client.session, m.PrefetchQuery(ticket, wait_s, more_than), b"")
    except LeaseUnknown:
        must(world.now >= lasts_until, "a ticket ended before its time")
        del client.tickets[ticket]
        return f"client {client.owner} asks for a ticket that is over"
    if isinstance(reply, Future):
        world.held.append((reply, world.now + wait_s))
        again = partial(_answered_again, world, client, ticket)
        reply.add_done_callback(lambda later: None if later.exception() else again(later.result(0)))
        return f"client {client.owner} waits {wait_s} s for more than {more_than} tokens of a ticket"
    _answered_again(world, client, ticket, reply)
    return f"client {client.owner} asks for a ticket: {reply.hit_tokens} tokens, pending {reply.pending}"


def free(world: World) -> str | None:
    """FREE_LOOKUP_LOCKS or CANCEL."""
    client = _client(world)
    if client is None or not client.tickets:
        return None
    ticket = world.dice.of(list(client.tickets))
    del client.tickets[ticket]
    if world.dice.chance(50):
        world.lookups._cancel(client.session, m.Cancel(ticket=ticket), b"")
        return f"client {client.owner} cancels a ticket"
    try:
        world.lookups._free(client.session, m.TicketRef(ticket), b"")
    except LeaseUnknown:
        return f"client {client.owner} frees a ticket that is over"
    return f"client {client.owner} frees a ticket"


def give_up_waiting(world: World) -> str | None:
    """CANCEL of a request whose answer is held back. The ticket of a LOOKUP goes with it: nobody knows it."""
    open_ones = [held for held, _ in world.held if not held.query()]
    if not open_ones:
        return None
    world.dice.of(open_ones).cancel()
    return "a request that waits is cancelled"


def retrieve(world: World) -> str | None:
    client = _client(world)
    if client is None or len(client.reads) >= 3:
        return None
    keys = [key for key, _ in items_of(world.prompt(), 0, 1 + world.dice.pick(CHUNKS))]
    lease_s = world.dice.of(LEASES_S)
    lease = world.manager.table.pin(keys, owner=client.owner, request_id=f"r{world.dice.pick(3)}", lease_s=lease_s)
    if lease is None:
        return f"client {client.owner} would read {len(keys)} objects: a miss"
    world.counts["reads"] += 1
    client.reads.append(world.model.guards[lease.id])
    return f"client {client.owner} reads {len(keys)} objects for {lease_s} s (lease {lease.id})"


def finish_read(world: World) -> str | None:
    client = _client(world)
    if client is None or not client.reads:
        return None
    guard = client.reads.pop(world.dice.pick(len(client.reads)))
    if guard.id in world.model.guards and not guard.broken:
        for key in guard.keys:
            world.manager.table.check_bytes(key, *world.model.objects[key])
    try:
        world.manager.table.unpin(guard.id, owner=client.owner)
    except LeaseUnknown:
        must(guard.id not in world.model.guards, "a pin was forgotten before its time")
        return f"client {client.owner} has read under a pin that is over"
    world.counts["held"] += 1
    return f"client {client.owner} has read, and it held"


def end_session(world: World) -> str | None:
    client = _client(world)
    if client is None:
        return None
    request_id = world.dice.of(["", "r0", "r1", "r2"])
    world.lookups._end_session(client.session, m.EndSession(request_id), b"")
    client.tickets = {ticket: told for ticket, told in client.tickets.items() if request_id not in ("", told[0])}
    return f"client {client.owner} ends request {request_id!r}"


def die(world: World) -> str | None:
    number = world.dice.pick(len(world.clients))
    owner = world.clients[number].owner
    world.lookups.tickets.end_owner(owner)
    world.manager.table.end_owner(owner)
    must(not world.manager.table._leases.of(owner), "a dead client holds a lease")
    must(
        all(ticket.owner != owner for ticket in world.lookups.tickets._tickets.values()), "a dead client holds a ticket"
    )
    world.clients[number] = world.fresh_client()
    return f"client {owner} dies"


def stop(world: World) -> str | None:
    client = _client(world)
    if client is None:
        return None
    client.stopped = True
    return f"client {client.owner} is stopped"


def wake(world: World) -> str | None:
    stopped = [client for client in world.clients if client.stopped]
    if not stopped:
        return None
    client = world.dice.of(stopped)
    client.stopped = False
    return f"client {client.owner} wakes up"
