"""The parts of RESP2 that the tier speaks: commands to bytes, reply lines to values. Pure."""

from __future__ import annotations

import re
from typing import NamedTuple

from kvf_redis.addresses import Place
from kvframework.api.logs import visible

_NUMBER = re.compile(rb"-?[0-9]{1,18}")
_REDIRECT = re.compile(r"(MOVED|ASK) ([0-9]{1,5}) (\S*):([0-9]{1,5})(?: .*)?")

# These errors concern one key; any other error is about the server or the connection.
_ABOUT_ONE_KEY = frozenset({"WRONGTYPE", "OOM", "MOVED", "ASK", "TRYAGAIN", "CLUSTERDOWN"})


class ProtocolSurprise(Exception):
    """The peer sent something that is no reply to the command. The connection must be closed."""


class Refused(Exception):
    """The server answered with an error that concerns more than one key."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.code = error_code(text)


class Reply(NamedTuple):
    """One reply line: `number` belongs to ":", "$" and "*" (-1: nil), `text` to "+" and "-"."""

    kind: str
    number: int = 0
    text: str = ""


class Redirect(NamedTuple):
    """The redirection that a member of a cluster answers for a key that it does not serve. The host is "" if it is the
    member's own."""

    ask: bool
    slot: int
    place: Place


def command(*words: bytes) -> bytes:
    """A whole command."""
    return b"*%d\r\n" % len(words) + b"".join(b"$%d\r\n%b\r\n" % (len(word), word) for word in words)


def set_command(key: bytes, value_bytes: int, ttl_s: int) -> tuple[bytes, bytes]:
    """The bytes before and after the value of a SET."""
    head = b"*%d\r\n$3\r\nSET\r\n$%d\r\n%b\r\n$%d\r\n" % (5 if ttl_s else 3, len(key), key, value_bytes)
    if not ttl_s:
        return head, b"\r\n"
    seconds = b"%d" % ttl_s
    return head, b"\r\n$2\r\nEX\r\n$%d\r\n%b\r\n" % (len(seconds), seconds)


def parse_line(line: bytes) -> Reply:
    """Parses a reply line without its CRLF. Raises `ProtocolSurprise` for a malformed line."""
    kind, rest = line[:1], line[1:]
    if kind in (b"+", b"-"):
        return Reply(kind.decode(), text=visible(rest[:200].decode("ascii", "backslashreplace")))
    if kind in (b":", b"$", b"*") and _NUMBER.fullmatch(rest):
        number = int(rest)
        if kind == b":" or number >= -1:
            return Reply(kind.decode(), number)
    raise ProtocolSurprise("a reply is not the expected RESP")


def holds(reply: Reply, kind: str) -> bool:
    """True: `reply` is of `kind`. False: it is an error about this one key.

    Raises `Refused` for any other error and `ProtocolSurprise` for a reply of another kind.
    """
    if reply.kind == kind:
        return True
    if reply.kind != "-":
        raise ProtocolSurprise(f"expected a reply of type {kind!r}, found {reply.kind!r}")
    if error_code(reply.text) not in _ABOUT_ONE_KEY:
        raise Refused(reply.text)
    return False


def error_code(text: str) -> str:
    """The first word of an error."""
    return text.partition(" ")[0]


def parse_redirect(text: str) -> Redirect | None:
    """Parses the text of a MOVED or ASK error; None for any other."""
    match = _REDIRECT.fullmatch(text)
    if match is None:
        return None
    verb, slot, host, port = match.groups()
    if int(slot) >= 1 << 14 or not 0 < int(port) < 1 << 16:
        return None
    # A member sends "?" if it is configured to announce a host name that it does not know.
    return Redirect(verb == "ASK", int(slot), Place("" if host == "?" else host.strip("[]"), int(port)))
