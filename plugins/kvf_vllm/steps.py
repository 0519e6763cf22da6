"""Owns what scheduler and workers tell each other once a step: the plan and the report. Plain data, no behaviour but
merging; vLLM carries it between the processes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

# One list of block ids per KV cache group of vLLM.
GroupBlocks = Sequence[Sequence[int]]


@dataclass(frozen=True)
class Served:
    """What a worker knows once the server has accepted it: how scheduler and workers name content."""

    model_name: str
    namespace: bytes
    chunk_tokens: int
    world_size: int


@dataclass(frozen=True)
class LoadOp:
    """Tokens `[start + skip, end)` go into `block_ids`, which cover `[start, end)`. `digests` cover `[0, end)`."""

    request_id: str
    start: int
    end: int
    skip: int
    digests: bytes
    salt: str
    block_ids: GroupBlocks


@dataclass(frozen=True)
class StoreOp:
    """Tokens `[start, end)` lie in `block_ids` after the step. `number` names the operation in this engine's life."""

    number: int
    request_id: str
    start: int
    end: int
    digests: bytes
    salt: str
    block_ids: GroupBlocks


@dataclass
class StepPlan:
    """From the scheduler to each worker. Stores whose numbers are in `fence` must have ended before the step writes
    anywhere: their blocks may belong to others now."""

    loads: list[LoadOp] = field(default_factory=list)
    stores: list[StoreOp] = field(default_factory=list)
    fence: list[int] = field(default_factory=list)


@dataclass
class StepReport:
    """From the workers to the scheduler, merged over all of them.

    `served` holds what each worker (by rank) has learnt since its last report, None while it has no server. `loaded`
    and `ended` count, by request and by store, the workers that are done with it, `stored` those that stored all of it.
    `failed` are requests with a failed load, `unstored` those of whose store nothing was sent, with the token where it
    was to begin.
    """

    served: dict[int, Served | None] = field(default_factory=dict)
    loaded: Counter[str] = field(default_factory=Counter)
    ended: Counter[int] = field(default_factory=Counter)
    stored: Counter[int] = field(default_factory=Counter)
    failed: set[str] = field(default_factory=set)
    unstored: dict[str, int] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.served or self.loaded or self.ended or self.failed or self.unstored)

    def merge(self, other: StepReport) -> StepReport:
        """Both together, as a new report."""
        return StepReport(
            {**self.served, **other.served},
            self.loaded + other.loaded,
            self.ended + other.ended,
            self.stored + other.stored,
            self.failed | other.failed,
            _earliest(self.unstored, other.unstored),
        )


def _earliest(one: Mapping[str, int], other: Mapping[str, int]) -> dict[str, int]:
    return {key: min(each[key] for each in (one, other) if key in each) for key in {**one, **other}}
