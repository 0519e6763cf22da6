"""The ledger's verdict on the reports of engines: a fault explains a complaint, or it is a violation."""

from __future__ import annotations

import time

from tests.core.chaos.events import Complaint, Tally, TimedOut
from tests.core.chaos.ledger import AFTERMATH_S, MOST_TIMEOUTS, Ledger


def late(ledger: Ledger, engine: int, after: float = 0.0) -> str:
    """Report a late call of engine `engine`, `after` seconds from now, and return the violation."""
    now = time.monotonic() + after
    ledger.hear(engine, Complaint("it came late", now, now, excuses=("stop_engine", "stop_server")))
    return ledger.violation


def test_a_complaint_without_a_fault_is_a_violation() -> None:
    ledger = Ledger()
    assert late(ledger, 3) == "engine 3: it came late"
    assert ledger.failed.is_set()


def test_the_first_violation_stays() -> None:
    ledger = Ledger()
    ledger.violate("one")
    ledger.violate("another")
    assert ledger.violation == "one"


def test_a_fault_explains_what_is_said_of_its_time_and_of_its_engine() -> None:
    ledger = Ledger()
    with ledger.work("stop_engine", 1):
        assert not late(ledger, 1)
        assert late(ledger, 2)
    ledger = Ledger()
    with ledger.work("stop_server"):
        assert not late(ledger, 1)
        assert not late(ledger, 2)
    assert not late(ledger, 1, AFTERMATH_S / 2)
    assert late(ledger, 1, AFTERMATH_S + 1)


def test_no_fault_explains_wrong_bytes() -> None:
    ledger = Ledger()
    with ledger.work("stop_engine", 1), ledger.work("kill_server"):
        now = time.monotonic()
        ledger.hear(1, Complaint("WRONG BYTES", now, now))
    assert ledger.violation == "engine 1: WRONG BYTES"


def test_another_fault_explains_nothing() -> None:
    ledger = Ledger()
    with ledger.work("flush_redis"):
        assert late(ledger, 1)


def test_an_engine_waits_for_a_stopped_server_a_few_times_only() -> None:
    ledger = Ledger()
    with ledger.work("stop_server"):
        for _ in range(MOST_TIMEOUTS):
            ledger.hear(1, TimedOut("LOOKUP", time.monotonic()))
            ledger.hear(2, TimedOut("LOOKUP", time.monotonic()))
    ledger.check_silences()
    assert not ledger.violation
    with ledger.work("stop_server"):
        for _ in range(MOST_TIMEOUTS + 1):
            ledger.hear(1, TimedOut("LOOKUP", time.monotonic()))
    ledger.check_silences()
    assert ledger.violation.startswith(f"engine 1: waited {MOST_TIMEOUTS + 1} times")


def test_tallies_add_up() -> None:
    ledger = Ledger()
    ledger.hear(1, Tally(turns=2, loads=1))
    ledger.hear(2, Tally(turns=3))
    assert (ledger.tally["turns"], ledger.tally["loads"]) == (5, 1)
