"""Owns the way over shared memory: prepare, one copy straight into or out of the server's arena, commit.

Engine side; steps, see `steps.py`.
"""

from __future__ import annotations

import torch

from kvf_cpu_gather.leases import given_back, planned
from kvf_cpu_gather.outcomes import InDoubt, plus
from kvf_cpu_gather.steps import Steps, unless_cancelled
from kvf_cpu_gather.transfer import Transfer
from kvframework.api import CacheKey, EngineLink, StoreOutcome
from kvframework.errors import DeadlineExceeded, ServerGone


def store_in_arena(
    link: EngineLink, arena: memoryview, transfer: Transfer, key: CacheKey, instance_id: int, event: torch.Event | None
) -> Steps[StoreOutcome]:
    """Raises `KVFrameworkError`; nothing is published then. If COMMIT is not answered in time that is unknown."""
    left_out = transfer.first_chunks if any(transfer.first_chunks) else ()
    plan = yield from planned(link.prepare_store(key, instance_id, left_out), link.abort_store)
    if not plan.lease:
        return plan.outcome
    with given_back(link.abort_store, plan.lease):
        _check_same(link, arena)
        if event is not None:
            event.synchronize()
        with torch.inference_mode():
            transfer.gather(arena, plan.ranges)
        yield from unless_cancelled()
        try:
            committed = yield link.commit_store(plan.lease)
        except DeadlineExceeded as error:
            raise InDoubt(error, plus(plan.outcome, StoreOutcome(unknown=len(plan.ranges)))) from error
        return plus(plan.outcome, committed)


def retrieve_from_arena(
    link: EngineLink,
    arena: memoryview,
    transfer: Transfer,
    key: CacheKey,
    instance_id: int,
    event: torch.Event | None,
    skip_tokens: int,
) -> Steps[bool]:
    """False for a miss or a lost pin. Raises `KVFrameworkError`; the blocks hold anything then."""
    plan = yield from planned(link.prepare_retrieve(key, instance_id), link.commit_retrieve)
    if not plan.hit:
        return False

    with given_back(link.commit_retrieve, plan.lease):
        _check_same(link, arena)
        transfer.check_complete(plan.ranges)
        if event is not None:
            event.synchronize()
        with torch.inference_mode():
            transfer.scatter(arena, plan.ranges, skip_tokens)
            transfer.memory.wait()
    held: bool = yield link.commit_retrieve(plan.lease)
    return held


def _check_same(link: EngineLink, arena: memoryview) -> None:
    """Ranges mean nothing in another server's memory. Raises `ServerGone` if it is not `arena` any more."""
    if link.arena() is not arena:
        raise ServerGone("the server was restarted in between")
