"""What hints are worth, through the server's object table: made conversations, and a trace in KVFRAMEWORK_TRACE."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable, Sequence
from itertools import repeat
from pathlib import Path
from typing import Literal

import pytest

from kvf_eviction import Lru, TwoQueues
from kvframework.api.eviction import EvictionPolicy
from kvframework.api.keys import PACKED_KEY_BYTES, PackedKey, Retain
from kvframework.storage.l1.allocator import ALIGNMENT
from kvframework.storage.l1.entries import StoredObject
from kvframework.storage.l1.eviction_statistics import Cause
from kvframework.storage.l1.leases import PromptPart
from kvframework.storage.l1.objects import ObjectTable

PREFIX = bytes(PACKED_KEY_BYTES - 32)
TOKENS = 512
Trace = Sequence[Sequence[int]]
Hints = Sequence[tuple[Retain, ...]]
BOTH = pytest.mark.parametrize("make", [Lru, TwoQueues])


def replayed(policy: EvictionPolicy, trace: Trace, room: int, hints: Hints | None = None) -> float:
    """The share of blocks that LOOKUPs find as prefixes, in percent: LOOKUP, RETRIEVE, STORE of all in two parts."""
    ghosts: dict[PackedKey, Cause] = {}
    hits = total = 0
    now = 0.0

    class Remembering(ObjectTable):
        def on_removed(self, stored: StoredObject, cause: Cause, by: PackedKey | None) -> None:
            ghosts[stored.key] = cause

        def was_done(self, key: PackedKey) -> bool:
            return ghosts.get(key) is Cause.HINTED

    table = Remembering(policy, nbytes=room * ALIGNMENT, clock=lambda: now)
    for number, (blocks, said) in enumerate(zip(trace, hints or repeat(()), strict=False)):
        now, request = float(number + 1), f"r{number}"
        table.expire()
        digests = [block.to_bytes(32, "big") for block in blocks]
        row = table.row(PREFIX, digests)
        found = [stored for stored in row[: row.index(None) if None in row else None] if stored is not None]
        hits, total = hits + len(found), total + len(digests)
        part = PromptPart(range(len(found)), TOKENS, said)
        leases = [
            table.pin_objects(found[:], owner=1, request_id=request, use=use, prompt=part)
            for use in ("lookup", "retrieve")
        ]
        for first, end in (0, len(digests) // 2), (len(digests) // 2, len(digests)):
            items = [(PREFIX + digest, ALIGNMENT) for digest in digests[first:end]]
            part = PromptPart(range(first, end), TOKENS, said)
            lease = table.reserve(items, owner=1, request_id=request, prompt=part).lease
            if lease is not None:
                for stored in table.commit(lease.id, owner=1):
                    ghosts.pop(stored.key, None)
        for pins in leases:
            table.unpin(pins.id, owner=1)
    return 100 * hits / total


def ends(trace: Trace) -> list[int]:
    """For each request the blocks of it that are asked for again."""
    last = {block: number for number, blocks in enumerate(trace) for block in blocks}
    return [
        max((at + 1 for at, block in enumerate(blocks) if last[block] > number), default=0)
        for number, blocks in enumerate(trace)
    ]


def said(
    trace: Trace, *, share: float = 0.5, wrong: float = 0.0, form: Literal["range", "request"] = "range", keep: int = 0
) -> Hints:
    """`share` of the clients say where what nobody asks for again begins; of them `wrong` say so of all blocks behind
    the first `keep`. By "request": only of one of which no other block is asked for again."""
    chance = random.Random(1)
    hints: list[tuple[Retain, ...]] = []
    for blocks, used in zip(trace, ends(trace), strict=True):
        says, errs = chance.random() < share, chance.random() < wrong
        if not says or (used == len(blocks) and not errs) or (form == "request" and used > keep and not errs):
            hints.append(())
        elif form == "request":
            hints.append((Retain("done"),))
        else:
            hints.append((Retain("done", start=TOKENS * (keep if errs else used)),))
    return hints


def conversations() -> Trace:
    """On 30 system prompts of four blocks, of up to eight turns each, 150 of them open at a time."""
    chance, fresh = random.Random(2), iter(range(1000, 10**7))
    open_ones: list[tuple[list[int], int]] = []
    trace: list[list[int]] = []
    for _ in range(3000):
        if len(open_ones) < 150:
            system = chance.randrange(30) * 4
            open_ones.append((list(range(system, system + 4)), chance.randint(1, 8)))
        at = chance.randrange(len(open_ones))
        before, turns = open_ones.pop(at)
        blocks = [*before, *(next(fresh) for _ in range(chance.randint(1, 6)))]
        trace.append(blocks)
        if turns > 1:
            open_ones.append((blocks, turns - 1))
    return trace


@BOTH
def test_half_of_the_ends_are_worth_a_good_part_of_what_is_missing(make: Callable[[], EvictionPolicy]) -> None:
    trace = conversations()
    without, all_of_it = (replayed(make(), trace, room) for room in (1500, 100_000))
    by_range = replayed(make(), trace, 1500, said(trace))
    by_request = replayed(make(), trace, 1500, said(trace, form="request", keep=4))
    few_wrong = replayed(make(), trace, 1500, said(trace, wrong=0.1, keep=4))
    figures = f"{without:.1f} %, {by_range:.1f}, {by_request:.1f}, {few_wrong:.1f}, of {all_of_it:.1f}"
    assert by_range > without + 0.3 * (all_of_it - without), figures
    assert by_request > without + 0.1 * (all_of_it - without), figures
    assert few_wrong > without, figures


@BOTH
def test_a_system_prompt_is_not_lost_by_the_requests_that_are_done(make: Callable[[], EvictionPolicy]) -> None:
    """Jobs of one request each, all of which say so, on 60 system prompts; in between, what nobody asks for again."""
    chance, fresh = random.Random(3), iter(range(10_000, 10**7))
    trace, hints = list[list[int]](), list[tuple[Retain, ...]]()
    for number in range(3000):
        system = chance.randrange(60) * 8
        is_job = number % 2 == 0
        trace.append([*range(system, system + 8)] * is_job + [next(fresh) for _ in range(6)])
        hints.append((Retain("done"),) * is_job)
    without, hinted = replayed(make(), trace, 700), replayed(make(), trace, 700, hints)
    assert hinted > without - 1, f"{hinted:.1f} %, without hints {without:.1f} %"


@pytest.mark.skipif("KVFRAMEWORK_TRACE" not in os.environ, reason="Mooncake's conversations in KVFRAMEWORK_TRACE")
@pytest.mark.parametrize(("room", "without", "half"), [(10_000, 21.2, 25.8), (30_000, 32.6, 35.6)])
def test_half_of_the_hints_of_mooncakes_conversations(room: int, without: float, half: float) -> None:
    lines = Path(os.environ["KVFRAMEWORK_TRACE"]).read_text().splitlines()
    trace = [json.loads(line)["hash_ids"] for line in lines]
    assert replayed(Lru(), trace, room) == pytest.approx(without, abs=0.1)
    assert replayed(Lru(), trace, room, said(trace)) > half
