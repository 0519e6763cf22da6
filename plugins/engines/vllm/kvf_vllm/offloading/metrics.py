"""The counts of both: those of vLLM's offloading, and the connectors' own beside them, in vLLM's log lines and in its
`/metrics`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorStats
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadingConnectorStats, OffloadPromMetrics

from kvf_vllm.metrics import Shown
from kvf_vllm.tally import merged, summary
from kvframework.client import harmless

# The place of the connectors' own among vLLM's data.
_OWN = "kvframework"


class BothCounted(OffloadingConnectorStats):  # type: ignore[misc]
    """vLLM's statistics, with the counts of a `Tally`."""

    data: dict[str, Any]

    @classmethod
    def of(cls, counts: Mapping[str, Any], theirs: OffloadingConnectorStats | None) -> BothCounted:
        found = (theirs or OffloadingConnectorStats()).data
        return cls(data={**found, _OWN: counts} if counts else found)

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        super().aggregate(other)
        if own := merged(self.data.get(_OWN, {}), other.data.get(_OWN, {})):
            self.data[_OWN] = own
        return self

    def reduce(self) -> dict[str, int | float]:
        return {**summary(self.data.get(_OWN, {})), **super().reduce()}

    def is_empty(self) -> bool:
        return super().is_empty() and not self.data.get(_OWN)


class BothShown(Shown):
    """Prometheus metrics of both. vLLM's own are left out where they cannot be made a second time in a process."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._theirs: OffloadPromMetrics | None = None
        try:
            self._theirs = OffloadPromMetrics(*arguments)
        except ValueError as error:
            self.errors.note("metrics of vLLM's offloading", error)

    @harmless()
    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        super().observe(transfer_stats_data.get(_OWN, {}), engine_idx)
        if self._theirs is not None:
            self._theirs.observe(transfer_stats_data, engine_idx)
