"""All that can happen: what clients do, what time does, and what becomes of the tiers and the server. Each action
returns what it did, or None if it could not be done now."""

from __future__ import annotations

from collections.abc import Callable

from kvframework.errors import TierError
from tests.plan.simulation import clients
from tests.plan.simulation.checks import check_at_rest, check_deadlines
from tests.plan.simulation.model import Broken, must
from tests.plan.simulation.tier import MODES
from tests.plan.simulation.world import UNITS, World

Action = Callable[[World], "str | None"]


def tick(world: World) -> str | None:
    world.now += 0.1
    world.tick()
    check_deadlines(world)
    return "tick"


def time_passes(world: World) -> str | None:
    seconds = world.dice.of([0.02, 0.2, 0.6, 1.5, 5.0])
    world.now += seconds
    return f"{seconds} s pass"


def time_jumps(world: World) -> str | None:
    seconds = world.dice.of([31.0, 200.0, 700.0])
    world.now += seconds
    return f"{seconds} s pass at once"


def clear(world: World) -> str | None:
    if not world.dice.chance(30):
        cleared = world.manager.clear()
        return f"clear: {cleared.objects} dropped, {cleared.in_use} in use"
    for tier in world.tiers:
        tier.clearing = True
    try:
        world.manager.clear(l2=True)
    except TierError:
        return "clear with L2, which fails"
    finally:
        for tier in world.tiers:
            tier.clearing = False
    return "clear with L2"


def poll(world: World) -> str | None:
    number = world.dice.pick(len(world.manager.tiers.controllers))
    return f"{world.manager.tiers.controllers[number][0].name} has something to do" if world.poll(number) else None


def drive(world: World) -> str | None:
    if not world.jobs:
        return None
    job = world.dice.of(world.jobs)
    due = job.due
    world.counts["steps of jobs"] += 1
    return f"{job.controller.name}: {due or 'goes on'}" if world.drive(job) else None


def fault(world: World) -> str | None:
    tier = world.dice.of(world.tiers)
    tier.mode = "well" if world.dice.chance(60) else world.dice.of(MODES)
    return f"{tier.name} is {tier.mode}"


def spoil(world: World) -> str | None:
    tier = world.dice.of(world.tiers)
    if not tier.values:
        return None
    key = world.dice.of(list(tier.values))
    if world.dice.chance(50):
        tier.lose(key)
        return f"{tier.name} loses a value"
    tier.spoil(key, world.dice.pick(1 << 14))
    return f"{tier.name} spoils a value"


def regain(world: World) -> str | None:
    tier = world.dice.of(world.tiers)
    if not tier.elsewhere:
        return None
    tier.regain(world.dice.of(list(tier.elsewhere)))
    return f"another node writes to {tier.name}"


def grow(world: World) -> str | None:
    units = world.dice.pick(UNITS + 1)
    world.memory.grow(units * 4096)
    return f"{units} units are resident"


def kill(world: World) -> str | None:
    world.abandon()
    world.boot()
    return "the server is killed and starts again"


def shut_down(world: World) -> str | None:
    """What was accepted is answered, and nothing holds the arena."""
    manager = world.manager
    manager.tiers.stop()
    manager.tiers._prefetcher.stop()
    for _ in range(2000):
        for number in range(len(manager.tiers.controllers)):
            world.poll(number)
        if not world.jobs:
            break
        for job in list(world.jobs):
            world.drive(job)
    else:
        raise Broken(f"it does not stop: {[job.due for job in world.jobs]}")
    must(all(count == 1 for count in manager.tiers.accepted.values()), "an on_done never ran")
    manager.close()
    must(world.memory.closed, "something holds the arena after the end")
    world.boot()
    return "the server is stopped and starts again"


def rest(world: World) -> str | None:
    """All clients die, the tiers are well: everything comes to its end."""
    for number in range(len(world.clients)):
        world.lookups.tickets.end_owner(world.clients[number].owner)
        world.manager.table.end_owner(world.clients[number].owner)
        world.clients[number] = world.fresh_client()
    for writing in world.copies.writings:
        world.manager.table.abort(writing.id, owner=world.copies.owner)
    world.copies.writings = []
    world.rest()
    check_at_rest(world)
    return "rest"


# How often each is drawn.
WEIGHTS: dict[Action, float] = {
    clients.store: 6,
    clients.write: 14,
    clients.commit: 9,
    clients.abort: 0.5,
    clients.lookup: 6,
    clients.query: 5,
    clients.free: 3,
    clients.give_up_waiting: 0.5,
    clients.retrieve: 6,
    clients.finish_read: 9,
    clients.end_session: 0.4,
    clients.die: 0.4,
    clients.stop: 0.4,
    clients.wake: 2,
    tick: 3,
    time_passes: 2.5,
    time_jumps: 0.1,
    clear: 0.1,
    poll: 20,
    drive: 120,
    fault: 1.2,
    spoil: 1.5,
    regain: 1.0,
    grow: 0.3,
    kill: 0.03,
    shut_down: 0.03,
    rest: 0.01,
}
ACTIONS = {action.__name__: action for action in WEIGHTS}
