"""What the page draws over time: a point a second for a quarter of an hour, and one a minute for a day.

Points hold sums since the server's start, so that a reader with any interval sees the right rates; `boot` counts the
servers that were seen, and sums begin at 0 with each. A time without an answer has no points.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Mapping
from typing import Any

import msgspec

from kvf_observe.poller import Document, Observed
from kvf_observe.readings import found, tiers, tokens_by_place

SECONDS, MINUTES = 900, 1440
# The call of a tier that loads values.
LOADING = "get_into"
FIELDS = (
    "time",  # seconds since 1970
    "boot",
    "asked_tokens",
    "l1_tokens",
    "l2_tokens",
    "lookups",
    "stored_objects",
    "evicted_objects",
    "used_bytes",  # without what is quarantined
    "free_bytes",
    "quarantined_bytes",
    "instances",
    "problems",
    "tiers",  # for each tier its TIER_FIELDS
)
TIER_FIELDS = ("name", "up", "gets", "get_seconds", "read_bytes", "written_bytes")

Point = list[Any]


class History:
    """`add` is called by the polling thread, `document` from any."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._seconds: deque[Point] = deque(maxlen=SECONDS)
        self._minutes: deque[Point] = deque(maxlen=MINUTES)
        self._boot_id = ""
        self._boots = 0

    def add(self, observed: Observed) -> None:
        """Take an answered poll as a point; the last one of each minute stays for a day."""
        document = observed.document
        if document is None:
            return
        with self._lock:
            boot_id = str(found(document, "server.boot_id"))
            if boot_id != self._boot_id:
                self._boot_id, self._boots = boot_id, self._boots + 1
            point = _point(document, observed.time, self._boots)
            self._seconds.append(point)
            if self._minutes and self._minutes[-1][0] // 60 == point[0] // 60:
                self._minutes[-1] = point
            else:
                self._minutes.append(point)

    def document(self, after: float = 0.0) -> bytes:
        """The points later than `after`, as JSON: `fields` names the columns of each."""
        with self._lock:
            seconds, minutes = list(self._seconds), list(self._minutes)
        return msgspec.json.encode(
            {
                "fields": FIELDS,
                "tier_fields": TIER_FIELDS,
                "seconds": [point for point in seconds if point[0] > after],
                "minutes": [point for point in minutes if point[0] > after],
            }
        )


def _point(document: Document, time: float, boot: int) -> Point:
    l1 = found(document, "l1") or {}
    tokens = tokens_by_place(document)
    quarantined = l1.get("quarantined_bytes", 0)
    return [
        round(time, 1),
        boot,
        sum(tokens.values()),
        tokens["l1"],
        tokens["l2"],
        found(document, "lookups.lookups") or 0,
        found(l1, "counters.stored") or 0,
        l1.get("evictions", 0),
        l1.get("used_bytes", 0) - quarantined,
        l1.get("free_bytes", 0),
        quarantined,
        len(document.get("instances", ())),
        len(document.get("problems", ())),
        [_tier(name, tier) for name, tier in tiers(document)],
    ]


def _tier(name: str, tier: Mapping[str, Any]) -> list[Any]:
    gets = found(tier, f"seconds.{LOADING}") or {"counts": (), "sum": 0.0}
    read, written = tier.get("bytes_read", 0), tier.get("bytes_written", 0)
    return [name, int(tier["state"] == "closed"), sum(gets["counts"]), gets["sum"], read, written]
