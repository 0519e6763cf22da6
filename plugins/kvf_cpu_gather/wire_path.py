"""Owns the way over the wire, for engines that cannot map the arena: gathered objects travel as raw buffers.

Engine side, blocking. A transfer travels in batches with a bounded number of bytes under way, so that one is gathered
while others are sent, and one is received while others are scattered.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from kvf_cpu_gather.leases import given_back
from kvf_cpu_gather.outcomes import plus
from kvf_cpu_gather.staging import Staging
from kvf_cpu_gather.transfer import Transfer
from kvf_cpu_gather.window import Batch, Window, batches
from kvframework.api import ArenaRange, CacheKey, EngineLink, MessagingFuture, RetrievePlan, StoreOutcome
from kvframework.errors import KVFrameworkError

# The link itself ends every wait; this is for one that is being closed.
_LAST_RESORT_S = 120.0


class _Sent(NamedTuple):
    answer: MessagingFuture[StoreOutcome]
    staged: memoryview


class _Asked(NamedTuple):
    answer: MessagingFuture[Sequence[memoryview]]
    places: Sequence[ArenaRange]


class WirePath:
    """Keeps its staging memory, a window of it at most, from one store to the next."""

    def __init__(self, link: EngineLink) -> None:
        self._link = link
        self._staging = Staging()

    def store(self, transfer: Transfer, key: CacheKey, instance_id: int, event: torch.Event | None) -> StoreOutcome:
        """Sends what the server lacks; stops at the first object that it has no room for. Raises `KVFrameworkError`;
        what had been answered for stays stored."""
        wanted = [
            place
            for place in (_place(transfer, index) for index in self._link.missing_chunks(key, instance_id))
            if place.chunk >= transfer.first_chunks[place.group]
        ]
        held = sum(transfer.chunks - first for first in transfer.first_chunks)
        outcome = StoreOutcome(present=held - len(wanted))
        unsent = len(wanted)
        if event is not None and wanted:
            event.synchronize()
        window: Window[_Sent] = Window()
        for batch in batches(wanted):
            while not window.has_room(batch.nbytes):
                outcome = plus(outcome, self._answer(window.take_oldest()))
            if outcome.dropped:
                break
            window.add(self._send(transfer, key, instance_id, batch), batch.nbytes)
            unsent -= len(batch.places)
        while window:
            outcome = plus(outcome, self._answer(window.take_oldest()))
        return plus(outcome, StoreOutcome(dropped=unsent))

    def retrieve(
        self, transfer: Transfer, key: CacheKey, instance_id: int, event: torch.Event | None, skip_tokens: int
    ) -> bool:
        """False for a miss or a lost pin. Raises `KVFrameworkError`; the blocks hold anything then."""
        plan = self._link.prepare_retrieve(key, instance_id)
        if not plan.hit:
            return False
        with given_back(self._link.commit_retrieve, plan.lease):
            transfer.check_complete(plan.ranges)
            if event is not None:
                event.synchronize()
            for asked in self._received(plan, [p for p in plan.ranges if transfer.reaches(p, skip_tokens)]):
                _scatter(transfer, asked, skip_tokens)
            transfer.memory.wait()
        return self._link.commit_retrieve(plan.lease)

    def close(self) -> None:
        self._staging.close()

    def _send(self, transfer: Transfer, key: CacheKey, instance_id: int, batch: Batch) -> _Sent:
        staged = self._staging.take(batch.nbytes)
        groups = transfer.groups
        with torch.inference_mode():
            transfer.gather(
                staged,
                [
                    ArenaRange(place.chunk, place.group, offset, place.length)
                    for place, offset in zip(batch.places, batch.offsets, strict=True)
                ],
            )
        buffers = [
            staged[offset : offset + place.length] for place, offset in zip(batch.places, batch.offsets, strict=True)
        ]
        objects = [place.chunk * groups + place.group for place in batch.places]
        return _Sent(self._link.store_chunks(key, instance_id, objects, buffers), staged)

    def _answer(self, sent: _Sent) -> StoreOutcome:
        outcome = sent.answer.result(_LAST_RESORT_S)
        self._staging.give_back(sent.staged)
        return outcome

    def _received(self, plan: RetrievePlan, wanted: Sequence[ArenaRange]) -> Iterator[_Asked]:
        """Asks for the objects a window ahead and gives them out as they have come, in order."""
        position = {(place.chunk, place.group): at for at, place in enumerate(plan.ranges)}
        window: Window[_Asked] = Window()
        for batch in batches(wanted):
            while not window.has_room(batch.nbytes):
                yield window.take_oldest()
            positions = [position[place.chunk, place.group] for place in batch.places]
            window.add(_Asked(self._link.retrieve_chunks(plan, positions), batch.places), batch.nbytes)
        while window:
            yield window.take_oldest()


def _scatter(transfer: Transfer, asked: _Asked, skip_tokens: int) -> None:
    buffers = asked.answer.result(_LAST_RESORT_S)
    if not buffers:
        raise PinsLost("the server did not keep the objects for long enough")

    with torch.inference_mode():
        transfer.scatter_each(zip(buffers, asked.places, strict=True), skip_tokens)


def _place(transfer: Transfer, index: int) -> ArenaRange:
    chunk, group = divmod(index, transfer.groups)
    return ArenaRange(chunk, group, 0, transfer.desc.groups[group].nbytes)


class PinsLost(KVFrameworkError):
    """A retrieve took longer than its lease.

    What to do: it is a miss; raise `[server] retrieve_lease_s` if transfers take that long."""

    code = "kvf_cpu_gather.pins_lost"
