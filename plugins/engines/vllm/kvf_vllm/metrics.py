"""The connector's counters as vLLM shows them: in its log lines and in its `/metrics`. Runs in vLLM's front end, and in
the processes that merge a step's counts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

from kvf_vllm.tally import COUNTERS, PREFIX, REASON, SECONDS, merged, summary
from kvframework.client import ErrorNotes, harmless

# By class and name. When a process creates another engine, vLLM removes its own metrics from Prometheus' registry, and
# only those: the connector's stay, and count for all engines of the process.
_made: dict[tuple[Any, str], Any] = {}
_BUCKETS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)


class Counted(KVConnectorStats):  # type: ignore[misc]
    """Wraps the counts of a `Tally` for vLLM's transfer to its front end."""

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
        self.errors = ErrorNotes()
        self._counters: dict[str, Any] = {}
        self._histograms: dict[str, Any] = {}
        try:
            self._make(labelnames)
        except Exception as error:  # noqa: BLE001 - an engine without these metrics serves all the same
            self.errors.note("metrics", error)

    def _make(self, labelnames: list[str]) -> None:
        for name, text in COUNTERS.items():
            labels = [*labelnames, "reason"] if name == REASON else labelnames
            self._counters[name] = _metric(self._counter_cls, PREFIX + name, documentation=text, labelnames=labels)
        for name, text in SECONDS.items():
            self._histograms[name] = _metric(
                self._histogram_cls,
                f"{PREFIX}{name}_seconds",
                documentation=text,
                buckets=_BUCKETS,
                labelnames=labelnames,
            )
        # Created now, so that a scrape before the first event shows all series.
        for labels in self.per_engine_labelvalues.values():
            for name, counter in self._counters.items():
                if name != REASON:
                    counter.labels(*labels)

    @harmless()
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


def _metric(kind: Any, name: str, **described: Any) -> Any:
    try:
        _made[kind, name] = kind(name=name, **described)
    except ValueError:
        # "Duplicated timeseries in CollectorRegistry". Raised again if the metric belongs to another library.
        if (kind, name) not in _made:
            raise
    return _made[kind, name]
