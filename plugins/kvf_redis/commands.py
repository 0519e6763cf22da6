"""The commands that the tier sends: their bytes, the parsing of their replies, and their outcomes.

A command is used by one thread at a time. It borrows the caller's buffers until the tier's call returns.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from kvf_redis.pieces import TRAILER_BYTES
from kvf_redis.resp import ProtocolSurprise, Reply, command, error_code, holds, set_command
from kvf_redis.wire import Wire
from kvframework.api.tier import Outcome
from kvframework.api.types import Buffer

# A value that is too long is read and dropped up to this size; beyond it the connection is dropped.
DRAIN_BYTES = 16 << 20

_ASKING = command(b"ASKING")


class Oversized(Exception):
    """A value is too long to be read past. Its command is answered, but the connection must be closed."""


class Command(ABC):
    """One Redis command. `cost` is its weight in a flight: its bytes, or those of its reply.

    `outcome` is FAILED until a reply says otherwise; `answered` is True once the reply is read; `error` is a cluster's
    error text for a key that it cannot serve on that node or at that moment.
    """

    kind = ":"  # of the reply

    def __init__(self, key: bytes, cost: int) -> None:
        self.key = key
        self.cost = cost
        self.asking = False
        self.reset()

    def reset(self) -> None:
        """Resets the results before the command is sent again."""
        self.outcome = Outcome.FAILED
        self.answered = False
        self.error = ""

    def buffers(self) -> list[Buffer]:
        """All bytes to send, borrowed until they are sent."""
        return [_ASKING, *self._buffers()] if self.asking else self._buffers()

    def receive(self, wire: Wire, deadline: float) -> None:
        """Reads the reply. Raises the errors of `Wire`, `Refused`, `ProtocolSurprise` and `Oversized`."""
        if self.asking and not holds(wire.reply(deadline), "+"):
            raise ProtocolSurprise("an ASKING was refused for one key")
        reply = wire.reply(deadline)
        if holds(reply, self.kind):
            self._take(reply, wire, deadline)
        elif error_code(reply.text) == "WRONGTYPE":
            self._wrong_type()
        elif error_code(reply.text) != "OOM":
            self.error = reply.text
        self.answered = True

    @abstractmethod
    def _buffers(self) -> list[Buffer]: ...

    @abstractmethod
    def _take(self, reply: Reply, wire: Wire, deadline: float) -> None:
        """Sets the outcome from a reply that is no error."""

    def _wrong_type(self) -> None:
        return


class Count(Command):
    """A command that is answered by the number of keys it found: 0 or 1."""

    def __init__(self, key: bytes, verb: bytes, one: Outcome, *words: bytes) -> None:
        self._bytes = command(verb, key, *words)
        self._one = one
        super().__init__(key, len(self._bytes))

    def _buffers(self) -> list[Buffer]:
        return [self._bytes]

    def _take(self, reply: Reply, wire: Wire, deadline: float) -> None:
        if reply.number not in (0, 1):
            raise ProtocolSurprise("the server answered with an unexpected number")
        self.outcome = self._one if reply.number else Outcome.MISSING


class Get(Command):
    """Receives a value into `views`, and up to a trailer's length behind them into `spare`.

    FOUND: `nbytes` were received. DAMAGED: the value is of another type, or even longer.
    """

    kind = "$"

    def __init__(self, key: bytes, views: Sequence[memoryview]) -> None:
        self.room = sum(view.nbytes for view in views)
        self.nbytes = 0
        self.spare = bytearray(TRAILER_BYTES)
        self._views = views
        super().__init__(key, self.room)

    def _buffers(self) -> list[Buffer]:
        return [command(b"GET", self.key)]

    def _take(self, reply: Reply, wire: Wire, deadline: float) -> None:
        if reply.number < 0:
            self.outcome = Outcome.MISSING
        elif reply.number <= self.room + TRAILER_BYTES:
            wire.value_into([*self._views, memoryview(self.spare)], reply.number, deadline)
            self.nbytes = reply.number
            self.outcome = Outcome.FOUND
        else:
            self.outcome = Outcome.DAMAGED
            if reply.number > DRAIN_BYTES:
                self.answered = True
                raise Oversized
            wire.drain(reply.number, deadline)

    def _wrong_type(self) -> None:
        self.outcome = Outcome.DAMAGED


class Tail(Command):
    """Reads the last bytes of a value, where a trailer would be, into `tail`; b"" if there is no value."""

    kind = "$"

    def __init__(self, key: bytes) -> None:
        self.tail = b""
        self._bytes = command(b"GETRANGE", key, b"%d" % -TRAILER_BYTES, b"-1")
        super().__init__(key, len(self._bytes))

    def _buffers(self) -> list[Buffer]:
        return [self._bytes]

    def _take(self, reply: Reply, wire: Wire, deadline: float) -> None:
        if not 0 <= reply.number <= TRAILER_BYTES:
            raise ProtocolSurprise("the answer to GETRANGE is longer than requested")
        tail = bytearray(reply.number)
        wire.value_into([memoryview(tail)], reply.number, deadline)
        self.tail = bytes(tail)


class Set(Command):
    """Stores a value, sent straight from `parts`."""

    kind = "+"

    def __init__(self, key: bytes, parts: Sequence[Buffer], ttl_s: int) -> None:
        self._parts = parts
        self._ttl_s = ttl_s
        super().__init__(key, sum(len(part) for part in parts))

    def _buffers(self) -> list[Buffer]:
        head, tail = set_command(self.key, self.cost, self._ttl_s)
        return [head, *self._parts, tail]

    def _take(self, reply: Reply, wire: Wire, deadline: float) -> None:
        if reply.text != "OK":
            raise ProtocolSurprise("the answer to SET is not OK")
        self.outcome = Outcome.STORED


class Ping(Command):
    kind = "+"

    def __init__(self) -> None:
        super().__init__(b"", 0)

    def _buffers(self) -> list[Buffer]:
        return [command(b"PING")]

    def _take(self, reply: Reply, wire: Wire, deadline: float) -> None:
        if reply.text != "PONG":
            raise ProtocolSurprise("the answer to PING is not PONG")
