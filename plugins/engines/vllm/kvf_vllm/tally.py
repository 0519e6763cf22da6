"""The connector's counters: their names, their meaning, and the merging of several workers' counts. Pure.

Each side counts for itself; vLLM takes the counts since the last step, carries them to its own front end, logs a
summary and shows them in its `/metrics`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

PREFIX = "kvframework:"
REASON = "miss_requests"

COUNTERS: dict[str, str] = {
    "hit_requests": "requests whose lookup found tokens that vLLM did not have",
    "hit_tokens": "tokens that lookups found and vLLM did not have",
    REASON: "requests whose lookup found no tokens that vLLM lacked, by reason",
    "loaded_tokens": "tokens loaded, counted in each worker",
    "loaded_bytes": "bytes loaded by all workers",
    "failed_loads": "failed loads, whose tokens were computed",
    "stored_tokens": "tokens stored or already stored, counted in each worker",
    "stored_bytes": "bytes stored or already stored by all workers",
    "failed_stores": "stores that stored only part of their chunks",
    "cancelled_stores": "stores cancelled because vLLM needed their blocks",
    "unstorable_chunks": "runs of chunks not stored because vLLM had reused their blocks",
    "errors": "transfers that could not start, and failed connector calls; vLLM's log has the reason",
}
SECONDS: dict[str, str] = {
    "lookup": "time from the first lookup of a request to its hit, L2 included",
    "load": "time of a load",
    "store": "time of a store",
}


class Tally:
    """Counts until the next `take`. For one thread."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self._seconds: dict[str, list[float]] = {}

    def count(self, name: str, amount: int = 1) -> None:
        """`name` out of `COUNTERS`."""
        assert name in COUNTERS, name
        self.counts[name] += amount

    def missed(self, reason: str) -> None:
        self.counts[f"{REASON}|{reason}"] += 1

    def took(self, name: str, seconds: float) -> None:
        """`name` out of `SECONDS`."""
        assert name in SECONDS, name
        self._seconds.setdefault(name, []).append(seconds)

    def take(self) -> dict[str, Any]:
        """All counts since the last call, as plain data; {} if there are none."""
        if not (self.counts or self._seconds):
            return {}
        found: dict[str, Any] = dict(self.counts)
        if self._seconds:
            found["seconds"] = self._seconds
        self.counts, self._seconds = Counter(), {}
        return found


def merged(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    counts = Counter({name: value for name, value in one.items() if name != "seconds"})
    counts.update({name: value for name, value in other.items() if name != "seconds"})
    seconds = {
        name: [*one.get("seconds", {}).get(name, ()), *other.get("seconds", {}).get(name, ())]
        for name in {**one.get("seconds", {}), **other.get("seconds", {})}
    }
    return {**counts, **({"seconds": seconds} if seconds else {})}


def summary(data: Mapping[str, Any]) -> dict[str, int | float]:
    """The counts for one line in vLLM's log: counts unchanged, bytes in MiB, durations as the mean in milliseconds."""
    found: dict[str, int | float] = {}
    for name, value in data.items():
        if name == "seconds":
            continue
        if name.endswith("_bytes"):
            found[name.removesuffix("_bytes") + "_MiB"] = round(value / (1 << 20), 1)
        else:
            found[name.replace("|", ".")] = value
    for name, each in data.get("seconds", {}).items():
        found[f"{name}_ms_mean"] = round(1000 * sum(each) / max(len(each), 1), 2)
    return found
