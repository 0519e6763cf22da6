"""RESP2 as the tier speaks it: commands to bytes and reply lines to values, both pure, and `Wire`, one connection."""

from __future__ import annotations

import contextlib
import errno
import re
import select
import socket
import ssl
import time
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from kvframework.api.plugin import Buffer
from kvframework.api.process import visible

_WRITTEN = re.compile(r"(?:\[([0-9a-fA-F:.%]+)\]|([^\[\]:@/\s]+)):(\d{1,5})")


class Place(NamedTuple):
    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @classmethod
    def parse(cls, text: str) -> Place | None:
        """ "host:port" or "[IPv6]:port"; None for anything else."""
        match = _WRITTEN.fullmatch(text)
        if match is None or not 0 < int(match[3]) < 1 << 16:
            return None
        return cls(match[1] or match[2], int(match[3]))


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
    return b"*%d\r\n" % len(words) + b"".join(b"$%d\r\n%b\r\n" % (len(word), word) for word in words)


def set_command(key: bytes, value_bytes: int, ttl_s: int) -> tuple[bytes, bytes]:
    """The bytes before and after the value of a SET."""
    head = b"*%d\r\n$3\r\nSET\r\n$%d\r\n%b\r\n$%d\r\n" % (5 if ttl_s else 3, len(key), key, value_bytes)
    if not ttl_s:
        return head, b"\r\n"
    seconds = b"%d" % ttl_s
    return head, b"\r\n$2\r\nEX\r\n$%d\r\n%b\r\n" % (len(seconds), seconds)


def parse_line(line: bytes) -> Reply:
    """Parse a reply line without its CRLF. Raises `ProtocolSurprise` for a malformed line."""
    kind, rest = line[:1], line[1:]
    if kind in (b"+", b"-"):
        return Reply(kind.decode(), text=visible(rest[:200].decode("ascii", "backslashreplace")))
    if kind in (b":", b"$", b"*") and _NUMBER.fullmatch(rest):
        number = int(rest)
        if kind == b":" or number >= -1:
            return Reply(kind.decode(), number)
    raise ProtocolSurprise("a reply is not valid RESP")


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
    return text.partition(" ")[0]


def parse_redirect(text: str) -> Redirect | None:
    """Parse the text of a MOVED or ASK error; None for any other."""
    match = _REDIRECT.fullmatch(text)
    if match is None:
        return None
    verb, slot, host, port = match.groups()
    if int(slot) >= 1 << 14 or not 0 < int(port) < 1 << 16:
        return None
    # A member sends "?" if it is configured to announce a host name that it does not know.
    return Redirect(verb == "ASK", int(slot), Place("" if host == "?" else host.strip("[]"), int(port)))


_IOV_MAX = 1024
_BUFFER_BYTES = 16 << 10
_RECORD_BYTES = 16 << 10
_SMALL_BYTES = 4 << 10
_LONGEST_WAIT_S = 3600.0


class Wire:
    """One connected socket: its bytes are sent straight from the caller's buffers, and received straight into them.

    Used by one storage thread at a time; only `cut` may come from another. Every call takes an absolute deadline on
    `time.monotonic()` and raises `TimeoutError` when it passes, another `OSError` when the connection breaks, and
    `ProtocolSurprise`; after any of them the connection must be closed. `vectored` is False for TLS, which cannot send
    many buffers at once. `on_close` closes the socket in the library that made it.
    """

    def __init__(self, sock: socket.socket, on_close: Callable[[], None], *, vectored: bool = True) -> None:
        self._sock = sock
        self._on_close = on_close
        self._vectored = vectored
        self._bytes = bytearray(_BUFFER_BYTES)
        self._store = memoryview(self._bytes)
        self._start = self._end = 0
        self.spoilt = False  # set by a caller that leaves replies unread: the connection is not used again

    def send(self, buffers: Sequence[Buffer], deadline: float) -> None:
        """Send all of `buffers`; large ones are not joined. Borrows them until it returns."""
        if not self._vectored:
            for record in _records(buffers):
                self._arm(deadline)
                self._sock.sendall(record)
            return
        views = [memoryview(buffer) for buffer in buffers if len(buffer)]
        first = 0
        while first < len(views):
            self._arm(deadline)
            sent = self._sock.sendmsg(views[first : first + _IOV_MAX])
            while sent:
                size = views[first].nbytes
                if sent < size:
                    views[first] = views[first][sent:]
                    break
                sent -= size
                first += 1

    def reply(self, deadline: float) -> Reply:
        """The next reply line. For "$" with a number of 0 or more the value follows: `value_into` or `drain`."""
        searched = self._start
        while (at := self._bytes.find(b"\r\n", searched, self._end)) < 0:
            if self._end - self._start >= _BUFFER_BYTES:
                raise ProtocolSurprise("a reply line has no end")
            searched = self._fill(deadline)
        line = bytes(self._store[self._start : at])
        self._start = at + 2
        return parse_line(line)

    def value_into(self, parts: Sequence[memoryview], nbytes: int, deadline: float) -> None:
        """Receive a value of `nbytes` into the beginning of `parts` (1-D bytes, writable), which together are at least
        as long. Borrows them."""
        for part in parts:
            wanted = min(nbytes, part.nbytes)
            at = min(self._end - self._start, wanted)
            part[:at] = self._store[self._start : self._start + at]
            self._start += at
            while at < wanted:
                at += self._receive(part[at:wanted], deadline)
            nbytes -= wanted
        self._end_of_value(deadline)

    def drain(self, nbytes: int, deadline: float) -> None:
        """Receive and drop a value of `nbytes`."""
        while nbytes:
            if self._start == self._end:
                self._fill(deadline)
            taken = min(nbytes, self._end - self._start)
            self._start += taken
            nbytes -= taken
        self._end_of_value(deadline)

    def is_quiet(self) -> bool:
        """False if an idle connection has bytes in it or was closed by the peer. Never blocks."""
        if self.spoilt or self._start != self._end or (isinstance(self._sock, ssl.SSLSocket) and self._sock.pending()):
            return False
        poller = select.poll()
        poller.register(self._sock, select.POLLIN)
        return not poller.poll(0)

    def cut(self) -> None:
        """End the connection while another thread may be using it; that thread gets an `OSError`. Never blocks."""
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Free the socket. Never blocks."""
        self._on_close()

    def _end_of_value(self, deadline: float) -> None:
        while self._end - self._start < 2:
            self._fill(deadline)
        if not self._bytes.startswith(b"\r\n", self._start):
            raise ProtocolSurprise("a value has another length than announced")
        self._start += 2

    def _fill(self, deadline: float) -> int:
        """Receive more bytes into the buffer; return the first index where an unseen CRLF may begin."""
        held = self._end - self._start
        self._store[:held] = self._store[self._start : self._end]
        self._start, self._end = 0, held
        self._end += self._receive(self._store[held:], deadline)
        return max(held - 1, 0)

    def _receive(self, into: memoryview, deadline: float) -> int:
        self._arm(deadline)
        count = self._sock.recv_into(into)
        if count == 0:
            raise ConnectionResetError(errno.ECONNRESET, "the server closed the connection")
        return count

    def _arm(self, deadline: float) -> None:
        remaining = deadline - time.monotonic()
        if remaining <= 0:
            raise TimeoutError(errno.ETIMEDOUT, "the call's deadline has passed")
        self._sock.settimeout(min(remaining, _LONGEST_WAIT_S))


def _records(buffers: Sequence[Buffer]) -> Iterator[Buffer]:
    """The buffers as TLS should send them: small neighbours are joined, each of which would otherwise be a record of
    its own."""
    joined = bytearray()
    for buffer in buffers:
        small = len(buffer) < _SMALL_BYTES
        if joined and (not small or len(joined) + len(buffer) > _RECORD_BYTES):
            yield joined
            joined = bytearray()
        if small:
            joined += buffer
        else:
            yield buffer
    if joined:
        yield joined
