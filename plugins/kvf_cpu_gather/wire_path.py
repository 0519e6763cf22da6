"""Owns the way over the wire, for engines that cannot map the arena: gathered objects travel as raw buffers.

Engine side; steps, see `steps.py`. A transfer travels in batches with a bounded number of bytes under way, so that one
is gathered while others are sent, and one is received while others are scattered.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from kvf_cpu_gather.leases import given_back, planned
from kvf_cpu_gather.outcomes import InDoubt, plus
from kvf_cpu_gather.staging import Staging
from kvf_cpu_gather.steps import Steps, unless_cancelled
from kvf_cpu_gather.transfer import Transfer
from kvf_cpu_gather.window import Batch, Window, batches
from kvframework.api import ArenaRange, CacheKey, EngineLink, MessagingFuture, StoreOutcome
from kvframework.errors import DeadlineExceeded, KVFrameworkError


class _Sent(NamedTuple):
    answer: MessagingFuture[StoreOutcome]
    staged: memoryview
    objects: int


class _Asked(NamedTuple):
    answer: MessagingFuture[Sequence[memoryview]]
    places: Sequence[ArenaRange]


class WirePath:
    """Keeps its staging memory, a window of it at most, from one store to the next."""

    def __init__(self, link: EngineLink) -> None:
        self._link = link
        self._staging = Staging()

    def store(
        self, transfer: Transfer, key: CacheKey, instance_id: int, event: torch.Event | None
    ) -> Steps[StoreOutcome]:
        """Sends what the server lacks; stops at the first object that it has no room for. Raises `KVFrameworkError`,
        and `InDoubt` if objects were sent and not answered for in time; what had been answered for stays stored."""
        missing = yield self._link.missing_chunks(key, instance_id)
        wanted = [
            place
            for place in (_place(transfer, index) for index in missing)
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
                outcome = yield from self._answered(outcome, unsent, window)
            if outcome.dropped:
                break
            sent = yield from self._send(transfer, key, instance_id, batch)
            window.add(sent, batch.nbytes)
            unsent -= len(batch.places)
        while window:
            outcome = yield from self._answered(outcome, unsent, window)
        return plus(outcome, StoreOutcome(dropped=unsent))

    def retrieve(
        self, transfer: Transfer, key: CacheKey, instance_id: int, event: torch.Event | None, skip_tokens: int
    ) -> Steps[bool]:
        """False for a miss or a lost pin. Raises `KVFrameworkError`; the blocks hold anything then."""
        plan = yield from planned(self._link.prepare_retrieve(key, instance_id), self._link.commit_retrieve)
        if not plan.hit:
            return False
        with given_back(self._link.commit_retrieve, plan.lease):
            transfer.check_complete(plan.ranges)
            if event is not None:
                event.synchronize()
            wanted = [place for place in plan.ranges if transfer.reaches(place, skip_tokens)]
            position = {(place.chunk, place.group): at for at, place in enumerate(plan.ranges)}
            window: Window[_Asked] = Window()
            for batch in batches(wanted):
                while not window.has_room(batch.nbytes):
                    yield from _received(transfer, window, skip_tokens)
                positions = [position[place.chunk, place.group] for place in batch.places]
                window.add(_Asked(self._link.retrieve_chunks(plan, positions), batch.places), batch.nbytes)
            while window:
                yield from _received(transfer, window, skip_tokens)
            transfer.memory.wait()
        held: bool = yield self._link.commit_retrieve(plan.lease)
        return held

    def close(self) -> None:
        self._staging.close()

    def _send(self, transfer: Transfer, key: CacheKey, instance_id: int, batch: Batch) -> Steps[_Sent]:
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
        try:
            yield from unless_cancelled()
        except GeneratorExit:
            self._staging.give_back(staged)
            raise
        buffers = [
            staged[offset : offset + place.length] for place, offset in zip(batch.places, batch.offsets, strict=True)
        ]
        objects = [place.chunk * groups + place.group for place in batch.places]
        return _Sent(self._link.store_chunks(key, instance_id, objects, buffers), staged, len(objects))

    def _answered(self, outcome: StoreOutcome, unsent: int, window: Window[_Sent]) -> Steps[StoreOutcome]:
        """`outcome` and what the server says of the batch that was sent first."""
        sent = window.take_oldest()
        try:
            told = yield sent.answer
        except DeadlineExceeded as error:
            under_way = sent.objects + sum(each.objects for each in window)
            raise InDoubt(error, plus(outcome, StoreOutcome(unknown=under_way, dropped=unsent))) from error
        self._staging.give_back(sent.staged)
        return plus(outcome, told)


def _received(transfer: Transfer, window: Window[_Asked], skip_tokens: int) -> Steps[None]:
    """Scatters the batch that was asked for first."""
    asked = window.take_oldest()
    buffers = yield asked.answer
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
