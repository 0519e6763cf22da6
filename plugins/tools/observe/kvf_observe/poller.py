"""The thread that asks the server for its status once a second, however many clients of HTTP there are.

What the page draws over time: a point a second for a quarter of an hour, and one a minute for a day.

Points hold sums since the server's start, so that a reader with any interval sees the right rates; `boot` counts the
servers that were seen, and sums begin at 0 with each. A time without an answer has no points.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import msgspec

from kvf_observe.readings import found, tiers, tokens_by_place
from kvframework.client import StatusSource
from kvframework.errors import KVFrameworkError

log = logging.getLogger(__name__)

EVERY_S = 1.0
# Longer than a loaded machine delays an answer, shorter than what a probe of Kubernetes forgives.
ANSWER_S = 5.0

Document = Mapping[str, Any]


class Observed(NamedTuple):
    """The result of one poll. `document` is None if it was not answered, and `error` says why; `round_trip_s` is None
    if not even the serving loop answered. `at` is of the monotonic clock, `time` seconds of the wall clock. `polls` and
    `failures` count since the start of this process."""

    document: Document | None = None
    raw: bytes = b""
    error: str = "kvframework observe has not polled the server yet"
    round_trip_s: float | None = None
    at: float = 0.0
    time: float = 0.0
    polls: int = 0
    failures: int = 0


class Poller:
    """Polls from `start` to `stop`. `latest` is replaced as a whole and read from any thread; `heard` gets each result,
    in the polling thread. Owns `source`."""

    def __init__(self, source: StatusSource, heard: Callable[[Observed], None], *, every_s: float = EVERY_S) -> None:
        self.latest = Observed()
        self._source = source
        self._heard = heard
        self._every_s = every_s
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvf-observe-poll", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """End the thread and the poll under way. Waits `ANSWER_S` at most."""
        self._stopping.set()
        self._source.close()
        self._thread.join(ANSWER_S + 1)

    def poll(self) -> Observed:
        """Ask once. Blocks for the source's timeout at most."""
        error, raw, document = "", b"", None
        try:
            raw = self._source.ask()
            document = msgspec.json.decode(raw, type=dict[str, Any])
        except KVFrameworkError as failure:
            error = str(failure)
        except Exception as failure:  # noqa: BLE001  the thread has to go on: the next server may be another release
            error = f"{type(failure).__name__}: {failure}"
        last = self.latest
        return Observed(
            document,
            raw if document is not None else b"",
            error,
            self._source.round_trip_s,
            time.monotonic(),
            time.time(),
            last.polls + 1,
            last.failures + bool(error),
        )

    def _run(self) -> None:
        while not self._stopping.is_set():
            began = time.monotonic()
            self._take(self.poll())
            self._stopping.wait(max(began + self._every_s - time.monotonic(), 0.0))
        self._source.close()

    def _take(self, observed: Observed) -> None:
        before, self.latest = self.latest, observed
        if bool(before.error) != bool(observed.error) or before.polls == 0:
            if observed.error:
                log.warning("the server's status cannot be read: %s", observed.error)
            else:
                log.info("the server at %s answers", self._source.endpoint)
        try:
            self._heard(observed)
        except Exception:
            log.exception("a status could not enter the page's history; the server may be of another release")


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
