"""Faults to test with: `FaultyTier` is a tier whose calls and values meet faults that follow from a seed, in the
caller's threads; `FaultProxy` stands between a tier and its store, and spoils the wire."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import shutil
import socket
import struct
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from types import TracebackType
from typing import NamedTuple, TypeVar

from kvframework.api.tier import Outcome, PackedKey, Tier, TierEntry, TierUsage
from kvframework.errors import TierError

__all__ = ["TIER_FAULTS", "WIRE_FAULTS", "FaultProxy", "FaultyTier"]

TIER_FAULTS = {
    "slow": "a call takes some milliseconds longer",
    "short": "a value is read only in part, over what the buffer held before, or is stored in part as if whole",
    "flip": "one bit of a value is another when it is read, or when it is stored",
    "refused": "a call raises TierError and does nothing",
    "lost": "a value is said to be stored and is not, or said to be missing and is there",
}

R = TypeVar("R", bound="int | Outcome")
Parts = Sequence[Sequence[memoryview]]
_PIECE = 1 << 18
_RESET = struct.pack("ii", 1, 0)  # linger for no time: a close sends a reset
_CONNECT_S = 1.0
_SWITCH_S = 10.0
WIRE_FAULTS = {
    "slow": "every piece of a reply waits for `amount` seconds",
    "cut": "a connection is closed once `amount` bytes of replies went through it",
    "flip": "one bit of every `amount`-th byte of a connection's replies is another",
    "refuse": "connections are reset, the open ones at once and new ones as they come",
    "stall": "nothing passes, and nothing is closed",
    "reset": "a connection is reset when the first byte of a reply comes",
}
_AMOUNTS = {"slow": 0.01, "cut": 100.0, "flip": 100.0}
Address = tuple[str, int] | str


class FaultyTier(Tier):
    """The tier `inner`, whose calls and values meet each of `kinds` with probability `rate`. Thread-safe if `inner` is.

    `stop` ends the faults; `injected` counts by kind the faults that took place. With the same seed and the same calls,
    made in one thread, the faults are the same. `close` closes `inner`.
    """

    def __init__(
        self,
        inner: Tier,
        seed: int,
        kinds: Collection[str] = tuple(TIER_FAULTS),
        *,
        rate: float = 0.2,
        slow_s: float = 0.005,
    ) -> None:
        unknown = sorted(set(kinds) - TIER_FAULTS.keys())
        if unknown:
            raise ValueError(f"no such fault: {', '.join(unknown)}; there are {', '.join(TIER_FAULTS)}")
        self.name = inner.name
        self.injected: Counter[str] = Counter()
        self._inner = inner
        self._kinds = frozenset(kinds)
        self._rate = rate
        self._slow_s = slow_s
        self._random = random.Random(seed)  # noqa: S311  faults, no secrets
        self._lock = threading.Lock()

    def stop(self) -> None:
        """End the faults: later calls reach `inner` unchanged. Values that were stored wrongly stay so."""
        self._kinds = frozenset()

    def contains(self, keys: Sequence[PackedKey], *, deadline: float) -> list[Outcome]:
        self._call()
        return [self._perhaps_lost(each) for each in self._inner.contains(keys, deadline=deadline)]

    def get_into(self, keys: Sequence[PackedKey], parts: Parts, *, deadline: float) -> list[int | Outcome]:
        self._call()
        unread = [[bytes(part) for part in each] if self._hits("short") else None for each in parts]
        outcomes = self._inner.get_into(keys, parts, deadline=deadline)
        for index, (each, before, outcome) in enumerate(zip(parts, unread, outcomes, strict=True)):
            if not isinstance(outcome, Outcome):
                if before is not None:
                    outcomes[index] = self._unread(each, before, outcome)
                if self._hits("flip"):
                    self._flip(each)
        return [self._perhaps_lost(each) for each in outcomes]

    def put(self, keys: Sequence[PackedKey], parts: Parts, *, deadline: float) -> list[Outcome]:
        self._call()
        kept = [index for index in range(len(keys)) if not self._hits("lost")]
        sent = [self._perhaps_spoilt(parts[index]) for index in kept]
        outcomes = [Outcome.STORED] * len(keys)
        for index, outcome in zip(kept, self._inner.put([keys[i] for i in kept], sent, deadline=deadline), strict=True):
            outcomes[index] = outcome
        return outcomes

    def delete(self, keys: Sequence[PackedKey], *, deadline: float) -> list[Outcome]:
        self._call()
        return self._inner.delete(keys, deadline=deadline)

    def touch(self, keys: Sequence[PackedKey], *, deadline: float) -> None:
        self._call()
        self._inner.touch(keys, deadline=deadline)

    def usage(self, *, deadline: float) -> TierUsage:
        self._call()
        return self._inner.usage(deadline=deadline)

    def scan(self, *, deadline: float) -> Iterator[TierEntry]:
        self._call()
        return self._inner.scan(deadline=deadline)

    def capabilities(self) -> frozenset[str]:
        return self._inner.capabilities()

    def ping(self, *, deadline: float) -> None:
        self._call()
        self._inner.ping(deadline=deadline)

    def close(self) -> None:
        self._inner.close()

    def _hits(self, kind: str) -> bool:
        with self._lock:
            hit = kind in self._kinds and self._random.random() < self._rate
            self.injected[kind] += hit
        return hit

    def _below(self, number: int) -> int:
        with self._lock:
            return self._random.randrange(number)

    def _call(self) -> None:
        if self._hits("slow"):
            time.sleep(self._slow_s)
        if self._hits("refused"):
            raise TierError("refused by the test", where=self.name)

    def _perhaps_lost(self, outcome: R) -> R | Outcome:
        there = outcome is Outcome.FOUND or not isinstance(outcome, Outcome)
        return Outcome.MISSING if there and self._hits("lost") else outcome

    def _perhaps_spoilt(self, parts: Sequence[memoryview]) -> Sequence[memoryview]:
        short, flip = self._hits("short"), self._hits("flip")
        if not (short or flip):
            return parts
        value = bytearray(b"".join(parts))
        if flip:
            self._flip([memoryview(value)])
        return [memoryview(value)[: self._below(len(value)) if short and value else None]]

    def _unread(self, parts: Sequence[memoryview], before: Sequence[bytes], received: int) -> int:
        """Restore the former content of `parts` from a random byte on, and return the number of bytes before it."""
        kept = first = self._below(max(received, 1))
        for part, old in zip(parts, before, strict=True):
            at = min(first, part.nbytes)
            part[at:] = old[at:]
            first -= at
        return kept

    def _flip(self, parts: Sequence[memoryview]) -> None:
        total = sum(part.nbytes for part in parts)
        if total:
            at = self._below(total)
            for part in parts:
                if at < part.nbytes:
                    part[at] ^= 1 << self._below(8)
                    return
                at -= part.nbytes


class Fault(NamedTuple):
    """A kind of `WIRE_FAULTS` and its amount; the kind is "" for no fault."""

    kind: str
    amount: float


class _Connection:
    """A client's connection to the proxy, and the proxy's to the target. `count` is of bytes of replies since the last
    switch."""

    def __init__(self, outer: asyncio.StreamWriter, inner: asyncio.StreamWriter) -> None:
        self.writers = (outer, inner)
        self.count = 0

    def reset(self) -> None:
        for writer in self.writers:
            _reset(writer)


class FaultProxy:
    """A proxy in front of `target`, a pair of host and port or the path of a Unix socket; it listens on the same kind
    of socket. The tier connects to `address`. Use it as a context manager.

    One fault at a time, from `inject` to `heal`; `injected` counts how often each kind took place. A switch affects
    open connections too, and restarts the count of their bytes. Only one thread may switch faults at a time.
    """

    def __init__(self, target: Address) -> None:
        self.injected: Counter[str] = Counter()
        self._target = target
        self._directory = ""
        self._listener = self._listen()
        self.address: Address = self._listener.getsockname()
        self._fault = Fault("", 0.0)
        self._connections: set[_Connection] = set()
        self._loop = asyncio.new_event_loop()
        self._stop, self._flows = asyncio.Event(), asyncio.Event()
        self._flows.set()
        self._thread = threading.Thread(target=self._run, name="fault proxy", daemon=True)

    @property
    def port(self) -> int:
        """The TCP port; 0 for a Unix socket."""
        return 0 if isinstance(self.address, str) else self.address[1]

    def inject(self, kind: str, amount: float | None = None) -> None:
        """Switch to a fault of `WIRE_FAULTS`; returns once the fault is active. Raises `ValueError` for an unknown
        fault.
        """
        if kind not in WIRE_FAULTS:
            raise ValueError(f"no such fault: {kind!r}; there are {', '.join(WIRE_FAULTS)}")
        self._switch(Fault(kind, _AMOUNTS.get(kind, 0.0) if amount is None else amount))

    def heal(self) -> None:
        """End the fault: stalled connections continue, and new connections pass unchanged."""
        self._switch(Fault("", 0.0))

    def start(self) -> None:
        """Start to relay; connections made earlier wait until then."""
        self._thread.start()

    def close(self) -> None:
        """Close all connections and end the thread. Idempotent; blocks for a moment."""
        if self._loop.is_closed():
            return
        if self._thread.ident is not None:
            self._loop.call_soon_threadsafe(self._stop.set)
            self._thread.join()
        self._loop.close()
        self._listener.close()
        if self._directory:
            shutil.rmtree(self._directory, ignore_errors=True)

    def __enter__(self) -> FaultProxy:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _listen(self) -> socket.socket:
        if not isinstance(self._target, str):
            return socket.create_server(("127.0.0.1", 0))
        self._directory = tempfile.mkdtemp(prefix="kvf-proxy-")
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listener.bind(os.path.join(self._directory, "proxy.sock"))
        listener.listen()
        return listener

    def _switch(self, fault: Fault) -> None:
        asyncio.run_coroutine_threadsafe(self._begin(fault), self._loop).result(_SWITCH_S)

    def _run(self) -> None:
        self._loop.run_until_complete(self._serve())

    async def _serve(self) -> None:
        if isinstance(self._target, str):
            server = await asyncio.start_unix_server(self._accepted, sock=self._listener)
        else:
            server = await asyncio.start_server(self._accepted, sock=self._listener)
        await self._stop.wait()
        server.close()
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _begin(self, fault: Fault) -> None:
        self._fault = fault
        for connection in self._connections:
            connection.count = 0
            if fault.kind == "refuse":
                connection.reset()
        if fault.kind in ("refuse", "stall"):
            self.injected[fault.kind] += len(self._connections)
        if fault.kind == "stall":
            self._flows.clear()
        else:
            self._flows.set()

    async def _accepted(self, reader: asyncio.StreamReader, outer: asyncio.StreamWriter) -> None:
        if self._fault.kind in ("refuse", "stall"):
            self.injected[self._fault.kind] += 1
        if self._fault.kind == "refuse":
            _reset(outer)
            return
        try:
            inner_reader, inner = await asyncio.wait_for(self._opened(), _CONNECT_S)
        except (OSError, asyncio.TimeoutError):
            _reset(outer)
            return
        connection = _Connection(outer, inner)
        self._connections.add(connection)
        try:
            with contextlib.suppress(OSError):
                await asyncio.gather(
                    self._relay(connection, reader, inner, is_reply=False),
                    self._relay(connection, inner_reader, outer, is_reply=True),
                )
        finally:
            self._connections.discard(connection)
            for writer in connection.writers:
                writer.close()

    async def _opened(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        if isinstance(self._target, str):
            return await asyncio.open_unix_connection(self._target)
        return await asyncio.open_connection(*self._target)

    async def _relay(
        self, connection: _Connection, source: asyncio.StreamReader, sink: asyncio.StreamWriter, *, is_reply: bool
    ) -> None:
        """One direction, piece by piece. Raises `ConnectionError` once a fault has ended the connection."""
        while data := await source.read(_PIECE):
            await self._flows.wait()
            if is_reply:
                data = await self._spoilt(connection, data)
            sink.write(data)
            await sink.drain()
            if is_reply and self._fault.kind == "cut" and connection.count >= self._fault.amount:
                self.injected["cut"] += 1
                raise ConnectionAbortedError
        sink.write_eof()

    async def _spoilt(self, connection: _Connection, data: bytes) -> bytes:
        """Apply the fault to a piece of a reply."""
        fault, first = self._fault, connection.count
        connection.count += len(data)
        if fault.kind == "slow":
            self.injected["slow"] += 1
            await asyncio.sleep(fault.amount)
        elif fault.kind == "cut":
            return data[: max(int(fault.amount) - first, 0)]
        elif fault.kind == "flip":
            every, spoilt = max(int(fault.amount), 1), bytearray(data)
            for at in range(every - 1 - first % every, len(data), every):
                self.injected["flip"] += 1
                spoilt[at] ^= 0x10
            return bytes(spoilt)
        elif fault.kind == "reset":
            self.injected["reset"] += 1
            connection.reset()
            raise ConnectionAbortedError
        return data


def _reset(writer: asyncio.StreamWriter) -> None:
    """Close a connection by a TCP reset; a Unix socket is closed plainly."""
    with contextlib.suppress(OSError):
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
    writer.transport.abort()
