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
import os
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
from kvframework.child_process import Backoff, reap, start_child, why_ended
from kvframework.errors import TierError

# A tier's helper process on the server's side: its start at the first call, its connections, its end.
#
# One thread starts the process, watches it, and kills it where a call has not ended long after its deadline. Callers
# only take connections and give them back.

log = logging.getLogger(__name__)

# Seconds behind its deadline after which a call that the helper has not ended counts as frozen.
FROZEN_S = 1.0
# Seconds within which a process has made its tier: imports of large libraries, on a busy machine.
START_S = 30.0
_DRAINED = 1 << 18


class TierProcessSupervisor:
    """One helper process at a time. `start` is its first message. Thread-safe."""

    def __init__(self, name: str, start: Start, start_s: float) -> None:
        self._name = name
        self._start = start
        self._start_s = start_s
        self._state = threading.Condition()
        self._thread: threading.Thread | None = None
        self._wake = -1
        self._closed = self._wanted = False
        # The socket of a process that has made its tier, and how many have ended.
        self._control: socket.socket | None = None
        self._ends = 0
        self._idle: list[Connection] = []
        self._busy: set[Connection] = set()
        # Connections of calls that ended without an answer, and when they count as frozen. Nothing uses one again.
        self._given_up: dict[Connection, float] = {}
        self._backoff = Backoff()
        self.pid: int | None = None
        self.last_error = ""

    def check_open(self, where: str) -> None:
        """Raises `TierError` after `close`."""
        if self._closed:
            raise TierError("the tier is closed", where=where)

    def connect(self, deadline: float) -> Connection:
        """Returns a connection for one call; starts the process if there is none. Blocks until it has made its tier.
        Raises `OSError`, at once where the process ends."""
        with self._state:
            if self._thread is None and not self._closed:
                self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
                self._thread = threading.Thread(target=self._run, name=f"kvf-helper-{self._name}", daemon=True)
                self._thread.start()
            ends = self._ends
            while self._control is None:
                if self._closed or self._ends != ends:
                    raise ConnectionError("the helper process has ended")
                self._wanted = True
                self._notify()
                if not self._state.wait(deadline - time.monotonic()):
                    raise ConnectionError("no helper process within the deadline")
            connection = self._idle.pop() if self._idle else Connection.through(self._control)
            self._busy.add(connection)
            return connection

    def give_back(self, connection: Connection) -> None:
        """Takes back the connection of a call that was answered."""
        with self._state:
            if connection in self._busy and not self._closed:
                self._busy.discard(connection)
                self._idle.append(connection)
            else:
                connection.close()

    def give_up(self, connection: Connection, deadline: float) -> None:
        """Takes back the connection of a call that was not answered."""
        with self._state:
            if connection not in self._busy or self._closed:
                connection.close()
                return
            self._busy.discard(connection)
            with contextlib.suppress(OSError):
                connection.sock.shutdown(socket.SHUT_WR)
            connection.sock.setblocking(False)
            self._given_up[connection] = deadline + FROZEN_S
            self._notify()

    def close(self) -> None:
        """Ends the process and the calls in flight. Idempotent."""
        with self._state:
            self._closed = True
            for connection in self._busy:
                with contextlib.suppress(OSError):
                    connection.sock.shutdown(socket.SHUT_RDWR)
            self._state.notify_all()
            self._notify()
            thread = self._thread
        if thread is not None:
            thread.join()

    def _notify(self) -> None:
        if self._wake >= 0:
            os.eventfd_write(self._wake, 1)

    # the supervisor's thread

    def _run(self) -> None:
        poller = select.poll()
        poller.register(self._wake, select.POLLIN)
        while not self._closed:
            left = self._backoff.left(time.monotonic())
            if self._wanted and not left:
                self._one_process()
            else:
                poller.poll(left * 1000 + 1 if self._wanted else None)
                self._drain_wake()
        with self._state:
            os.close(self._wake)
            self._wake = -1

    def _one_process(self) -> None:
        self._wanted = False
        self._backoff.started(time.monotonic())
        try:
            popen, control = start_child("kvframework.api.tier_process")
        except Exception as error:  # noqa: BLE001  the thread has to go on: callers wait for it
            self._ended(f"the helper process cannot be started: {error}")
            return
        self.pid = popen.pid
        reason = ""
        try:
            write_start(control, self._start, time.monotonic() + self._start_s)
            control.setblocking(False)
            reason = self._watch(popen, control)
        except OSError as error:
            reason = f"the helper process ended{why_ended(popen)}: {error}"
        finally:
            with self._state:
                self._control = self.pid = None
            control.close()
            if reason:
                popen.kill()
            reap(popen)
            self._forget()
        if reason:
            self._ended(reason)

    def _watch(self, popen: subprocess.Popen[bytes], control: socket.socket) -> str:
        """Watch the process until it must end; return the reason, "" after `close`."""
        pidfd = os.pidfd_open(popen.pid)
        ready_by = time.monotonic() + self._start_s
        try:
            while True:
                poller = select.poll()
                poller.register(self._wake, select.POLLIN)
                poller.register(pidfd, select.POLLIN)
                with self._state:
                    is_ready, given_up = self._control is not None, dict(self._given_up)
                for sock in [each.sock for each in given_up] if is_ready else [control]:
                    poller.register(sock, select.POLLIN)
                due = min(given_up.values(), default=None) if is_ready else ready_by
                happened = dict(poller.poll(None if due is None else max(due - time.monotonic(), 0) * 1000 + 1))
                self._drain_wake()
                if self._closed:
                    return ""
                if control.fileno() in happened:
                    try:
                        refusal = read_answer(control, time.monotonic() + FROZEN_S).refusal
                    except EOFError:
                        return f"the helper process ended{why_ended(popen)}"
                    control.setblocking(False)
                    if refusal is not None:
                        return f"the helper process made no tier: {'; '.join(each for each in refusal if each)}"
                    with self._state:
                        self._control, self.last_error = control, ""
                        self._state.notify_all()
                elif pidfd in happened:
                    return f"the helper process ended{why_ended(popen)}"
                elif not is_ready and time.monotonic() >= ready_by:
                    return f"the helper process was killed: it made no tier within {self._start_s:g} s"
                for connection, its_due in given_up.items():
                    if connection.sock.fileno() in happened and _is_over(connection.sock):
                        with self._state:
                            del self._given_up[connection]
                        connection.close()
                    elif time.monotonic() >= its_due:
                        return f"the helper process was killed: a call went on for {FROZEN_S:g} s after its deadline"
        finally:
            os.close(pidfd)

    def _ended(self, reason: str) -> None:
        with self._state:
            again = reason == self.last_error  # which is empty once a process has made its tier
            self._backoff.ended(time.monotonic())
            self.last_error = reason
            self._ends += 1
            self._state.notify_all()
        log.log(logging.DEBUG if again else logging.ERROR, "tier %s: %s", self._name, reason)

    def _forget(self) -> None:
        """Close the connections of a process that has ended; those in use are closed by their callers."""
        with self._state:
            for connection in (*self._idle, *self._given_up):
                connection.close()
            self._idle.clear()
            self._given_up.clear()
            self._busy.clear()

    def _drain_wake(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._wake)


def _is_over(sock: socket.socket) -> bool:
    """Whether the helper has ended the call and its connection. Drops what it still answers."""
    try:
        return not sock.recv(_DRAINED)
    except BlockingIOError:
        return False
    except OSError:
        return True


__all__ = ["FROZEN_S", "START_S", "HelperTier", "RegistersMemory"]

# The helper's own deadline is so much earlier, so that a store that keeps to it is heard in time.
_ANSWER_S = 0.05


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
        self._supervisor = TierProcessSupervisor(name, Start(NamedCall.of(make, options, where=where), where), start_s)

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
        self._supervisor.close()

    @property
    def pid(self) -> int | None:
        """The helper's process id, None while there is none."""
        return self._supervisor.pid

    def _call(
        self,
        call: Call,
        deadline: float,
        *,
        values: Sequence[Sequence[memoryview]] = (),
        into: Sequence[Sequence[memoryview]] = (),
    ) -> Answer:
        """Makes one call. Raises `TierError`, and `RuntimeError` for what is a bug of the tier."""
        self._supervisor.check_open(self._where)
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
            connection = self._supervisor.connect(deadline)
            yield connection
        except BaseException as error:
            if connection is not None:
                self._supervisor.give_up(connection, deadline)
            if isinstance(error, TierError) or not isinstance(error, OSError | EOFError):
                raise
            self._supervisor.check_open(self._where)
            ended = "there is no helper process yet" if connection is None else "the helper process has ended"
            fact = (
                "the deadline has passed" if isinstance(error, TimeoutError) else self._supervisor.last_error or ended
            )
            raise TierError(fact, where=self._where) from error
        self._supervisor.give_back(connection)


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
