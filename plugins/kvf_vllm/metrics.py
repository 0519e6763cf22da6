"""Owns how vLLM shows the connector's counters: in its log lines and in its `/metrics`. Runs in vLLM's front end, and
where a step's counts are merged."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

from kvf_vllm.tally import COUNTERS, PREFIX, REASON, SECONDS, merged, summary

_BUCKETS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)


class Counted(KVConnectorStats):  # type: ignore[misc]
    """What a `Tally` took, on vLLM's way to its front end."""

    data: dict[str, Any]

    def reset(self) -> None:
        self.data = {}

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        return Counted(data=merged(self.data, other.data))

    def reduce(self) -> dict[str, int | float]:
        return summary(self.data)

    def is_empty(self) -> bool:
        return not self.data


class Shown(KVConnectorPromMetrics):  # type: ignore[misc]
    """Prometheus metrics, one series for each engine."""

    def __init__(
        self,
        vllm_config: Any,
        metric_types: Any,
        labelnames: list[str],
        per_engine_labelvalues: Mapping[int, list[Any]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._counters = {
            name: self._counter_cls(
                name=PREFIX + name,
                documentation=text,
                labelnames=[*labelnames, *(["reason"] if name == REASON else [])],
            )
            for name, text in COUNTERS.items()
        }
        self._histograms = {
            name: self._histogram_cls(
                name=f"{PREFIX}{name}_seconds", documentation=text, buckets=_BUCKETS, labelnames=labelnames
            )
            for name, text in SECONDS.items()
        }
        # Without them a scrape before the first event would not show what there is.
        for labels in per_engine_labelvalues.values():
            for name, counter in self._counters.items():
                if name != REASON:
                    counter.labels(*labels)

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        labels = self.per_engine_labelvalues[engine_idx]
        for name, value in transfer_stats_data.items():
            if name == "seconds":
                continue
            kind, _, reason = name.partition("|")
            if kind in self._counters:
                self._counters[kind].labels(*labels, *([reason] if reason else [])).inc(value)
        for name, each in transfer_stats_data.get("seconds", {}).items():
            if name in self._histograms:
                for seconds in each:
                    self._histograms[name].labels(*labels).observe(seconds)
