"""The bytes of one connection: sent straight from the caller's buffers, received straight into them.

Used by one storage thread at a time; only `cut` may come from another. Every call takes an absolute deadline on
`time.monotonic()` and raises `TimeoutError` when it passes, another `OSError` when the connection breaks, and
`ProtocolSurprise`; after any of them the connection must be closed.
"""

from __future__ import annotations

import contextlib
import errno
import select
import socket
import ssl
import time
from collections.abc import Callable, Iterator, Sequence

from kvf_redis.resp import ProtocolSurprise, Reply, parse_line
from kvframework.api.types import Buffer

_IOV_MAX = 1024
_BUFFER_BYTES = 16 << 10
_RECORD_BYTES = 16 << 10
_SMALL_BYTES = 4 << 10
_LONGEST_WAIT_S = 3600.0


class Wire:
    """One connected socket. `vectored` is False for TLS, which cannot send many buffers at once. `on_close` closes the
    socket in the library that made it."""

    def __init__(self, sock: socket.socket, on_close: Callable[[], None], *, vectored: bool = True) -> None:
        self._sock = sock
        self._on_close = on_close
        self._vectored = vectored
        self._bytes = bytearray(_BUFFER_BYTES)
        self._store = memoryview(self._bytes)
        self._start = self._end = 0
        self.spoilt = False  # set by a caller that leaves replies unread: the connection is not used again

    def send(self, buffers: Sequence[Buffer], deadline: float) -> None:
        """Sends all of `buffers`; large ones are not joined. Borrows them until it returns."""
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
        """Receives a value of `nbytes` into the beginning of `parts` (1-D bytes, writable), which together are at least
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
        """Receives and drops a value of `nbytes`."""
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
        """Ends the connection while another thread may be using it; that thread gets an `OSError`. Never blocks."""
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Frees the socket. Never blocks."""
        self._on_close()

    def _end_of_value(self, deadline: float) -> None:
        while self._end - self._start < 2:
            self._fill(deadline)
        if not self._bytes.startswith(b"\r\n", self._start):
            raise ProtocolSurprise("a value has not its announced length")
        self._start += 2

    def _fill(self, deadline: float) -> int:
        """Receives more bytes into the buffer; returns the first index where an unseen CRLF may begin."""
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
            raise TimeoutError(errno.ETIMEDOUT, "the deadline has passed")
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
