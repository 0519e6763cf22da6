"""The path over the wire, for engines that cannot map the arena: gathered objects travel as raw buffers.

Engine side; written as steps, see `transfer_steps.py`. A transfer travels in batches with a bounded number of bytes
under way, so that one is gathered while others are sent, and one is received while others are scattered.
"""

from __future__ import annotations

import contextlib
import mmap
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, NamedTuple, TypeVar

from kvf_cpu_gather.transfer_steps import Steps, planned, unless_cancelled
from kvframework.api.futures import Future
from kvframework.api.transport import ArenaRange, EngineDrivenLink, LoadOutcome, StoreOutcome, Transfer
from kvframework.errors import Cancelled, DeadlineExceeded, KVFrameworkError

if TYPE_CHECKING:
    import torch

    from kvf_cpu_gather.engine_memory import Moves


class Staging:
    """Pieces of memory of one size, allocated on demand and kept for the next store, `count` at most.

    A piece that was taken and is not given back is simply forgotten: a remaining reader keeps it alive.
    """

    def __init__(self) -> None:
        self._size = 0
        self._free: list[memoryview] = []

    def take(self, nbytes: int) -> memoryview:
        """Return a writable piece of at least `nbytes`, with any content."""
        if nbytes > self._size:
            self._size = nbytes
            self._free.clear()
        if self._free:
            return self._free.pop()
        memory = mmap.mmap(-1, self._size)
        with contextlib.suppress(OSError):
            memory.madvise(mmap.MADV_HUGEPAGE)
        return memoryview(memory)

    def give_back(self, piece: memoryview) -> None:
        """Take back a piece that has no reader any more."""
        if piece.nbytes == self._size:
            self._free.append(piece)

    def close(self) -> None:
        self._free.clear()


BATCH_BYTES = 8 << 20
BATCH_OBJECTS = 1024
WINDOW_BYTES = 64 << 20
WINDOW_BATCHES = 4
_ALIGNMENT = 64

T = TypeVar("T")


@dataclass(frozen=True)
class Batch:
    """Whole objects that travel together; `offsets` has the place of each in `nbytes` of staging memory."""

    places: Sequence[ArenaRange]
    offsets: Sequence[int]
    nbytes: int


def batches(places: Sequence[ArenaRange]) -> Iterator[Batch]:
    """Cut in order: as many objects as are small enough together, at least one."""
    taken: list[ArenaRange] = []
    offsets: list[int] = []
    end = 0
    for place in places:
        size = -(-place.length // _ALIGNMENT) * _ALIGNMENT
        if taken and (end + size > BATCH_BYTES or len(taken) == BATCH_OBJECTS):
            yield Batch(taken, offsets, end)
            taken, offsets, end = [], [], 0
        taken.append(place)
        offsets.append(end)
        end += size
    if taken:
        yield Batch(taken, offsets, end)


class Window(Generic[T]):
    """The batches under way, oldest first: bounded in number and bytes, but two are always allowed, so that they
    overlap."""

    def __init__(self) -> None:
        self._items: deque[tuple[T, int]] = deque()
        self._bytes = 0

    def __len__(self) -> int:
        return len(self._items)

    def __iter__(self) -> Iterator[T]:
        return (item for item, _ in self._items)

    def has_room(self, nbytes: int) -> bool:
        count = len(self._items)
        return count < 2 or (count < WINDOW_BATCHES and self._bytes + nbytes <= WINDOW_BYTES)

    def add(self, item: T, nbytes: int) -> None:
        self._items.append((item, nbytes))
        self._bytes += nbytes

    def take_oldest(self) -> T:
        item, nbytes = self._items.popleft()
        self._bytes -= nbytes
        return item


class _Sent(NamedTuple):
    answer: Future[StoreOutcome]
    staged: memoryview
    objects: int


class _Asked(NamedTuple):
    answer: Future[Sequence[memoryview]]
    places: Sequence[ArenaRange]


class WirePath:
    """Keeps its staging memory, a window of it at most, from one store to the next."""

    def __init__(self, link: EngineDrivenLink) -> None:
        self._link = link
        self._staging = Staging()

    def store(self, transfer: Transfer, moves: Moves, event: torch.Event | None) -> Steps[StoreOutcome]:
        """Send the objects that the server lacks; stops at the first object for which the server has no room, or once
        it does not answer or the store is cancelled; what it has confirmed by then counts. Raises
        `KVFrameworkError`."""
        missing = yield self._link.missing_chunks(transfer)
        firsts = transfer.first_chunks
        places = (_place(transfer, index) for index in missing)
        wanted = [place for place in places if place.chunk >= firsts[place.group]]
        held = sum(transfer.chunks - first for first in firsts)
        outcome = StoreOutcome(present=held - len(wanted))
        unsent = len(wanted)
        if event is not None and wanted:
            event.synchronize()
        window: Window[_Sent] = Window()
        try:
            for batch in batches(wanted):
                while not window.has_room(batch.nbytes):
                    outcome += yield from self._answered(window)
                if outcome.dropped:
                    break
                sent = yield from self._send(transfer, moves, batch)
                window.add(sent, batch.nbytes)
                unsent -= len(batch.places)
            while window:
                outcome += yield from self._answered(window)
        except (Cancelled, DeadlineExceeded) as error:
            return outcome + _so_far(window, unsent, error)
        return outcome + StoreOutcome(dropped=unsent)

    def load(self, transfer: Transfer, moves: Moves, event: torch.Event | None, skip_tokens: int) -> Steps[LoadOutcome]:
        """Load over the wire. Raises `KVFrameworkError`; the blocks have any content then."""
        with (yield from planned(self._link.prepare_load(transfer))) as plan:
            if plan.hit and event is not None:
                event.synchronize()
            wanted = [place for place in plan.ranges if moves.reaches(place, skip_tokens)]
            position = {(place.chunk, place.group): at for at, place in enumerate(plan.ranges)}
            window: Window[_Asked] = Window()
            for batch in batches(wanted):
                while not window.has_room(batch.nbytes):
                    yield from _received(moves, window, skip_tokens)
                positions = [position[place.chunk, place.group] for place in batch.places]
                window.add(_Asked(plan.receive(positions), batch.places), batch.nbytes)
            while window:
                yield from _received(moves, window, skip_tokens)
            moves.memory.wait()
            committed: LoadOutcome = yield plan.commit()
            return committed

    def close(self) -> None:
        self._staging.close()

    def _send(self, transfer: Transfer, moves: Moves, batch: Batch) -> Steps[_Sent]:
        staged = self._staging.take(batch.nbytes)
        groups = len(transfer.blocks)
        placed = list(zip(batch.places, batch.offsets, strict=True))
        moves.gather(staged, [ArenaRange(place.chunk, place.group, at, place.length) for place, at in placed])
        try:
            yield from unless_cancelled()
        except (Cancelled, GeneratorExit):
            self._staging.give_back(staged)
            raise
        buffers = [staged[at : at + place.length] for place, at in placed]
        objects = [place.chunk * groups + place.group for place in batch.places]
        return _Sent(self._link.store_chunks(transfer, objects, buffers), staged, len(objects))

    def _answered(self, window: Window[_Sent]) -> Steps[StoreOutcome]:
        """Return the server's answer to the oldest batch, which leaves the window."""
        answered: StoreOutcome = yield next(iter(window)).answer
        self._staging.give_back(window.take_oldest().staged)
        return answered


def _so_far(window: Window[_Sent], unsent: int, error: KVFrameworkError) -> StoreOutcome:
    """Return the outcome of batches whose answers the store no longer waits for: each that is here counts."""
    outcome = StoreOutcome(dropped=unsent, error=error.code)
    for sent in window:
        answered = sent.answer.query() and sent.answer.exception() is None
        outcome += sent.answer.result(0) if answered else StoreOutcome(unknown=sent.objects)
    return outcome


def _received(moves: Moves, window: Window[_Asked], skip_tokens: int) -> Steps[None]:
    """Scatter the oldest requested batch."""
    asked = window.take_oldest()
    buffers = yield asked.answer
    if not buffers:
        raise PinsLost("the server's pins on the objects expired before the end of the load")
    moves.scatter_each(zip(buffers, asked.places, strict=True), skip_tokens)


def _place(transfer: Transfer, index: int) -> ArenaRange:
    chunk, group = divmod(index, len(transfer.blocks))
    return ArenaRange(chunk, group, 0, transfer.registration.desc.groups[group].nbytes)


class PinsLost(KVFrameworkError, code="kvf_cpu_gather.pins_lost"):
    """A load took longer than `retrieve_lease_s`.

    What to do: nothing: the load is a miss. If transfers take that long, raise `[server] retrieve_lease_s`."""
