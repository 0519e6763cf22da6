"""A process that loads what a node lends, or what a bare socket sends, at a given rate.

`python -m kvframework_bench.peers.reader`: its first line is a `Start`; then a line begins its loads and the next one
ends them. Each is answered with a `Loaded`. It ends with its standard input. Between commands it does nothing.
"""

from __future__ import annotations

import mmap
import os
import select
import socket
import time
from collections.abc import Callable
from contextlib import ExitStack

import msgspec

from kvf_peers import PeersOptions
from kvf_peers.tier import open_tier
from kvframework.storage.namespaces import HEADER_BYTES

_PATIENCE_S = 60.0


class Start(msgspec.Struct, frozen=True):
    """`address` of a node that has `keys`, objects of `nbytes` each; without a token that of a socket which sends as
    many bytes for each one that it receives. `rate` is in bytes a second."""

    address: str
    token_file: str
    keys: list[bytes]
    nbytes: int
    rate: float


class Loaded(msgspec.Struct, frozen=True):
    """Bytes, and seconds."""

    nbytes: int = 0
    seconds: float = 0.0


def main() -> None:
    """Blocks until the standard input ends."""
    with ExitStack() as stack:
        line = _next_line()
        if not line:
            return
        start = msgspec.json.decode(line, type=Start)
        load = _from_node(start, stack) if start.token_file else _from_socket(start, stack)
        load()
        _answer(Loaded())
        while _next_line():
            load()
            _answer(Loaded())
            _answer(_load_until_stopped(load, start))


def _load_until_stopped(load: Callable[[], None], start: Start) -> Loaded:
    began, nbytes = time.perf_counter(), 0
    while True:
        load()
        nbytes += start.nbytes * len(start.keys)
        ahead_s = nbytes / start.rate - (time.perf_counter() - began)
        if select.select([0], [], [], max(ahead_s, 0.0))[0]:
            _next_line()
            return Loaded(nbytes, time.perf_counter() - began)


def _from_node(start: Start, stack: ExitStack) -> Callable[[], None]:
    tier = open_tier(PeersOptions(token_file=start.token_file, peers=[start.address], ask_s=10.0), where="bench")
    stack.callback(tier.close)
    places = _places(start)
    parts = [[memoryview(bytearray(HEADER_BYTES)), place] for place in places]
    expected = [HEADER_BYTES + start.nbytes] * len(places)

    def load() -> None:
        got = tier.get_into(start.keys, parts, deadline=time.monotonic() + _PATIENCE_S)
        if got != expected:
            raise SystemExit(f"a load from the peer node returned {got[0]}")

    return load


def _from_socket(start: Start, stack: ExitStack) -> Callable[[], None]:
    host, _, port = start.address.rpartition(":")
    sock = stack.enter_context(socket.create_connection((host, int(port)), _PATIENCE_S))
    places = _places(start)

    def load() -> None:
        sock.sendall(b"g")
        for place in places:
            at = 0
            while at < place.nbytes:
                at += sock.recv_into(place[at:]) or _ended()

    return load


def _ended() -> int:
    raise SystemExit("the peer node's process has ended")


def _places(start: Start) -> list[memoryview]:
    room = memoryview(mmap.mmap(-1, start.nbytes * len(start.keys)))
    room[:] = bytes(room.nbytes)
    return [room[at : at + start.nbytes] for at in range(0, room.nbytes, start.nbytes)]


def _next_line() -> bytes:
    """The next line without its end, b"" at the end. Reads no further, so that a poll shows whether there is more."""
    line = b""
    while piece := os.read(0, 1):
        if piece == b"\n":
            return line
        line += piece
    return b""


def _answer(loaded: Loaded) -> None:
    os.write(1, msgspec.json.encode(loaded) + b"\n")


if __name__ == "__main__":
    main()
