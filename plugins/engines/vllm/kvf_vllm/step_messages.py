"""The messages between scheduler and workers once per step: the plan and the report. Plain data, no behaviour but
merging; vLLM carries it between the processes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from kvframework.api.keys import ChunkContent, Retain
from kvframework.client import LoadGrant

# One list of block ids per KV cache group of vLLM.
GroupBlocks = Sequence[Sequence[int]]


@dataclass(frozen=True)
class Served:
    """A worker's knowledge after the server has accepted it: the names that scheduler and workers give to content.
    Workers of different pipeline stages hold different layers, under different names. `instances` are the ids of the
    registrations that use these names: a worker's own, in the scheduler those of all ranks."""

    model_name: str
    namespace: bytes
    chunk_tokens: int
    world_size: int
    stage: int = 0
    instances: tuple[int, ...] = field(default=(), compare=False)


class Weights(NamedTuple):
    """A worker's weights: how often they were updated, the last step that wrote KV before, and whether their name is
    one that other engines know, None as long as this is open."""

    updates: int = 0
    step: int = 0
    is_shared: bool | None = True


class AdapterUse(NamedTuple):
    """The adapter of a request: vLLM's number of it, and the name of its content."""

    number: int
    content: str


class AdapterNews(NamedTuple):
    """An adapter that a worker's vLLM has loaded, and the name of its content, "" if it is unknown."""

    name: str
    path: str
    content: str


@dataclass(frozen=True)
class TransferOp:
    """A load of tokens `[start + skip, end)` into `block_ids`, which cover `[start, end)`, or a store of tokens
    `[start, end)`, which lie there after the step. `digests` cover `[0, end)`. `content` goes to a server that asks for
    it. `grants` are what a load's lookup has prepared for all workers; `is_within`: the step waits for the load;
    `number` of a store is unique in this engine's life."""

    request_id: str
    start: int
    end: int
    digests: bytes
    salt: str
    block_ids: GroupBlocks
    trace: str = ""
    adapter: AdapterUse | None = None
    content: ChunkContent | None = None
    retain: tuple[Retain, ...] = ()
    conversation: str = ""
    skip: int = 0
    grants: tuple[LoadGrant, ...] = ()
    is_within: bool = False
    number: int = 0

    @property
    def tokens(self) -> int:
        return self.end - self.start - self.skip


@dataclass
class StepPlan:
    """From the scheduler to each worker. Stores whose numbers are in `fence` must have ended before the step writes
    anything: their blocks may belong to other requests now. `computes`: requests wait for this step. `step` is the
    number of steps so far that write KV, `updates` those of the weights, by worker, that the scheduler has heard of."""

    loads: list[TransferOp] = field(default_factory=list)
    stores: list[TransferOp] = field(default_factory=list)
    fence: list[int] = field(default_factory=list)
    computes: bool = True
    step: int = 0
    updates: Mapping[int, int] = field(default_factory=dict)


@dataclass
class StepReport:
    """From the workers to the scheduler, merged over all of them.

    `served` holds the news of each worker (by rank) since its last report, None while it has no server. `loaded` and
    `ended` count, by request and by store, the workers that have finished it, `stored` those that stored all of it.
    `failed` are requests with a failed load, `unstored` those with a store that was not sent, with its first token.
    `adapters` are each worker's news by the adapter's number, None for one that vLLM has dropped. `weights` are those
    of the workers that were updated since the last report. Loads of `copied_tokens` took `copied_s` to copy.
    """

    served: dict[int, Served | None] = field(default_factory=dict)
    loaded: Counter[str] = field(default_factory=Counter)
    ended: Counter[int] = field(default_factory=Counter)
    stored: Counter[int] = field(default_factory=Counter)
    failed: set[str] = field(default_factory=set)
    unstored: dict[str, int] = field(default_factory=dict)
    adapters: dict[int, dict[int, AdapterNews | None]] = field(default_factory=dict)
    weights: dict[int, Weights] = field(default_factory=dict)
    copied_tokens: float = 0.0
    copied_s: float = 0.0

    def __bool__(self) -> bool:
        news = self.served or self.loaded or self.ended or self.failed or self.unstored or self.adapters
        return bool(news or self.weights or self.copied_s)

    def copied(self, tokens: float, seconds: float) -> None:
        self.copied_tokens += tokens
        self.copied_s += seconds

    def merge(self, other: StepReport) -> StepReport:
        """Both together, as a new report."""
        return StepReport(
            {**self.served, **other.served},
            self.loaded + other.loaded,
            self.ended + other.ended,
            self.stored + other.stored,
            self.failed | other.failed,
            _earliest(self.unstored, other.unstored),
            {**self.adapters, **other.adapters},
            {**self.weights, **other.weights},
            self.copied_tokens + other.copied_tokens,
            self.copied_s + other.copied_s,
        )


def _earliest(one: Mapping[str, int], other: Mapping[str, int]) -> dict[str, int]:
    return {key: min(each[key] for each in (one, other) if key in each) for key in {**one, **other}}
