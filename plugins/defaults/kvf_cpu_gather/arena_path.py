"""The path over shared memory: prepare, one copy straight into or out of the server's arena, commit.

Engine side; written as steps, see `transfer_steps.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, takewhile
from typing import TYPE_CHECKING

from kvf_cpu_gather.moves import Moves
from kvf_cpu_gather.transfer_steps import Steps, Turn, planned, unless_cancelled
from kvframework.api.transport import ArenaRange, EngineDrivenLink, LoadOutcome, StoreOutcome, Transfer
from kvframework.errors import Cancelled

if TYPE_CHECKING:
    import torch


def store_in_arena(
    link: EngineDrivenLink, transfer: Transfer, moves: Moves, event: torch.Event | None
) -> Steps[StoreOutcome]:
    """Store through the arena. Raises `KVFrameworkError`; nothing is published then."""
    with (yield from planned(link.prepare_store(transfer))) as plan:
        if plan.ranges:
            if event is not None:
                event.synchronize()
            moves.gather(plan.arena, plan.ranges)
            yield from unless_cancelled()
        try:
            committed: StoreOutcome = yield plan.commit()
        except Cancelled as error:
            return plan.outcome + StoreOutcome(unknown=len(plan.ranges), error=error.code)
        return committed


def load_from_arena(
    link: EngineDrivenLink, transfer: Transfer, moves: Moves, event: torch.Event | None, skip_tokens: int
) -> Steps[LoadOutcome]:
    """Load through the arena. Raises `KVFrameworkError`; the blocks have any content then."""
    with (yield from planned(link.prepare_load(transfer))) as plan:
        if plan.hit:
            if event is not None:
                event.synchronize()
            left = plan.ranges
            while left:
                turn = Turn()
                room = (yield turn) if transfer.in_pieces else None
                piece = left[: _that_fit(left, room)]
                moves.scatter(plan.arena, piece, skip_tokens)
                moves.memory.wait()
                left, turn.moved = left[len(piece) :], sum(place.length for place in piece)
        committed: LoadOutcome = yield plan.commit()
        return committed


def _that_fit(places: Sequence[ArenaRange], room: int | None) -> int:
    """Return how many of the first places fit into so many bytes, at least one; None: all."""
    if room is None:
        return len(places)
    ends = accumulate(place.length for place in places)
    return max(sum(1 for _ in takewhile(lambda end: end <= room, ends)), 1)
