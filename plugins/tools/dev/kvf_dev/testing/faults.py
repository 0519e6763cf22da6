"""Faults to test with: `FaultProxy` stands between a tier and its store, and spoils the wire."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
import threading
from collections import Counter
from typing import NamedTuple

__all__ = ["WIRE_FAULTS", "FaultProxy"]

_PIECE = 1 << 18
_RESET = struct.pack("ii", 1, 0)  # linger for no time: a close sends a reset
_CONNECT_S = 1.0
_SWITCH_S = 10.0
WIRE_FAULTS = {
    "slow": "the proxy delays every piece of a reply by `amount` seconds",
    "cut": "the proxy closes a connection after `amount` bytes of replies",
    "flip": "the proxy flips one bit of every `amount`-th byte of a connection's replies",
    "refuse": "the proxy resets all open connections at once, and every new connection",
    "stall": "the proxy forwards no bytes and closes no connection",
    "reset": "the proxy resets a connection when the first byte of a reply arrives",
}
_AMOUNTS = {"slow": 0.01, "cut": 100.0, "flip": 100.0}
Address = tuple[str, int]


class Fault(NamedTuple):
    """A kind of `WIRE_FAULTS` and its amount; the kind is "" for no fault."""

    kind: str
    amount: float


class _Connection:
    """A client's connection, and the proxy's to the target. `count` is of bytes of replies since the last switch."""

    def __init__(self, outer: asyncio.StreamWriter, inner: asyncio.StreamWriter) -> None:
        self.writers = (outer, inner)
        self.count = 0

    def reset(self) -> None:
        for writer in self.writers:
            _reset(writer)


class FaultProxy:
    """A proxy in front of `target`, a pair of host and port. The tier connects to `address`. Use it as a context
    manager.

    One fault at a time, from `inject` to `heal`; `injected` counts how often each kind took place. A switch affects
    open connections too, and restarts the count of their bytes. Only one thread may switch faults at a time.
    """

    def __init__(self, target: Address) -> None:
        self.injected: Counter[str] = Counter()
        self._target = target
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address: Address = self._listener.getsockname()
        self._fault = Fault("", 0.0)
        self._connections: set[_Connection] = set()
        self._loop = asyncio.new_event_loop()
        self._stop, self._flows = asyncio.Event(), asyncio.Event()
        self._flows.set()
        self._thread = threading.Thread(target=self._run, name="fault proxy", daemon=True)

    @property
    def port(self) -> int:
        """The port that clients connect to."""
        return self.address[1]

    def inject(self, kind: str, amount: float | None = None) -> None:
        """Switch to a fault of `WIRE_FAULTS`, which is active on return. Raises `ValueError` for an unknown one."""
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

    def __enter__(self) -> FaultProxy:
        self.start()
        return self

    def __exit__(self, *_exc: object) -> None:
        self.close()

    def _switch(self, fault: Fault) -> None:
        asyncio.run_coroutine_threadsafe(self._begin(fault), self._loop).result(_SWITCH_S)

    def _run(self) -> None:
        self._loop.run_until_complete(self._serve())

    async def _serve(self) -> None:
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
            inner_reader, inner = await asyncio.wait_for(asyncio.open_connection(*self._target), _CONNECT_S)
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
    with contextlib.suppress(OSError):
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
    writer.transport.abort()
