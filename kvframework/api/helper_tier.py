"""A tier whose client library runs in a helper process: one that freezes, or keeps the interpreter, is killed.

`HelperTier` is the half in the server. The helper, see `tier_process.py`, makes an ordinary `Tier` and serves it: one
thread for each connection, a Unix socket, over which one call at a time is answered. Values pass in memory that both
have mapped: one copy between it and the caller's buffers, without the interpreter lock.

A call ends by its deadline, whatever the helper does. One that the helper has not ended `FROZEN_S` later counts as
frozen: the process is killed, and started again with a backoff. Whatever it still does by then, it does in memory that
no other call gets: nothing comes late into the caller's buffers.
"""

from __future__ import annotations

import contextlib
import logging
import math
import select
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager

from kvframework.api.copying import copy_bytes
from kvframework.api.plugin import O
from kvframework.api.tier import Outcome, PackedKey, RegistersMemory, Tier, TierEntry, TierUsage
from kvframework.api.tier_process import (
    Answer,
    Call,
    Connection,
    Start,
    ValueMemory,
    read_answer,
    write_call,
    write_start,
)
from kvframework.by_name import NamedCall
from kvframework.errors import TierError
from kvframework.logs.limit import LogLimit
from kvframework.supervise.child import SupervisedChild, start_connected

__all__ = ["FROZEN_S", "START_S", "HelperTier", "RegistersMemory"]

log = logging.getLogger(__name__)

# Seconds behind its deadline after which a call that the helper has not ended counts as frozen.
FROZEN_S = 1.0
# Seconds within which a process has made its tier: imports of large libraries, on a busy machine.
START_S = 30.0
# The helper's own deadline is so much earlier, so that a store that keeps to it is heard in time.
_ANSWER_S = 0.05
_DRAINED = 1 << 18


class _TierProcess(SupervisedChild):
    """A tier's helper process on the server's side. `start` is its first message. Callers only take connections and
    give them back; the thread kills a process whose call has not ended long after its deadline."""

    def __init__(self, name: str, start: Start, start_s: float) -> None:
        super().__init__("the helper process", thread=f"kvf-helper-{name}", ready_s=start_s)
        self._name = name
        self._start_message = start
        self._start_s = start_s
        self._state = threading.Condition()
        self._began = self._wanted = False
        # The socket of a process, and whether that has made its tier; how many have ended.
        self._control: socket.socket | None = None
        self._has_tier = False
        self._ends = 0
        self._once = LogLimit.once()
        self._idle: list[Connection] = []
        self._busy: set[Connection] = set()
        # Connections of calls that ended without an answer, and when they count as frozen. Nothing uses one again.
        self._given_up: dict[Connection, float] = {}

    def check_open(self, where: str) -> None:
        """Raises `TierError` after `close`."""
        if self.stopping:
            raise TierError("the tier is closed", where=where)

    def connect(self, deadline: float) -> Connection:
        """Returns a connection for one call; starts the process if there is none. Blocks until it has made its tier.
        Raises `OSError`, at once where the process ends."""
        with self._state:
            if not self._began and not self.stopping:
                self._began = True
                self.start()
            ends = self._ends
            while self._control is None or not self._has_tier:
                if self.stopping or self._ends != ends:
                    raise ConnectionError("the helper process has ended")
                self._wanted = True
                self.wake()
                if not self._state.wait(deadline - time.monotonic()):
                    raise ConnectionError("no helper process within the deadline")
            connection = self._idle.pop() if self._idle else Connection.through(self._control)
            self._busy.add(connection)
            return connection

    def give_back(self, connection: Connection) -> None:
        """Takes back the connection of a call that was answered."""
        with self._state:
            if connection in self._busy and not self.stopping:
                self._busy.discard(connection)
                self._idle.append(connection)
            else:
                connection.close()

    def give_up(self, connection: Connection, deadline: float) -> None:
        """Takes back the connection of a call that was not answered."""
        with self._state:
            if connection not in self._busy or self.stopping:
                connection.close()
                return
            self._busy.discard(connection)
            with contextlib.suppress(OSError):
                connection.sock.shutdown(socket.SHUT_WR)
            connection.sock.setblocking(False)
            self._given_up[connection] = deadline + FROZEN_S
            self.wake()

    def close(self) -> None:
        """Ends the process and the calls in flight. Idempotent."""
        with self._state:
            self.stop()
            for connection in self._busy:
                with contextlib.suppress(OSError):
                    connection.sock.shutdown(socket.SHUT_RDWR)
            self._state.notify_all()
        self.join(threading.TIMEOUT_MAX)

    # the supervisor's thread

    def wanted(self) -> bool:
        return self._wanted

    def spawn(self) -> subprocess.Popen[bytes]:
        self._wanted = False
        popen, control = start_connected("kvframework.api.tier_process")
        with self._state:
            self._control = control
        with contextlib.suppress(OSError):  # it has ended already, or never reads: both are seen
            write_start(control, self._start_message, time.monotonic() + self._start_s)
        control.setblocking(False)
        return popen

    def watch(self, poller: select.poll) -> float:
        if not self._has_tier:
            assert self._control is not None
            poller.register(self._control, select.POLLIN)
            return math.inf
        with self._state:
            for each in self._given_up:
                poller.register(each.sock, select.POLLIN)
            return min(self._given_up.values(), default=math.inf)

    def serve(self, happened: dict[int, int]) -> str | None:
        if not self._has_tier:
            return self._first_answer() if happened else None
        with self._state:
            given_up = dict(self._given_up)
        for connection, due in given_up.items():
            if connection.sock.fileno() in happened and _is_over(connection.sock):
                with self._state:
                    del self._given_up[connection]
                connection.close()
            elif time.monotonic() >= due:
                return f"{self.title} was killed: a call went on for {FROZEN_S:g} s after its deadline"
        return None

    def _first_answer(self) -> str | None:
        assert self._control is not None
        try:
            refusal = read_answer(self._control, time.monotonic() + FROZEN_S).refusal
        except (EOFError, OSError):
            return ""
        self._control.setblocking(False)
        if refusal is not None:
            return f"{self.title} made no tier: {'; '.join(each for each in refusal if each)}"
        with self._state:
            self._has_tier, self.last_error = True, ""
            self._once.clear()
            self._state.notify_all()
        self.ready()
        return None

    def hang_up(self, popen: subprocess.Popen[bytes]) -> None:
        """Have the process close its tier and end."""
        with self._state:
            assert self._control is not None
            self._control.close()
            self._control, self._has_tier = None, False

    def ended(self, why: str) -> None:
        """Close the connections of a process that has ended; those in use are closed by their callers."""
        with self._state:
            for connection in (*self._idle, *self._given_up):
                connection.close()
            self._idle.clear()
            self._given_up.clear()
            self._busy.clear()
            self._ends += 1
            self._state.notify_all()
        if why:
            log.log(logging.ERROR if self._once.passes(why) else logging.DEBUG, "tier %s: %s", self._name, why)


def _is_over(sock: socket.socket) -> bool:
    """Whether the helper has ended the call and its connection. Drops what it still answers."""
    try:
        return not sock.recv(_DRAINED)
    except BlockingIOError:
        return False
    except OSError:
        return True


class _NoMemory(TierError):
    """The machine has no memory for the values of a call."""


class HelperTier(Tier):
    """A tier in a helper process, where `make(options, where)` returns it. The process imports `make` and the type of
    `options` by their names: both stand at the top of a module. `where` is the table in the TOML, for error texts, and
    `capabilities` are the optional methods of that tier. Raises `PluginBroken` for what another process cannot find, or
    options that are no struct.

    Thread-safe. The process is started at the first call, and killed where `make` takes longer than `start_s`; a
    `KVFrameworkError` of `make` is that of the calls that wait for it. `close` ends the process within a second. It
    also ends with the server, however that ends. Values in its own memory end with it.

    Each call at a time has memory of its own for its values, as large as its largest batch was.
    """

    def __init__(
        self,
        make: Callable[[O, str], Tier],
        options: O,
        *,
        name: str,
        where: str,
        capabilities: Collection[str] = (),
        start_s: float = START_S,
    ) -> None:
        self.name = name
        self._where = where
        self._capabilities = frozenset(capabilities)
        self._process = _TierProcess(name, Start(NamedCall.of(make, options, where=where), where), start_s)

    def capabilities(self) -> frozenset[str]:
        return self._capabilities

    def contains(self, keys: Sequence[PackedKey], *, deadline: float) -> list[Outcome]:
        return [Outcome(each) for each in self._call(Call("contains", list(keys)), deadline).outcomes]

    def get_into(
        self, keys: Sequence[PackedKey], parts: Sequence[Sequence[memoryview]], *, deadline: float
    ) -> list[int | Outcome]:
        sizes = [sum(part.nbytes for part in each) for each in parts]
        try:
            answer = self._call(Call("get_into", list(keys), sizes), deadline, into=parts)
        except _NoMemory:
            if len(keys) == 1:
                return [Outcome.FAILED]
            # One by one, and not by what a subclass does before.
            each_alone = zip(keys, parts, strict=True)
            return [HelperTier.get_into(self, [key], [each], deadline=deadline)[0] for key, each in each_alone]
        return [each if isinstance(each, int) else Outcome(each) for each in answer.outcomes]

    def put(
        self, keys: Sequence[PackedKey], parts: Sequence[Sequence[memoryview]], *, deadline: float
    ) -> list[Outcome]:
        sizes = [sum(part.nbytes for part in each) for each in parts]
        try:
            answer = self._call(Call("put", list(keys), sizes), deadline, values=parts)
        except _NoMemory:
            if len(keys) == 1:
                return [Outcome.FAILED]
            each_alone = zip(keys, parts, strict=True)
            return [HelperTier.put(self, [key], [each], deadline=deadline)[0] for key, each in each_alone]
        return [Outcome(each) for each in answer.outcomes]

    def delete(self, keys: Sequence[PackedKey], *, deadline: float) -> list[Outcome]:
        return [Outcome(each) for each in self._call(Call("delete", list(keys)), deadline).outcomes]

    def touch(self, keys: Sequence[PackedKey], *, deadline: float) -> None:
        self._call(Call("touch", list(keys)), deadline)

    def usage(self, *, deadline: float) -> TierUsage:
        return TierUsage(*self._call(Call("usage"), deadline).usage)

    def scan(self, *, deadline: float) -> Iterator[TierEntry]:
        for key, nbytes, used_at in self._call(Call("scan"), deadline).entries:
            yield TierEntry(key, nbytes, used_at)

    def ping(self, *, deadline: float) -> None:
        self._call(Call("ping"), deadline)

    def close(self) -> None:
        """Ends the calls in flight and the helper. Idempotent; blocks for a second at most."""
        self._process.close()

    @property
    def pid(self) -> int | None:
        """The helper's process id, None while there is none."""
        return self._process.pid

    def _call(
        self,
        call: Call,
        deadline: float,
        *,
        values: Sequence[Sequence[memoryview]] = (),
        into: Sequence[Sequence[memoryview]] = (),
    ) -> Answer:
        """Makes one call. Raises `TierError`, and `RuntimeError` for what is a bug of the tier."""
        self._process.check_open(self._where)
        call.deadline = deadline - _ANSWER_S
        if call.deadline - time.monotonic() < _ANSWER_S:
            raise TierError("the deadline has passed", where=self._where)
        with self._connection(deadline) as connection:
            places = self._places(connection.memory, call.sizes)
            for place, value in zip(places, values, strict=False):
                _gather(place, value, deadline)
            write_call(connection.sock, call, deadline)
            answer = read_answer(connection.sock, deadline)
            for place, parts, outcome in zip(places, into, answer.outcomes, strict=False):
                if isinstance(outcome, int):
                    if not 0 <= outcome <= place.nbytes:
                        raise ConnectionError(f"a value of {outcome} bytes in a place of {place.nbytes}")
                    _scatter(place[:outcome], parts, deadline)
            # In here: a call that failed leaves memory behind that a client library may still be at.
            if answer.bug:
                raise RuntimeError(answer.bug)
            if answer.refusal:
                fact, available, hint = answer.refusal
                raise TierError(fact, where=self._where, available=available, hint=hint)
        return answer

    def _places(self, memory: ValueMemory, sizes: list[int]) -> list[memoryview]:
        try:
            memory.extend(sizes)
        except OSError as error:
            raise _NoMemory(f"no memory for {sum(sizes)} bytes: {error.strerror}", where=self._where) from error
        return memory.values(sizes)

    @contextmanager
    def _connection(self, deadline: float) -> Iterator[Connection]:
        """A connection for one call. After an error the supervisor keeps it until the helper has ended the call."""
        connection = None
        try:
            connection = self._process.connect(deadline)
            yield connection
        except BaseException as error:
            if connection is not None:
                self._process.give_up(connection, deadline)
            if isinstance(error, TierError) or not isinstance(error, OSError | EOFError):
                raise
            self._process.check_open(self._where)
            ended = "there is no helper process yet" if connection is None else "the helper process has ended"
            fact = "the deadline has passed" if isinstance(error, TimeoutError) else self._process.last_error or ended
            raise TierError(fact, where=self._where) from error
        self._process.give_back(connection)


def _gather(place: memoryview, parts: Sequence[memoryview], deadline: float) -> None:
    """Copy the parts of a value to its place."""
    _must_be_before(deadline)
    at = 0
    for part in parts:
        copy_bytes(place[at : at + part.nbytes], part)
        at += part.nbytes


def _scatter(value: memoryview, parts: Sequence[memoryview], deadline: float) -> None:
    """Copy a value into the beginning of its parts, which have room for it."""
    _must_be_before(deadline)
    at = 0
    for part in parts:
        piece = value[at : at + part.nbytes]
        copy_bytes(part[: piece.nbytes], piece)
        at += piece.nbytes


def _must_be_before(deadline: float) -> None:
    if time.monotonic() >= deadline:
        raise TimeoutError
