"""Routing of commands in a Redis Cluster: by slot to the masters, along redirections, around a lost node.

Runs in the caller's thread. A batch for several masters uses one thread for each further master; all of them have ended
when the call returns. The calling thread reads the slot map again, within its deadline and one thread at a time: when a
node is lost, and in the next call after a redirection.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import Any

from redis.cluster import parse_cluster_slots
from redis.crc import key_slot

from kvf_redis.commands import Command, Ping
from kvf_redis.connect import Connector, NoAnswer, rebuilt
from kvf_redis.node import Node, Router, answered_error
from kvf_redis.resp import Place, parse_redirect
from kvframework.errors import TierError

SLOTS = 1 << 14


class SlotMap:
    """One member's view of the cluster, updated by redirections since. Safe to read while `move` changes it.

    `members` are all nodes that were named, masters first.
    """

    def __init__(self, reply: Any, asked: Place) -> None:
        """`reply` is the answer of the member `asked` to CLUSTER SLOTS, as redis-py reads it. Raises `ValueError` and
        `TypeError` for anything else."""
        self._masters: list[Place | None] = [None] * SLOTS
        members: dict[Place, None] = {}
        replicas: dict[Place, None] = {}
        for (first, last), nodes in parse_cluster_slots(reply, current_host=asked.host).items():
            if not 0 <= first <= last < SLOTS:
                raise ValueError(f"not a range of slots: {first} to {last}")
            master = _place(nodes["primary"], asked)
            members[master] = None
            self._masters[first : last + 1] = [master] * (last + 1 - first)
            replicas.update((_place(each, asked), None) for each in nodes["replicas"])
        self.members = tuple(members | replicas)
        self.covered = sum(master is not None for master in self._masters)

    def master_of(self, key: bytes) -> Place | None:
        """The master that serves the key; None if its slot has none."""
        return self._masters[slot_of(key)]

    def masters(self) -> list[Place]:
        return list(dict.fromkeys(master for master in self._masters if master is not None))

    def move(self, slot: int, master: Place) -> None:
        self._masters[slot] = master


def slot_of(key: bytes) -> int:
    return key_slot(key)


def _place(node: tuple[str, int], asked: Place) -> Place:
    host, port = node
    return Place(asked.host if host in ("", "?", None) else host, int(port))


# The most times that one key is sent: a slot rarely moves twice during a call.
_HOPS = 8
# The shortest interval between two requests for the map.
_REFRESH_S = 0.5
# Commands to a node that did not answer within the second time fail at once for the first.
_REST_S = 3.0
_SILENCE_S = 0.2
# The least time that a member gets to answer with the map, if the deadline allows it.
_LEAST_SHARE_S = 0.25


class Cluster(Router):
    """Router for a Redis Cluster. Keys of a lost master fail, other keys do not. Once the cluster has promoted a
    replica, the keys are sent to it."""

    def __init__(self, connector: Connector, seeds: Sequence[Place], connections: int, *, where: str) -> None:
        self._connector = connector
        self._seeds = tuple(seeds)
        self._connections = connections
        self._where = where
        self._lock = threading.Lock()
        self._nodes: dict[Place, Node] = {}
        self._failed_at: dict[Place, float] = {}
        self._resting: dict[Place, float] = {}
        self._closed = False
        self._asking = threading.Lock()
        self._slots: SlotMap | None = None
        self._stale = False
        self._asked_at = float("-inf")

    def run(self, commands: Sequence[Command], deadline: float) -> None:
        self._run(commands, {}, deadline)

    def servers(self, deadline: float) -> Sequence[Place | None]:
        return self._current(deadline).masters()

    def run_at(self, server: Place | None, command: Command, deadline: float) -> None:
        assert server is not None
        failure = self._carry_one(server, [command], deadline)
        if failure is None and command.error:
            failure = answered_error(command, self._where)
        if failure is not None:
            self._stale = True
            raise failure

    def ping(self, deadline: float) -> None:
        pings: dict[Command, Place] = {Ping(): master for master in self._current(deadline).masters()}
        self._run(list(pings), pings, deadline)

    def close(self) -> None:
        with self._lock:
            self._closed = True
            nodes = list(self._nodes.values())
        for node in nodes:
            node.close()

    def _run(self, commands: Sequence[Command], pinned: dict[Command, Place], deadline: float) -> None:
        """Carry out the commands. Those in `pinned` are sent to the place named there, not by their slot."""
        slots = self._current(deadline)
        waiting, failure = list(commands), None
        for _ in range(_HOPS):
            groups: dict[Place | None, list[Command]] = {}
            for command in waiting:
                groups.setdefault(pinned.get(command) or slots.master_of(command.key), []).append(command)
            failures = self._carry(groups, deadline)
            if failures:
                failure = next(iter(failures.values()))
                self._stale = True
                self._refresh(deadline)
            slots = self._slots or slots
            waiting = []
            for place, group in groups.items():
                for command in group:
                    if command.error and self._redirected(command, place, slots, pinned):
                        waiting.append(command)
                    elif command.error:
                        failure = answered_error(command, self._where)
                        self._stale = True
                    elif not command.answered and place is not None:
                        pinned.pop(command, None)
                        if slots.master_of(command.key) not in (None, place):
                            command.asking = False
                            waiting.append(command)
            if not waiting:
                break
            for command in waiting:
                command.reset()
        if commands and not any(command.answered and not command.error for command in commands):
            raise failure or TierError("the cluster redirected the keys too often", where=self._where)

    def _redirected(self, command: Command, place: Place | None, slots: SlotMap, pinned: dict[Command, Place]) -> bool:
        """Apply a MOVED or ASK redirection to the command; False for any other error."""
        redirect = parse_redirect(command.error)
        if redirect is None or place is None:
            return False
        target = Place(redirect.place.host or place.host, redirect.place.port)
        command.asking = redirect.ask
        if redirect.ask:
            pinned[command] = target
        else:
            pinned.pop(command, None)
            slots.move(redirect.slot, target)
            self._stale = True  # one slot has moved, so others may have
        return True

    # Flights

    def _carry(self, groups: dict[Place | None, list[Command]], deadline: float) -> dict[Place | None, TierError]:
        """Send each group to its node, all at the same time; return the failures by node."""
        failures: dict[Place | None, TierError] = {}

        def fly(place: Place, group: Sequence[Command]) -> None:
            failure = self._carry_one(place, group, deadline)
            if failure is not None:
                failures[place] = failure

        threads = []
        try:
            flights = [(place, group) for place, group in groups.items() if place is not None]
            for flight in flights[1:]:
                thread = threading.Thread(target=fly, args=flight, name=f"kvf-redis-{flight[0]}")
                thread.start()
                threads.append(thread)
            for flight in flights[:1]:
                fly(*flight)
        finally:
            for thread in threads:
                thread.join()
        if None in groups:
            failures[None] = TierError("no master of the cluster serves the key's slot", where=self._where)
        return failures

    def _carry_one(self, place: Place, group: Sequence[Command], deadline: float) -> TierError | None:
        started = time.monotonic()
        if self._resting.get(place, started) > started:
            return TierError("the node did not answer recently", where=f"{self._where}: redis at {place}")
        node = self._node(place)
        if node is None:
            return TierError("the tier is closed", where=self._where)
        failure = node.carry(group, deadline)
        ended = time.monotonic()
        if failure is None:
            self._failed_at.pop(place, None)
        else:
            self._failed_at[place] = ended
            # On a busy machine a call ends long after its deadline; the node has had no more time than that.
            if isinstance(failure, NoAnswer) and min(ended, deadline) - started >= _SILENCE_S:
                self._resting[place] = ended + _REST_S
        return failure

    def _node(self, place: Place) -> Node | None:
        with self._lock:
            if self._closed:
                return None
            if place not in self._nodes:
                self._nodes[place] = Node(
                    lambda deadline: self._connector.connect(place, deadline),
                    self._connections,
                    where=f"{self._where}: redis at {place}",
                )
            return self._nodes[place]

    # The map

    def _current(self, deadline: float) -> SlotMap:
        """The map to start with. Raises `TierError` while there is none."""
        if self._closed:
            raise TierError("the tier is closed", where=self._where)
        remaining = deadline - time.monotonic()
        if remaining <= 0:
            raise TierError("the call's deadline has passed", where=self._where)
        if self._slots is None:
            if not self._asking.acquire(timeout=min(remaining, threading.TIMEOUT_MAX)):
                raise TierError(
                    "the call's deadline passed before the cluster was asked for its slots", where=self._where
                )
            try:
                if self._slots is None:
                    self._ask(deadline)
            finally:
                self._asking.release()
        elif self._stale:
            self._refresh(deadline - remaining / 2)
        assert self._slots is not None
        return self._slots

    def _refresh(self, deadline: float) -> None:
        """Read the map again, unless it was just read or another thread is reading it. Raises nothing."""
        just_done = time.monotonic() - self._asked_at < _REFRESH_S
        if self._closed or just_done or not self._asking.acquire(blocking=False):
            return
        try:
            self._ask(deadline)
        except TierError:
            self._stale = True
        finally:
            self._asking.release()

    def _ask(self, deadline: float) -> None:
        """Ask members for the map until one has a complete one, members without failures first; keep the best answer.

        Raises `TierError` if there is none.
        """
        best: SlotMap | None = None
        failure = None
        known = self._slots.members if self._slots else ()
        members = sorted(dict.fromkeys((*known, *self._seeds)), key=lambda each: self._failed_at.get(each, 0.0))
        for index, member in enumerate(members):
            if self._closed:
                raise TierError("the tier is closed", where=self._where)
            now = time.monotonic()
            share = max((deadline - now) / (len(members) - index), _LEAST_SHARE_S)
            try:
                found = self._connector.ask(
                    member,
                    "CLUSTER",
                    "SLOTS",
                    read=lambda reply, asked=member: SlotMap(reply, asked),  # type: ignore[misc]
                    deadline=min(deadline, now + share),
                )
            except TierError as error:
                failure = rebuilt(error)
                self._failed_at[member] = time.monotonic()
                continue
            if found.covered > (best.covered if best else 0):
                best = found
            if found.covered == SLOTS:
                break
        self._asked_at = time.monotonic()
        if best is None:
            raise failure or TierError("no member of the cluster serves any slot", where=self._where)
        self._slots, self._stale = best, False
        self._forget(set(best.members))

    def _forget(self, members: set[Place]) -> None:
        with self._lock:
            for place in [each for each in self._nodes if each not in members]:
                if self._nodes[place].close_unused():
                    del self._nodes[place]
        for marks in (self._failed_at, self._resting):
            for place in [each for each in tuple(marks) if each not in members and each not in self._seeds]:
                marks.pop(place, None)
