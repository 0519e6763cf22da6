"""The path over shared memory: prepare, one copy straight into or out of the server's arena, commit.

Engine side; written as steps, see `transfer_steps.py`.
"""

from __future__ import annotations

import torch

from kvf_cpu_gather.moves import Moves
from kvf_cpu_gather.transfer_steps import Steps, planned, unless_cancelled
from kvframework.api.transport import EngineDrivenLink, LoadOutcome, StoreOutcome, Transfer
from kvframework.errors import Cancelled


def store_in_arena(
    link: EngineDrivenLink, transfer: Transfer, moves: Moves, event: torch.Event | None
) -> Steps[StoreOutcome]:
    """Store through the arena. Raises `KVFrameworkError`; nothing is published then."""
    with (yield from planned(link.prepare_store(transfer))) as plan:
        if plan.ranges:
            if event is not None:
                event.synchronize()
            with torch.inference_mode():
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
            with torch.inference_mode():
                moves.scatter(plan.arena, plan.ranges, skip_tokens)
                moves.memory.wait()
        committed: LoadOutcome = yield plan.commit()
        return committed
