"""A tier whose client library runs in a helper process: one that freezes, or keeps the interpreter, is killed.

`HelperTier` is the half in the server. The helper, see `tier_process.py`, makes an ordinary `Tier` and serves it: one
thread for each connection, a Unix socket, over which one call at a time is answered. Values pass from the caller's
buffers to the socket and back; none is copied with the interpreter lock held.

A call ends by its deadline, whatever the helper does. One that the helper has not ended `FROZEN_S` later counts as
frozen: the process is killed, and started again with a backoff.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager

from kvframework.api.plugin import O
from kvframework.api.tier import Outcome, PackedKey, Tier, TierEntry, TierUsage
from kvframework.api.tier_process_calls import Answer, Call, Start, read_answer, receive_into, write_call
from kvframework.api.tier_process_supervisor import FROZEN_S, START_S, TierProcessSupervisor
from kvframework.by_name import NamedCall
from kvframework.errors import TierError

__all__ = ["FROZEN_S", "START_S", "HelperTier"]

# The helper's own deadline is so much earlier, so that a store that keeps to it is heard in time.
_ANSWER_S = 0.05


class HelperTier(Tier):
    """A tier in a helper process, where `make(options, where)` returns it. The process imports `make` and the type of
    `options` by their names: both stand at the top of a module. `where` is the table in the TOML, for error texts, and
    `capabilities` are the optional methods of that tier. Raises `PluginBroken` for what another process cannot find, or
    options that are no struct.

    Thread-safe. The process is started at the first call, and killed where `make` takes longer than `START_S`; `close`
    ends it within a second. It also ends with the server, however that ends. Values in its own memory end with it.
    """

    def __init__(
        self,
        make: Callable[[O, str], Tier],
        options: O,
        *,
        name: str,
        where: str,
        capabilities: Collection[str] = (),
    ) -> None:
        self.name = name
        self._where = where
        self._capabilities = frozenset(capabilities)
        self._supervisor = TierProcessSupervisor(name, Start(NamedCall.of(make, options, where=where), where))

    def capabilities(self) -> frozenset[str]:
        return self._capabilities

    def contains(self, keys: Sequence[PackedKey], *, deadline: float) -> list[Outcome]:
        return [Outcome(each) for each in self._call(Call("contains", list(keys)), deadline).outcomes]

    def get_into(
        self, keys: Sequence[PackedKey], parts: Sequence[Sequence[memoryview]], *, deadline: float
    ) -> list[int | Outcome]:
        call = Call("get_into", list(keys), [sum(part.nbytes for part in each) for each in parts])
        answer = self._call(call, deadline, into=parts)
        return [each if isinstance(each, int) else Outcome(each) for each in answer.outcomes]

    def put(
        self, keys: Sequence[PackedKey], parts: Sequence[Sequence[memoryview]], *, deadline: float
    ) -> list[Outcome]:
        held = [list(each) for each in parts]
        call = Call("put", list(keys), [sum(part.nbytes for part in each) for each in held])
        return [Outcome(each) for each in self._call(call, deadline, values=held).outcomes]

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
        with self._connection(deadline) as sock:
            write_call(sock, call, values, deadline)
            answer = read_answer(sock, deadline)
            for parts, outcome in zip(into, answer.outcomes, strict=False):
                if isinstance(outcome, int):
                    receive_into(sock, parts, outcome, deadline)
        if answer.bug:
            raise RuntimeError(answer.bug)
        if answer.refusal:
            fact, available, hint = answer.refusal
            raise TierError(fact, where=self._where, available=available, hint=hint)
        return answer

    @contextmanager
    def _connection(self, deadline: float) -> Iterator[socket.socket]:
        """A connection for one call. After an error the supervisor drains it until the helper has ended the call."""
        sock = None
        try:
            sock = self._supervisor.connect(deadline)
            yield sock
        except BaseException as error:
            if sock is not None:
                self._supervisor.give_up(sock, deadline)
            if not isinstance(error, OSError | EOFError):
                raise
            self._supervisor.check_open(self._where)
            ended = "there is no helper process yet" if sock is None else "the helper process has ended"
            fact = (
                "the deadline has passed" if isinstance(error, TimeoutError) else self._supervisor.last_error or ended
            )
            raise TierError(fact, where=self._where) from error
        self._supervisor.give_back(sock)
