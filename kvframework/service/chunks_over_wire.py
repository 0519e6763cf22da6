"""The wire path: STORE_CPU_CHUNKS and RETRIEVE_CPU_CHUNKS, for clients that cannot map the arena.

Requests are checked and answered on the serving thread. A store's bytes are copied into the arena by separate threads,
without the interpreter lock; a retrieve copies nothing: ZMQ sends from the arena.

A store's reservation belongs to the server, not to the client: all its bytes have arrived before it begins, so that a
client that stalls or dies changes nothing."""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections import Counter, deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise

import msgspec

from kvframework.api.copying import copy_past_caches
from kvframework.api.futures import Future, Promise
from kvframework.api.keys import ChunkContent
from kvframework.api.requests import ClientInfo, Handler, Message, Reply
from kvframework.api.transport import StoreOutcome
from kvframework.errors import BadRange, LeaseUnknown, MalformedFrames, MessageTooLarge
from kvframework.service.keys import KeyGrid, prompt_part
from kvframework.service.records import Plan, Transfers
from kvframework.storage.l1.leases import INTERNAL_OWNER, PinLease
from kvframework.wire import messages as m
from kvframework.wire.frames import MAX_BUFFER_BYTES, MAX_BUFFERS
from kvframework.wire.protocol import REQUESTS
from kvframework.wire.transfer_blocks import INDEX_BYTES, pack_indices, unpack_indices

log = logging.getLogger(__name__)

_POLL_S = 0.005


@dataclass(eq=False)
class _Send:
    """One answer that ZMQ sends: the server's own pin on its objects, and the number of views not yet sent."""

    client: int
    nbytes: int
    pin: PinLease
    unsent: int


class SendPins:
    """Makes views of the arena and notices when the last reference to each has ended. Thread-safe.

    ZMQ releases a buffer, in any thread, once it has sent it or given up. Until then the arena must stay mapped, and
    the piece must keep its object: a client that reads slowly must not receive bytes that others store there later."""

    def __init__(self, arena: memoryview) -> None:
        self._arena = arena
        self._lock = threading.Lock()  # guards the counts, and is never taken where a view is finalized
        self.unsent_bytes: Counter[int] = Counter()  # by client
        # Views that are not taken back, and the answers of those among them that ZMQ has released, in any thread.
        self._views = 0
        self._back: deque[_Send] = deque()

    def __len__(self) -> int:
        """The number of views that are not sent yet."""
        return self._views - len(self._back)

    def views(self, client: int, places: Sequence[tuple[int, int]], pin: PinLease) -> list[memoryview]:
        """Return views of (offset, length), at least one, to pass to ZMQ. `take_sent` later returns `pin`."""
        send = _Send(client, sum(length for _, length in places), pin, len(places))
        views = [self._arena[offset : offset + length] for offset, length in places]
        with self._lock:
            self.unsent_bytes[client] += send.nbytes
            self._views += len(views)
        for view in views:
            weakref.finalize(view, self._back.append, send).atexit = False
        return views

    def take_sent(self) -> list[PinLease]:
        """Return the pins of answers whose views have all been sent, each once. The caller unpins them."""
        pins: list[PinLease] = []
        with self._lock:
            for _ in range(len(self._back)):
                send = self._back.popleft()
                self._views -= 1
                send.unsent -= 1
                if not send.unsent:
                    pins.append(send.pin)
                    self.unsent_bytes[send.client] -= send.nbytes
                    if not self.unsent_bytes[send.client]:
                        del self.unsent_bytes[send.client]
        return pins


_RETURN_S = 0.3
# Per client: bytes that it does not receive stay pinned.
MAX_UNSENT_BYTES = 2 * MAX_BUFFER_BYTES
_Copies = Sequence[tuple[int, memoryview]]


class ChunkTransfers:
    """Moves objects between frames and the arena. `close` after the last request has been answered."""

    def __init__(self, transfers: Transfers, *, workers: int) -> None:
        self._table = transfers.table
        self._transfers = transfers
        self._send_pins = SendPins(self._table.arena)
        self._pool = ThreadPoolExecutor(workers, thread_name_prefix="kvf-copy")

    def handlers(self) -> list[Handler]:  # type: ignore[type-arg]
        return [
            Handler(REQUESTS["STORE_CPU_CHUNKS"], self._store),
            Handler(REQUESTS["RETRIEVE_CPU_CHUNKS"], self._retrieve),
        ]

    def tick(self) -> None:
        for pin in self._send_pins.take_sent():
            self._table.unpin(pin.id, owner=INTERNAL_OWNER)

    def settle(self) -> bool:
        """Unpin objects that ZMQ sends within a moment; return whether that was all. Blocks for that moment."""
        until = time.monotonic() + _RETURN_S
        while len(self._send_pins) and time.monotonic() < until:
            time.sleep(_POLL_S)
        self.tick()
        return not len(self._send_pins)

    def close(self) -> None:
        """Wait for the running copies (others never begin) and for bytes that ZMQ still sends. Blocks for a moment."""
        self._pool.shutdown(cancel_futures=True)
        if not self.settle():
            log.error("the server stops while ZMQ still sends %d parts of L1", len(self._send_pins))

    def _store(
        self, client: ClientInfo, payload: m.StoreCpuChunks, buffers: Sequence[memoryview]
    ) -> m.ChunksStored | Future[Message]:
        begun = self._transfers.begun("STORE", client, payload.key, "wire")
        grid = self._transfers.engine_driven(client, payload.instance_id, payload.key)
        if not payload.objects and not buffers:
            return self._missing(grid)
        self._transfers.check_key(payload.key, grid.desc.chunk_tokens, payload.content)
        sent = _checked_objects(grid, payload.objects, buffers)
        result = self._table.reserve_some(
            grid.sized(),
            sent,
            owner=INTERNAL_OWNER,
            request_id=payload.key.request_id,
            lease_s=None,
            client=client.session_id,
            prompt=prompt_part(payload.key, grid, range(len(grid.flat))),
        )
        copies = [(offset, sent[index]) for index, offset in result.placed]
        plan = self._transfers.reserved(begun, payload.key, grid, result)
        if not plan.lease:
            return m.ChunksStored(plan.outcome)
        # The copy cannot be stopped; a cancel waits for its end.
        future: Promise[Message] = Promise(lambda: None)
        try:
            self._pool.submit(self._fill, future, plan, copies, payload.content)
        except BaseException:
            self._table.abort(plan.lease, owner=INTERNAL_OWNER)
            raise
        return future

    def _missing(self, grid: KeyGrid) -> m.ChunksStored:
        # A use: the room for the missing ones is not made of the present ones, which would end the prefix.
        here = self._table.use_present(grid.flat)
        missing = [index for index, present in enumerate(here) if not present]
        return m.ChunksStored(StoreOutcome(present=len(here) - len(missing)), pack_indices(missing))

    def _fill(self, future: Promise[Message], plan: Plan, copies: _Copies, content: ChunkContent | None) -> None:
        """Copy the bytes, commit, and answer (in a copy thread)."""
        try:
            for offset, source in copies:
                copy_past_caches(self._table.arena[offset : offset + source.nbytes], source)
            stored = len(self._table.commit(plan.lease, owner=INTERNAL_OWNER))
        except BaseException as error:
            future.set_exception(error)
            self._table.abort(plan.lease, owner=INTERNAL_OWNER)
            self._transfers.end(plan.transfer, ok=False)
            raise
        self._transfers.end(plan.transfer, content, ok=True)
        future.set_result(m.ChunksStored(msgspec.structs.replace(plan.outcome, stored=stored)))

    def _retrieve(self, client: ClientInfo, payload: m.RetrieveCpuChunks, _buffers: object) -> m.ChunksSent | Reply:
        try:
            pinned = self._table.pinned(payload.lease, owner=client.session_id)
        except LeaseUnknown:
            if not self._transfers.lapsed(payload.lease, client.session_id):
                raise
            return m.ChunksSent(False)
        _check_count(payload.objects)
        wanted = unpack_indices(payload.objects, where="objects")
        if not wanted or max(wanted) >= len(pinned):
            fact = f"object {max(wanted)}" if wanted else "no objects"
            raise BadRange(fact, where="objects", available=f"0 to {len(pinned) - 1} under this lease")
        places = [pinned[index] for index in wanted]
        size = sum(place.length for place in places)
        if size > MAX_BUFFER_BYTES:
            raise MessageTooLarge(
                f"the request asks for {len(wanted)} objects of {size} bytes",
                where="objects",
                available=f"at most {MAX_BUFFER_BYTES} bytes per message",
                hint="ask for fewer objects at once",
            )
        self.tick()
        unsent = self._send_pins.unsent_bytes[client.session_id]
        if unsent + size > MAX_UNSENT_BYTES:
            raise MessageTooLarge(
                f"{unsent} bytes are being sent to this client, which asked for {size} more",
                where="objects",
                available=f"at most {MAX_UNSENT_BYTES} bytes",
                hint="receive those chunks before asking for more",
            )
        # The client's own pins lapse, however slowly it reads.
        pin = self._table.pin_again(payload.lease, wanted, owner=client.session_id)
        views = self._send_pins.views(client.session_id, [(place.offset, place.length) for place in places], pin)
        return Reply(m.ChunksSent(True), views)


def _checked_objects(grid: KeyGrid, packed: bytes, buffers: Sequence[memoryview]) -> dict[int, memoryview]:
    """Return the buffers by object. Raises `MalformedFrames` for a wrong number of buffers or a wrong length,
    `BadRange` for an object that the key does not name, or out of order."""
    _check_count(packed)
    objects = unpack_indices(packed, where="objects")
    if len(objects) != len(buffers):
        raise MalformedFrames(
            f"found {len(buffers)} buffers", where="STORE_CPU_CHUNKS", available=f"{len(objects)}, one for each object"
        )
    if objects[-1] >= len(grid.flat) or any(a >= b for a, b in pairwise(objects)):
        fact = "the object indices are out of range or out of order"
        raise BadRange(fact, where="objects", available=f"ascending indices, 0 to {len(grid.flat) - 1} for this key")
    groups = grid.row_groups
    for index, buffer in zip(objects, buffers, strict=True):
        expected = groups[index % len(groups)].nbytes
        if buffer.nbytes != expected:
            raise MalformedFrames(
                f"the buffer of object {index} has {buffer.nbytes} bytes",
                where="STORE_CPU_CHUNKS",
                available=f"{expected} in layer group {index % len(groups)}",
            )
    return dict(zip(objects, buffers, strict=True))


def _check_count(packed: bytes) -> None:
    """Check the length before the numbers are decoded. Raises `MessageTooLarge`."""
    if len(packed) > MAX_BUFFERS * INDEX_BYTES:
        raise MessageTooLarge(
            f"the request names {len(packed) // INDEX_BYTES} objects",
            where="objects",
            available=f"{MAX_BUFFERS} a message",
        )
