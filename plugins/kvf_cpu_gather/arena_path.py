"""Owns the way over shared memory: prepare, one copy straight into or out of the server's arena, commit.

Engine side, blocking.
"""

from __future__ import annotations

import torch

from kvf_cpu_gather.leases import given_back
from kvf_cpu_gather.outcomes import plus
from kvf_cpu_gather.transfer import Transfer
from kvframework.api import CacheKey, EngineLink, StoreOutcome
from kvframework.errors import ServerGone


def store_in_arena(
    link: EngineLink, arena: memoryview, transfer: Transfer, key: CacheKey, instance_id: int, event: torch.Event | None
) -> StoreOutcome:
    """Raises `KVFrameworkError`; nothing is published then."""
    plan = link.prepare_store(key, instance_id, transfer.first_chunks if any(transfer.first_chunks) else ())
    if not plan.lease:
        return plan.outcome
    with given_back(link.abort_store, plan.lease):
        _check_same(link, arena)
        if event is not None:
            event.synchronize()
        with torch.inference_mode():
            transfer.gather(arena, plan.ranges)
        return plus(plan.outcome, link.commit_store(plan.lease))


def retrieve_from_arena(
    link: EngineLink,
    arena: memoryview,
    transfer: Transfer,
    key: CacheKey,
    instance_id: int,
    event: torch.Event | None,
    skip_tokens: int,
) -> bool:
    """False for a miss or a lost pin. Raises `KVFrameworkError`; the blocks hold anything then."""
    plan = link.prepare_retrieve(key, instance_id)
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
    return link.commit_retrieve(plan.lease)


def _check_same(link: EngineLink, arena: memoryview) -> None:
    """Ranges mean nothing in another server's memory. Raises `ServerGone` if it is not `arena` any more."""
    if link.arena() is not arena:
        raise ServerGone("the server was started anew in between")
