"""Each alert fires for its fault, no other does, and none fires while all is well: by Prometheus's own evaluation.

The faults are documents here; `test_faults.py` produces some at real servers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from kvf_observe.poller import Observed
from tests.observe.documents import answered, document
from tests.observe.failures import AWAY, LOST, REFUSED, ROWS
from tests.observe.promtool import ALERTS, NEEDED, Timeline, complaints

pytestmark = NEEDED

BEGIN, END = 20, 60
HOURS = 27


def lasting(observed: Observed | None) -> Callable[[int], Observed | None]:
    """All is well until the fault begins, which then stays."""
    return lambda minute: observed if minute >= BEGIN else answered()


def growing(*places: str) -> Callable[[int], Observed]:
    def at(minute: int) -> Observed:
        return answered(document(**dict.fromkeys(places, max(minute - BEGIN, 0))))

    return at


def restarting(minute: int) -> Observed:
    starts = max(minute - BEGIN, 0) // 10
    return answered(document(server__started_at=f"2026-11-22T10:{starts:02}:00+00:00"))


def forgetting(minute: int) -> Observed:
    """A hit rate of 80 % for a day, and of 10 % in the last hours."""
    asked, late = minute * 100, max(minute - (HOURS - 2) * 60, 0) * 100
    hit = int((asked - late) * 0.8 + late * 0.1)
    row = {"lookups": minute, "asked_tokens": asked, "l1_tokens": hit, "l2_tokens": 0}
    return answered(document(lookups__by_model={"tiny": row}))


def copier_restarting(minute: int) -> Observed:
    status: dict[str, Any] = document()
    status["transports"]["cuda_ipc"]["devices"][0]["starts"] = 1 + 2 * (minute >= END - 10)
    return answered(status)


FAULTS: dict[str, Callable[[int], Observed | None]] = {
    "KvframeworkDown": lasting(AWAY),
    "KvframeworkNotScraped": lasting(None),
    "KvframeworkRestarts": restarting,
    "KvframeworkArenaNotResident": lasting(*ROWS["arena-not-resident"]),
    "KvframeworkDescriptorsLow": lasting(*ROWS["descriptors-low"]),
    "KvframeworkTierDown": lasting(*ROWS["tier-down"]),
    "KvframeworkTierHangs": lasting(answered(document(l2__1__overdue_s=31.0, l2__1__overdue_call="put"))),
    "KvframeworkInstanceLost": lasting(*ROWS["copier-ended"]),
    "KvframeworkClientRefused": lasting(*ROWS["client-refused"]),
    "KvframeworkClientsLose": lasting(answered(document(losses__recent=[LOST]))),
    "KvframeworkLogNotWritten": lasting(*ROWS["log-not-written"]),
    "KvframeworkObserveEnds": lambda minute: ROWS["observe-ended"][0] if minute == END - 5 else answered(),
    "KvframeworkHandlerFails": lambda minute: answered(
        document(messaging__counters={"errors.run.handler": int(minute >= END - 5)})
    ),
    "KvframeworkTierBug": growing("l2__1__bugs"),
    "KvframeworkTierFull": growing("l2__1__store_failed"),
    "KvframeworkStoresDropped": growing("l1__counters__dropped"),
    "KvframeworkNeverWritten": growing("l2__1__write_lost"),
    "KvframeworkValuesDamaged": growing("l2__1__corrupt"),
    "KvframeworkLoadsRefused": growing("prefetch__refused"),
    "KvframeworkQuarantine": lasting(*ROWS["writer-stopped"]),
    "KvframeworkPinsLapse": growing("l1__counters__lapsed"),
    "KvframeworkCopierRestarts": copier_restarting,
    "KvframeworkUnknownNamespace": growing("lookups__unknown_namespace"),
    "KvframeworkStrangers": growing("messaging__counters__curve_refused"),
    "KvframeworkHitRateFalls": forgetting,
}


def busy(minute: int) -> Observed:
    """A server that works: hits, evictions, stores, clients that come and go, and errors that are the client's own."""
    row = {"lookups": minute, "asked_tokens": minute * 1000, "l1_tokens": minute * 600, "l2_tokens": minute * 100}
    counters = dict.fromkeys(("requests", "responses", "sessions_opened", "sessions_ended", "errors"), minute * 7)
    return answered(
        document(
            lookups__by_model={"tiny": row},
            lookups__misses={"evicted": minute, "never_stored": minute},
            l1__evictions=minute * 5,
            l1__evicted={"room": minute * 5},
            l1__counters__stored=minute * 6,
            l2__1__misses=minute,
            l2__1__evicted=minute,
            messaging__counters={**counters, "errors.request.lease": minute},
            messaging__refused=[{**REFUSED, "what": "LOOKUP", "code": "request.lease", "reason": "unknown"}],
        )
    )


def test_every_alert_has_a_fault() -> None:
    assert set(FAULTS) == {alert.name for alert in ALERTS}


def test_each_alert_fires_for_its_fault_and_no_other_does(tmp_path: Path) -> None:
    minutes = {"KvframeworkHitRateFalls": HOURS * 60}
    timelines = [
        Timeline(name, at, minutes.get(name, END), {name}, 1 if name not in minutes else 5)
        for name, at in FAULTS.items()
    ]
    assert complaints(timelines, tmp_path) == ""


def test_none_fires_while_all_is_well(tmp_path: Path) -> None:
    quiet = Timeline("quiet", lambda _minute: answered(), 3 * 60, ())
    assert complaints([quiet, Timeline("busy", busy, 30 * 60, (), 5)], tmp_path) == ""


def test_a_short_outage_pages_no_one(tmp_path: Path) -> None:
    restart = Timeline("one restart", lambda minute: AWAY if minute == END else restarting(minute // 4), END, ())
    assert complaints([restart], tmp_path) == ""
