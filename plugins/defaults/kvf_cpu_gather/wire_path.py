"""The path over the wire, for engines that cannot map the arena: gathered objects travel as raw buffers.

Engine side; written as steps, see `transfer_steps.py`. A transfer travels in batches with a bounded number of bytes
under way, so that one is gathered while others are sent, and one is received while others are scattered.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from kvf_cpu_gather.moves import Moves
from kvf_cpu_gather.transfer_steps import Steps, planned, unless_cancelled
from kvf_cpu_gather.wire_batches import Batch, Window, batches
from kvf_cpu_gather.wire_staging import Staging
from kvframework.api.futures import Future
from kvframework.api.transport import ArenaRange, EngineDrivenLink, LoadOutcome, StoreOutcome, Transfer
from kvframework.errors import Cancelled, DeadlineExceeded, KVFrameworkError

if TYPE_CHECKING:
    import torch


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
        wanted = [
            place for place in (_place(transfer, index) for index in missing) if place.chunk >= firsts[place.group]
        ]
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
        moves.gather(
            staged,
            [
                ArenaRange(place.chunk, place.group, offset, place.length)
                for place, offset in zip(batch.places, batch.offsets, strict=True)
            ],
        )
        try:
            yield from unless_cancelled()
        except (Cancelled, GeneratorExit):
            self._staging.give_back(staged)
            raise
        buffers = [
            staged[offset : offset + place.length] for place, offset in zip(batch.places, batch.offsets, strict=True)
        ]
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
        raise PinsLost("the server did not keep the objects for long enough")
    moves.scatter_each(zip(buffers, asked.places, strict=True), skip_tokens)


def _place(transfer: Transfer, index: int) -> ArenaRange:
    chunk, group = divmod(index, len(transfer.blocks))
    return ArenaRange(chunk, group, 0, transfer.registration.desc.groups[group].nbytes)


class PinsLost(KVFrameworkError):
    """A retrieve took longer than its lease.

    What to do: it is a miss; raise `[server] retrieve_lease_s` if transfers take that long."""

    code = "kvf_cpu_gather.pins_lost"
