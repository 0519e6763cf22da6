"""One server as the tier uses it: its connections, and the handling of a failed flight. Runs in the caller's thread."""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence

from kvf_redis.commands import Command, Oversized, Ping
from kvf_redis.connect import NO_RIGHT, NoAnswer, rebuilt
from kvf_redis.resp import Place, ProtocolSurprise, Refused, Wire, error_code
from kvframework.api.plugin import Buffer
from kvframework.errors import TierError


class Node:
    """One server, reached by at most `size` connections that `connect` makes, each used by one thread at a time.
    Thread-safe; connects outside its lock. A connection with unread bytes, or one that was closed, is never used."""

    def __init__(self, connect: Callable[[float], Wire], size: int, *, where: str) -> None:
        self._connect = connect
        self._size = size
        self._where = where
        self._changed = threading.Condition()
        self._queue: deque[object] = deque()  # threads that wait for a connection
        self._idle: list[Wire] = []
        self._in_use: set[Wire] = set()
        self._connecting = 0
        self._closed = False

    def carry(self, commands: Sequence[Command], deadline: float) -> TierError | None:
        """Carry out the commands; return the error that ended them early, after which some may not be `answered`.

        Any error, timeout or surprise drops its connection and all idle ones. The returned error has no traceback or
        context, whose frames would keep the caller's buffers.
        """
        waiting = commands
        while waiting:
            try:
                wire = self._acquire(deadline)
            except TierError as error:
                return rebuilt(error)
            failure = self._fly(wire, waiting, deadline)
            if failure is not None:
                self._drop_idle()
                return failure
            waiting = [command for command in waiting if not command.answered]
        return None

    def _fly(self, wire: Wire, commands: Sequence[Command], deadline: float) -> TierError | None:
        silent = False
        try:
            fly(wire, commands, deadline)
        except Oversized:
            self._discard(wire)
            return None  # the other commands use another connection
        except (OSError, ProtocolSurprise, Refused) as error:
            fact, hint = _explain(error)
            silent = isinstance(error, TimeoutError) and not commands[0].answered
            self._discard(wire)
        except BaseException:
            self._discard(wire)
            raise
        else:
            self._release(wire)
            return None
        if self._closed:
            return self._is_closed()
        return (NoAnswer if silent else TierError)(fact, where=self._where, hint=hint)

    def _acquire(self, deadline: float) -> Wire:
        """A connection that the caller returns by `_release` or `_discard`; blocks until `deadline` at most. Raises
        `TierError` if there is none by then, if connecting fails, and once the node is closed."""
        wire = self._reserve(deadline)
        if wire is not None:
            return wire
        try:
            wire = self._connect(deadline)
        finally:
            with self._changed:
                self._connecting -= 1
                closed = self._closed
                if wire is not None and not closed:
                    self._in_use.add(wire)
                self._changed.notify_all()
        if closed:
            wire.close()
            raise self._is_closed()
        return wire

    def _release(self, wire: Wire) -> None:
        """Take back a connection whose replies were all read."""
        with self._changed:
            self._in_use.discard(wire)
            keep = not self._closed and not wire.spoilt
            if keep:
                self._idle.append(wire)
            self._changed.notify_all()
        if not keep:
            wire.close()

    def _discard(self, wire: Wire) -> None:
        """Take back a connection that must not be used again, and close it."""
        wire.spoilt = True
        self._release(wire)

    def _drop_idle(self) -> None:
        """Close idle connections: they are presumably as dead as the one that has just failed. Never blocks."""
        with self._changed:
            idle, self._idle = self._idle, []
        for wire in idle:
            wire.close()

    def close_unused(self) -> bool:
        """Close the node if no call uses it; True if it was closed. Never blocks."""
        with self._changed:
            if self._in_use or self._connecting:
                return False
            self._closed = True
        self._drop_idle()
        return True

    def close(self) -> None:
        """Close idle connections and cut those in use: calls in flight fail. Idempotent; never blocks."""
        with self._changed:
            self._closed = True
            for wire in self._in_use:
                wire.cut()
            self._changed.notify_all()
        self._drop_idle()

    def _reserve(self, deadline: float) -> Wire | None:
        """An idle connection, or None for the right to make one. Threads are served in the order of their arrival:
        without it, a thread that returns a connection and acquires one again at once would starve the others."""
        with self._changed:
            turn = object()
            self._queue.append(turn)
            try:
                while True:
                    if self._closed:
                        raise self._is_closed()
                    remaining = deadline - time.monotonic()
                    if remaining <= 0:
                        raise TierError("the call's deadline passed before a connection was free", where=self._where)
                    if self._queue[0] is not turn or not self._available():
                        self._changed.wait(min(remaining, threading.TIMEOUT_MAX))
                    elif not self._idle:
                        self._connecting += 1
                        return None
                    else:
                        wire = self._idle.pop()
                        if wire.is_quiet():
                            self._in_use.add(wire)
                            return wire
                        wire.close()
            finally:
                self._queue.remove(turn)
                self._changed.notify_all()

    def _available(self) -> bool:
        return bool(self._idle) or len(self._in_use) + self._connecting < self._size

    def _is_closed(self) -> TierError:
        return TierError("the tier is closed", where=self._where)


# Larger values travel one by one: other loads fill the pauses between them. The server copies each value into a reply
# of its own, and two that wait at once want fresh memory each time, at the price of a page fault every 4 KiB (measured
# with values of 3 MiB: 0.98 ms a GET instead of 0.15).
MAX_BYTES = 2 << 20
MAX_COMMANDS = 256


def fly(wire: Wire, commands: Sequence[Command], deadline: float) -> None:
    """Send the commands and read their replies in order. An exception ends the flight; commands with `answered` set
    keep their outcomes.

    At least one command is in flight, whatever its cost. More are sent only when half of the bound is free, so that
    small ones travel together.
    """
    sent = in_flight = 0
    for done, command in enumerate(commands):
        buffers: list[Buffer] = []
        if in_flight <= MAX_BYTES // 2 and sent - done <= MAX_COMMANDS // 2:
            while sent < len(commands) and sent - done < MAX_COMMANDS:
                if sent > done and in_flight + commands[sent].cost > MAX_BYTES:
                    break
                buffers.extend(commands[sent].buffers())
                in_flight += commands[sent].cost
                sent += 1
        if buffers:
            wire.send(buffers, deadline)
        command.receive(wire, deadline)
        in_flight -= command.cost


_HINTS = {
    "NOAUTH": "set password_env to a variable, or password_file to a file, with the password",
    "NOPERM": NO_RIGHT,
    "READONLY": "url names a replica: set url to the primary, or use the sentinels",
    "MOVED": 'url names a member of a cluster: set topology = "cluster"',
    "ASK": 'url names a member of a cluster: set topology = "cluster"',
    "CROSSSLOT": 'url names a member of a cluster: set topology = "cluster"',
    "CLUSTERDOWN": "the cluster does not serve all slots: see `redis-cli cluster info`",
    "LOADING": "Redis is starting: the tier works once the data is loaded",
    "MISCONF": "Redis cannot save to disk: see its log",
}


class Router(ABC):
    """Brings commands to the servers that hold their keys. Thread-safe."""

    @abstractmethod
    def run(self, commands: Sequence[Command], deadline: float) -> None:
        """Carry out the commands and set their outcomes; blocks until `deadline` at most.

        Commands to one key are carried out in their order. Raises `TierError` if none of them could be.
        """

    @abstractmethod
    def servers(self, deadline: float) -> Sequence[Place | None]:
        """The servers that hold keys now, without replicas. Raises `TierError`."""

    @abstractmethod
    def run_at(self, server: Place | None, command: Command, deadline: float) -> None:
        """Carry out a command on one of the `servers`, on no other. Raises `TierError` if that cannot be."""

    @abstractmethod
    def ping(self, deadline: float) -> None:
        """Check that the servers answer. Raises `TierError` if none does."""

    @abstractmethod
    def close(self) -> None:
        """End calls in flight. Idempotent; never blocks."""


class OneNode(Router):
    """Sends everything to one server; a command that it does not answer fails the call."""

    def __init__(self, node: Node, *, where: str) -> None:
        self._node = node
        self._where = where

    def run(self, commands: Sequence[Command], deadline: float) -> None:
        failure = self._node.carry(commands, deadline)
        if failure is None:
            failure = next((answered_error(each, self._where) for each in commands if each.error), None)
        if failure is not None:
            raise failure

    def servers(self, deadline: float) -> Sequence[Place | None]:
        return (None,)

    def run_at(self, server: Place | None, command: Command, deadline: float) -> None:
        self.run([command], deadline)

    def ping(self, deadline: float) -> None:
        self.run([Ping()], deadline)

    def close(self) -> None:
        self._node.close()


def answered_error(command: Command, where: str) -> TierError:
    return TierError(
        f"the server answered an error: {command.error}", where=where, hint=_HINTS.get(error_code(command.error), "")
    )


def _explain(error: Exception) -> tuple[str, str]:
    if isinstance(error, TimeoutError):
        return "the server did not answer before the deadline", ""
    if isinstance(error, OSError):
        return error.strerror or type(error).__name__, ""
    if isinstance(error, Refused):
        return f"the server answered an error: {error}", _HINTS.get(error.code, "")
    return f"unexpected reply: {error}", "check that url is the address of a Redis server"
