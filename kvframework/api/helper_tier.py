"""A tier whose client library runs in a helper process: one that freezes, or keeps the interpreter, is killed.

`HelperTier` is the half in the server. The helper, see `tier_process.py`, makes an ordinary `Tier` and serves it: one
thread for each connection, a Unix socket, over which one call at a time is answered. Values pass in memory that both
have mapped: one copy between it and the caller's buffers, without the interpreter lock.

A call ends by its deadline, whatever the helper does. One that the helper has not ended `FROZEN_S` later counts as
frozen: the process is killed, and started again with a backoff. Whatever it still does by then, it does in memory that
no other call gets: nothing comes late into the caller's buffers.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager

from kvframework.api.copying import copy_bytes
from kvframework.api.plugin import O
from kvframework.api.registered_memory import RegistersMemory
from kvframework.api.tier import Outcome, PackedKey, Tier, TierEntry, TierUsage
from kvframework.api.tier_process_calls import Answer, Call, Start, read_answer, write_call
from kvframework.api.tier_process_memory import Connection, ValueMemory
from kvframework.api.tier_process_supervisor import FROZEN_S, START_S, TierProcessSupervisor
from kvframework.by_name import NamedCall
from kvframework.errors import TierError

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
