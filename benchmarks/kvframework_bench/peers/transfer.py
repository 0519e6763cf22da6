"""Loads of the peers tier beside bare TCP: in both cases another process sends, this one receives into memory that it
has touched. `python -m kvframework_bench.peers.transfer TOKEN-FILE BYTES COUNT` is that other process: it writes the
two ports, and ends with its standard input.
"""

from __future__ import annotations

import mmap
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from kvf_peers import PeersOptions
from kvf_peers.tier import PeersTier, open_tier
from kvframework.api.tier import Loan, Node, NodeIdentity, PackedKey
from kvframework.storage.namespaces import HEADER_BYTES, seal, unseal
from kvframework_bench.errors import BenchFailed
from kvframework_bench.rounds import Rounds, interleave, rate_gb_s, ratio, timed

CALL_BYTES = 128 << 20
_PATIENCE_S = 60.0
_PIECE = 4 << 20


class HeldObjects(Node):
    """`count` objects of `nbytes` in memory, as a server lends them: sealed on demand. Without its pins, some
    microseconds an object."""

    def __init__(self, nbytes: int, count: int) -> None:
        self.identity = NodeIdentity(os.urandom(16), 256, "bench")
        self.arena_fd, self.arena_bytes = -1, nbytes * count
        room = memoryview(mmap.mmap(-1, nbytes * count))
        for at in range(0, room.nbytes, _PIECE):
            room[at : at + _PIECE] = os.urandom(len(room[at : at + _PIECE]))
        self.objects = {key: room[at * nbytes : (at + 1) * nbytes] for at, key in enumerate(keys_of(count))}

    def holds(self, keys: Sequence[PackedKey]) -> Sequence[bool]:
        return [key in self.objects for key in keys]

    def lend(self, key: PackedKey) -> Loan | None:
        value = self.objects.get(key)
        return None if value is None else _Held(key, value)

    def models(self) -> Mapping[str, Collection[bytes]]:
        return {}

    def watch(self, came: Callable[[Sequence[PackedKey]], None]) -> None:
        came(list(self.objects))


class _Held(Loan):
    def __init__(self, key: PackedKey, value: memoryview) -> None:
        self.nbytes = HEADER_BYTES + value.nbytes
        self._key, self._value = key, value

    def parts(self) -> Sequence[memoryview]:
        return memoryview(seal(self._key, [self._value], object_bytes=self._value.nbytes)), self._value

    def close(self) -> None:
        return


def keys_of(count: int) -> list[PackedKey]:
    return [b"p" * 71 + bytes([index]) for index in range(count)]


def transfer_rows(sizes: Sequence[int], rounds: int) -> Iterator[tuple[str, ...]]:
    """Measure values of each size. Raises `BenchFailed`."""
    for nbytes in sizes:
        count = max(CALL_BYTES // nbytes, 1)
        with tempfile.TemporaryDirectory() as folder, _other_process(Path(folder), nbytes, count) as (bare, tier):
            loads = _Loads(bare, tier, nbytes, count)
            loads.tier(check=True)
            measured = interleave(
                {
                    "bare": loads.bare,
                    "tier": lambda loads=loads: loads.tier(check=False),  # type: ignore[misc]
                    "checked": lambda loads=loads: loads.tier(check=True),  # type: ignore[misc]
                },
                rounds=rounds,
            )
        rates = [_rate(nbytes * count, measured[name]) for name in ("bare", "tier", "checked")]
        shares = [f"{ratio(measured['bare'], measured[name]).median:.2f}" for name in ("tier", "checked")]
        yield (f"{nbytes >> 20} MiB", *rates, *shares)


def _rate(nbytes: int, rounds: Rounds) -> str:
    return f"{rate_gb_s(nbytes, rounds).median:.2f}"


class _Loads:
    """The cases; each returns its seconds."""

    def __init__(self, bare: socket.socket, tier: PeersTier, nbytes: int, count: int) -> None:
        self._socket, self._tier, self._keys = bare, tier, keys_of(count)
        room = memoryview(mmap.mmap(-1, nbytes * count))
        room[:] = bytes(room.nbytes)
        self._places = [room[at : at + nbytes] for at in range(0, room.nbytes, nbytes)]
        self._headers = [memoryview(bytearray(HEADER_BYTES)) for _ in self._keys]

    def bare(self) -> float:
        return timed(self._receive)

    def tier(self, *, check: bool) -> float:
        return timed(lambda: self._get(check=check))

    def _receive(self) -> None:
        self._socket.sendall(b"g")
        for place in self._places:
            at = 0
            while at < place.nbytes:
                count = self._socket.recv_into(place[at:])
                if not count:
                    raise BenchFailed("the peer node's process has ended")
                at += count

    def _get(self, *, check: bool) -> None:
        parts = [[header, place] for header, place in zip(self._headers, self._places, strict=True)]
        got = self._tier.get_into(self._keys, parts, deadline=time.monotonic() + _PATIENCE_S)
        expected = HEADER_BYTES + self._places[0].nbytes
        if any(each != expected for each in got):
            raise BenchFailed(f"a load from the peer node returned {got[0]} bytes of a value, expected {expected}")
        if check:
            for key, header, place in zip(self._keys, self._headers, self._places, strict=True):
                unseal(header, key, place, received=expected)


@contextmanager
def _other_process(folder: Path, nbytes: int, count: int) -> Iterator[tuple[socket.socket, PeersTier]]:
    token = folder / "token"
    token.write_text(os.urandom(16).hex())
    token.chmod(0o600)
    with _child(token, nbytes, count) as ports:
        tier = open_tier(_options(token, peers=[f"127.0.0.1:{ports[1]}"]), where="bench")
        try:
            with socket.create_connection(("127.0.0.1", int(ports[0])), _PATIENCE_S) as bare:
                yield bare, tier
        finally:
            tier.close()


@contextmanager
def sending_process(folder: Path, nbytes: int, count: int) -> Iterator[str]:
    """Yield the address of a process that sends `count` values of `nbytes` for each byte that it receives, to one
    connection."""
    token = folder / "sender"
    token.write_text(os.urandom(16).hex())
    token.chmod(0o600)
    with _child(token, nbytes, count) as ports:
        yield f"127.0.0.1:{ports[0]}"


def free_address() -> str:
    """Return a free address of this machine."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return f"127.0.0.1:{probe.getsockname()[1]}"


@contextmanager
def _child(token: Path, nbytes: int, count: int) -> Iterator[list[str]]:
    """The other process: yields its two ports."""
    command = [sys.executable, "-m", __spec__.name, str(token), str(nbytes), str(count)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        try:
            assert child.stdout is not None
            ports = child.stdout.readline().split()
            if len(ports) != 2:
                raise BenchFailed("the peer node's process did not start")
            yield ports
        finally:
            child.kill()


def _options(token: Path, *, listen: str = "", peers: Sequence[str] = ()) -> PeersOptions:
    return PeersOptions(token_file=str(token), listen=listen, peers=list(peers), ask_s=10.0)


def _hold(token: Path, nbytes: int, count: int) -> None:
    """The other process. Ends with its standard input."""
    node = HeldObjects(nbytes, count)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = free_address()
        tier = open_tier(_options(token, listen=address), where="bench")
        tier.attach(node)
        threading.Thread(target=_send, args=(listener, node), daemon=True).start()
        sys.stdout.write(f"{listener.getsockname()[1]} {address.rpartition(':')[2]}\n")
        sys.stdout.flush()
        sys.stdin.read()


def _send(listener: socket.socket, node: HeldObjects) -> None:
    sock, _ = listener.accept()
    while sock.recv(1):
        for value in node.objects.values():
            sock.sendall(value)


if __name__ == "__main__":
    _hold(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
