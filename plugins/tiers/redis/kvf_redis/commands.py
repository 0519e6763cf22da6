"""The commands that the tier sends: their bytes, the parsing of their replies, and their outcomes.

A command is used by one thread at a time. It borrows the caller's buffers until the tier's call returns.
"""

from __future__ import annotations

import os
import struct
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple

from kvf_redis.resp import ProtocolSurprise, Reply, Wire, command, error_code, holds, set_command
from kvframework.api.plugin import Buffer
from kvframework.api.tier import Outcome

_TRAILER = struct.Struct("<16s16sQII")
_MAGIC = b"\xa7kvf pieces 1\r\n\xf3"
TRAILER_BYTES = _TRAILER.size

# More than any writer makes: bounds the work that a forged trailer can cause.
MAX_PIECES = 1 << 16


class Trailer(NamedTuple):
    """The end of each piece of a value above the maximum size.

    Piece 0 lies under the value's own key, the others under keys that name one write of the value, and each ends with a
    trailer that names that write too. Piece 0 is written last: until then the value is absent, or is still the old one.
    A reader takes the trailer of piece 0 and accepts no piece with a different one. A whole value that happens to end
    like a trailer is stored as pieces, too. `generation` is random and names one write of `total` bytes in `pieces`
    pieces.
    """

    generation: bytes
    total: int
    pieces: int

    def fits(self, first_bytes: int, least: int) -> bool:
        """True if a piece 0 with `first_bytes` of the value may have this trailer; no writer makes pieces that hold
        less than `least`."""
        if self.pieces == 1:
            return self.total == first_bytes
        return first_bytes >= max(least, 1) and len(spans(self.total, first_bytes)) == self.pieces

    def bytes_of(self, index: int) -> bytes:
        """The bytes at the end of piece `index`."""
        return _TRAILER.pack(_MAGIC, self.generation, self.total, self.pieces, index)


def parse_trailer(tail: bytes) -> Trailer | None:
    """The trailer of a piece 0 that ends with `tail`. None: the value is no piece 0."""
    if len(tail) != TRAILER_BYTES or not tail.startswith(_MAGIC):
        return None
    _, generation, total, count, index = _TRAILER.unpack(tail)
    return Trailer(generation, total, count) if index == 0 and 0 < count <= MAX_PIECES else None


def new_trailer(total: int, piece_bytes: int) -> Trailer | None:
    """A trailer for a new write in pieces that hold `piece_bytes` of the value each. None: too many pieces."""
    count = len(spans(total, piece_bytes))
    return Trailer(os.urandom(16), total, count) if count <= MAX_PIECES else None


def spans(total: int, piece_bytes: int) -> range:
    """The offset of each piece in the value, where each but the last holds `piece_bytes` of it."""
    return range(0, total, piece_bytes or 1)


def piece_key(key: bytes, trailer: Trailer, index: int) -> bytes:
    """The key of piece `index` (1 or more) of the value under `key`; in a cluster it has a slot of its own."""
    return b"%b:%b:%d" % (key, trailer.generation.hex().encode(), index)


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
        """Reset the results before the command is sent again."""
        self.outcome = Outcome.FAILED
        self.answered = False
        self.error = ""

    def buffers(self) -> list[Buffer]:
        """All bytes to send, borrowed until they are sent."""
        return [_ASKING, *self._buffers()] if self.asking else self._buffers()

    def receive(self, wire: Wire, deadline: float) -> None:
        """Read the reply. Raises the errors of `Wire`, `Refused`, `ProtocolSurprise` and `Oversized`."""
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
            raise ProtocolSurprise("the answer to STRLEN is no length")
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
            raise ProtocolSurprise("the answer to SCAN is no page")
        cursor = self._bulk(wire, deadline)
        many = wire.reply(deadline)
        if not cursor.isdigit() or many.kind != "*" or not 0 <= many.number <= MOST_PAGE_KEYS:
            raise ProtocolSurprise("the answer to SCAN is no page")
        self.keys = [self._bulk(wire, deadline) for _ in range(many.number)]
        if any(len(key) != self._key_bytes for key in self.keys):
            raise ProtocolSurprise("SCAN answered a key that does not match")
        self.cursor = cursor

    def _bulk(self, wire: Wire, deadline: float) -> bytes:
        head = wire.reply(deadline)
        if head.kind != "$" or not 0 <= head.number <= max(self._key_bytes, 20):
            raise ProtocolSurprise("SCAN answered something that is no key")
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
