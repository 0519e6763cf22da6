"""What the two sides of the connector send each other besides vLLM's own: where the objects of a job lie, how to map
the arena, what a worker packs its blocks by, and which jobs have failed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import (
    OffloadingConnectorMetadata,
    OffloadingWorkerMetadata,
)
from vllm.v1.kv_offload.base import LoadStoreSpec

from kvf_vllm.step_messages import AdapterNews, AdapterUse, Served, Weights
from kvframework.client import ArenaTicket, KvIdentity

_NO_NAME = KvIdentity("", "")
# In place of an offset: this object is not to be copied.
NOWHERE = -1


@dataclass
class ArenaPlaces(LoadStoreSpec):  # type: ignore[misc]
    """The places of a job's objects in the arena, in the order of its keys: offsets in bytes, or `NOWHERE`. `number` is
    the store's or load's own. A load is good as long as the arena of `session` is served, until the time `until` of
    the node's monotonic clock; a store that ends later is not published. `adapter` is what the KV is computed with, and
    `tokens` are how many it stands for. `is_within`: the worker's step reads what this loads."""

    number: int
    offsets: list[int] = field(default_factory=list)
    session: bytes = b""
    until: float = 0.0
    adapter: AdapterUse | None = None
    tokens: int = 0
    is_within: bool = False


@dataclass(frozen=True)
class Laid(Served):
    """What a worker's blocks are named by: its weights, and how it packs them; and the bytes of a chunk of them. It
    needs no server for that."""

    identity: KvIdentity = _NO_NAME
    packing: str = ""
    slot_bytes: int = 0

    def renamed(self, identity: KvIdentity) -> Laid:
        return replace(self, identity=identity, model_name=identity.model_name)


@dataclass
class StepPlan(OffloadingConnectorMetadata):  # type: ignore[misc]
    """vLLM's plan of a step. Where there may be jobs it has the arena and the bytes of a worker's slot. Its stores are
    those whose chunks were computed in steps before. `within` has the blocks of the loads that this step reads, by
    job. `step` and `updates` are those of the other connector's plan."""

    arena: ArenaTicket | None = None
    slot_bytes: int = 0
    step: int = 0
    updates: Mapping[int, int] = field(default_factory=dict)
    within: Mapping[int, Sequence[int]] = field(default_factory=dict)


@dataclass
class StepReport(OffloadingWorkerMetadata):  # type: ignore[misc]
    """vLLM's report of a worker, and of all once they are merged. `served` are the names of the workers' blocks, by
    rank, None for one that cannot take part, and `weights` those that were updated; `ended` counts the workers that
    have ended each store, by its number, and `failed` has the numbers of those that are not whole. `adapters` are the
    news of each worker's, `spoils_base` says whether requests without one may have been computed by one,
    `spoils_step` whether this step has read what was not loaded."""

    served: dict[int, Served | None] = field(default_factory=dict)
    weights: dict[int, Weights] = field(default_factory=dict)
    ended: Counter[int] = field(default_factory=Counter)
    failed: set[int] = field(default_factory=set)
    adapters: dict[int, dict[int, AdapterNews | None]] = field(default_factory=dict)
    spoils_base: bool = False
    spoils_step: bool = False

    @property
    def says_anything(self) -> bool:
        """Whether there is more in it than statistics."""
        return any(each for name, each in vars(self).items() if name != "transfer_stats")

    def aggregate(self, other: Any) -> StepReport:
        merged = super().aggregate(other)
        return StepReport(
            merged.completed_jobs,
            merged.transfer_stats,
            self.served | other.served,
            self.weights | other.weights,
            self.ended + other.ended,
            self.failed | other.failed,
            self.adapters | other.adapters,
            self.spoils_base or other.spoils_base,
            self.spoils_step or other.spoils_step,
        )
