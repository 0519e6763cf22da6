"""The commands that the tier sends: their bytes, the parsing of their replies, and their outcomes.

A command is used by one thread at a time. It borrows the caller's buffers until the tier's call returns.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from kvf_redis.resp import ProtocolSurprise, Reply, Wire, command, error_code, holds, set_command
from kvframework.api.plugin import Buffer
from kvframework.api.tier import Outcome

# A value that is too long is read and dropped up to this size; beyond it the connection is dropped.
DRAIN_BYTES = 16 << 20

# Keys that one SCAN looks at: the server answers nobody else meanwhile, for a fraction of a millisecond. It answers
# more at once where hashes collide, and never this many.
PAGE_KEYS = 512
MOST_PAGE_KEYS = 1 << 20

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
        self.outcome = Outcome.FAILED
        self.answered = False
        self.error = ""

    def buffers(self) -> list[Buffer]:
        """All bytes to send, borrowed until they are sent."""
        return [_ASKING, *self._buffers()] if self.asking else self._buffers()

    def receive(self, wire: Wire, deadline: float) -> None:
        """Read the reply. Raises the errors of `Wire`, `Refused`, `ProtocolSurprise` and `Oversized`."""
        if self.asking and not holds(wire.reply(deadline), "+"):
            raise ProtocolSurprise("the server refused ASKING for one key")
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
        """Set the outcome from a reply that is no error."""

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
    """Receives a value into `views`. FOUND: `nbytes` were received. DAMAGED: it is longer, or of another type."""

    kind = "$"

    def __init__(self, key: bytes, views: Sequence[memoryview]) -> None:
        self.room = sum(view.nbytes for view in views)
        self.nbytes = 0
        self._views = views
        super().__init__(key, self.room)

    def _buffers(self) -> list[Buffer]:
        return [command(b"GET", self.key)]

    def _take(self, reply: Reply, wire: Wire, deadline: float) -> None:
        if reply.number < 0:
            self.outcome = Outcome.MISSING
        elif reply.number <= self.room:
            wire.value_into(self._views, reply.number, deadline)
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


class Length(Command):
    """Asks for the bytes of a value: `nbytes`, 0 if there is none. `is_string` is False for a key of another type."""

    def __init__(self, key: bytes) -> None:
        self.nbytes = 0
        self.is_string = True
        self._bytes = command(b"STRLEN", key)
        super().__init__(key, len(self._bytes))

    def _buffers(self) -> list[Buffer]:
        return [self._bytes]

    def _take(self, reply: Reply, wire: Wire, deadline: float) -> None:
        if reply.number < 0:
            raise ProtocolSurprise("the answer to STRLEN is not a length")
        self.nbytes = reply.number

    def _wrong_type(self) -> None:
        self.is_string = False


class Page(Command):
    """Asks one server for the next keys that match a glob, all of which have `key_bytes`: `keys`, and the `cursor` of
    the page that follows, b"0" behind the last one."""

    kind = "*"

    def __init__(self, cursor: bytes, pattern: bytes, *, key_bytes: int) -> None:
        self.cursor = cursor
        self.keys: list[bytes] = []
        self._key_bytes = key_bytes
        self._bytes = command(b"SCAN", cursor, b"MATCH", pattern, b"COUNT", b"%d" % PAGE_KEYS)
        super().__init__(b"", len(self._bytes))

    def _buffers(self) -> list[Buffer]:
        return [self._bytes]

    def _take(self, reply: Reply, wire: Wire, deadline: float) -> None:
        if reply.number != 2:
            raise ProtocolSurprise("the answer to SCAN is not a page of keys")
        cursor = self._bulk(wire, deadline)
        many = wire.reply(deadline)
        if not cursor.isdigit() or many.kind != "*" or not 0 <= many.number <= MOST_PAGE_KEYS:
            raise ProtocolSurprise("the answer to SCAN is not a page of keys")
        self.keys = [self._bulk(wire, deadline) for _ in range(many.number)]
        if any(len(key) != self._key_bytes for key in self.keys):
            raise ProtocolSurprise("SCAN answered a key that does not match the pattern")
        self.cursor = cursor

    def _bulk(self, wire: Wire, deadline: float) -> bytes:
        head = wire.reply(deadline)
        if head.kind != "$" or not 0 <= head.number <= max(self._key_bytes, 20):
            raise ProtocolSurprise("SCAN answered a value that is not a key")
        value = bytearray(head.number)
        wire.value_into([memoryview(value)], head.number, deadline)
        return bytes(value)


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
