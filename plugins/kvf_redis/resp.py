"""Owns the byte formats of RESP2 that the tier speaks: commands to bytes, reply lines to values. Pure."""

from __future__ import annotations

import re
from typing import NamedTuple

# Redis answers a longer value (proto-max-bulk-len) by closing the connection, which would fail the whole batch.
MAX_VALUE_BYTES = 512 << 20

_NUMBER = re.compile(rb"-?[0-9]{1,18}")

# What these errors say holds for one key; any other error is about the server or the connection.
_ABOUT_ONE_KEY = frozenset({"WRONGTYPE", "OOM"})


class ProtocolSurprise(Exception):
    """The peer sent something that is no answer to what was asked. The connection is of no use any more."""


class Refused(Exception):
    """The server answered with an error that concerns more than one key."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.code = text.partition(" ")[0]


class Reply(NamedTuple):
    """One reply line: `number` belongs to ":" and "$" (-1: nil), `text` to "+" and "-"."""

    kind: str
    number: int = 0
    text: str = ""


def command(*words: bytes) -> bytes:
    """A whole command."""
    return b"*%d\r\n" % len(words) + b"".join(b"$%d\r\n%b\r\n" % (len(word), word) for word in words)


def set_command(key: bytes, value_bytes: int, ttl_s: int) -> tuple[bytes, bytes]:
    """What goes before and after the value of a SET."""
    head = b"*%d\r\n$3\r\nSET\r\n$%d\r\n%b\r\n$%d\r\n" % (5 if ttl_s else 3, len(key), key, value_bytes)
    if not ttl_s:
        return head, b"\r\n"
    seconds = b"%d" % ttl_s
    return head, b"\r\n$2\r\nEX\r\n$%d\r\n%b\r\n" % (len(seconds), seconds)


def parse_line(line: bytes) -> Reply:
    """A reply line without its CRLF. Raises `ProtocolSurprise` for anything that is none."""
    kind, rest = line[:1], line[1:]
    if kind in (b"+", b"-"):
        return Reply(kind.decode(), text=rest[:200].decode("ascii", "backslashreplace"))
    if kind in (b":", b"$") and _NUMBER.fullmatch(rest):
        number = int(rest)
        if kind == b":" or number >= -1:
            return Reply(kind.decode(), number)
    raise ProtocolSurprise("a reply is no RESP that was asked for")


def holds(reply: Reply, kind: str) -> bool:
    """True: `reply` is of `kind`. False: an error about this one key.

    Raises `Refused` for any other error and `ProtocolSurprise` for a reply of another kind.
    """
    if reply.kind == kind:
        return True
    if reply.kind != "-":
        raise ProtocolSurprise(f"expected a reply of type {kind!r}, found {reply.kind!r}")
    if reply.text.partition(" ")[0] not in _ABOUT_ONE_KEY:
        raise Refused(reply.text)
    return False
