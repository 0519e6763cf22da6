"""Liveness is the serving loop's; readiness is the table of problems, and a tier that is down decides nothing. Each row
of the failure tables has its answers of /livez and /readyz. Rows whose fault is produced at a real server are in
`test_faults.py`, too."""

from __future__ import annotations

import re

import pytest

from kvf_observe.health import CHECKS, FRESH_S, livez, readyz
from tests.observe import answers
from tests.observe.documents import NOW, answered, document, unanswered
from tests.observe.failures import ROWS

TIER_DOWN = document(l2__1__state="open", l2__1__circuits__read="open", l2__1__last_error="refused")


def test_a_server_where_all_is_well() -> None:
    assert livez(answered(), NOW) == (True, "ok\n")
    assert readyz(answered(), NOW) == (True, "ok\n")
    ok, text = readyz(answered(), NOW, verbose=True)
    assert ok
    assert [line for line in text.splitlines() if line.endswith(" ok")] == [
        f"[+]{name} ok" for check in CHECKS for name in (["l2.0", "l2.1"] if check.name == "l2" else [check.name])
    ]


def test_a_tier_that_is_down_is_a_warning_unless_required() -> None:
    down = answered(TIER_DOWN)
    assert livez(down, NOW).ok
    assert readyz(down, NOW) == (True, "ok\n")
    assert "[~]l2.1 warning: redis is down for reads" in readyz(down, NOW, verbose=True).text
    assert "[-]l2.1 failed: redis is down for reads" in readyz(down, NOW, require=["l2"]).text
    assert not readyz(down, NOW, require=["l2.1"]).ok
    assert not readyz(down, NOW, require=["all"]).ok
    assert readyz(down, NOW, require=["l2.0"]).ok
    assert readyz(down, NOW, require=["all"], exclude=["l2"]).ok


@pytest.mark.parametrize("stale", [False, True])
def test_a_loop_that_does_not_answer_is_neither_alive_nor_ready(stale: bool) -> None:
    silent = answered() if stale else unanswered()
    now = NOW + FRESH_S + 1 if stale else NOW
    assert not livez(silent, now).ok
    assert not readyz(silent, now).ok
    assert not readyz(silent, now, exclude=["l1"]).ok


def test_a_loop_that_answers_without_a_status_is_alive_and_not_ready() -> None:
    half = unanswered("[run.deadline] no answer to REPORT_STATUS", round_trip_s=0.001)
    assert livez(half, NOW).ok
    assert not readyz(half, NOW).ok


def test_before_the_first_poll_nothing_is_known() -> None:
    from kvf_observe.poller import Observed

    assert not livez(Observed(), NOW).ok
    assert not readyz(Observed(), NOW).ok


def test_a_name_that_is_no_check_is_said() -> None:
    assert "warn: unknown check 'l3'" in readyz(answered(), NOW, verbose=True, exclude=["l3"]).text


def test_a_problem_of_a_newer_server_is_a_warning() -> None:
    newer = document()
    newer["problems"] = [{"where": "warp", "fact": "the core\nis cold"}]
    assert readyz(answered(newer), NOW).ok
    assert "[~]warp warning: the core is cold" in readyz(answered(newer), NOW, verbose=True).text


PROMISED = answers.promised()


def test_every_row_of_the_tables_has_answers() -> None:
    part = answers.PAGE[answers.PAGE.index("## Every failure") : answers.PAGE.index("## The hit rate")]
    tables = re.split(r"\n(?!\|)", part)
    rows = [line for table in tables if answers.COLUMN in table for line in table.splitlines() if "|" in line]
    bodies = [line for line in rows if answers.COLUMN not in line and not line.startswith("|---")]
    assert len(bodies) > 35
    assert [line for line in bodies if not line.startswith('| <a id="')] == []
    assert set(PROMISED) == set(ROWS)
    assert [row for row, promised in PROMISED.items() if not promised] == []


@pytest.mark.parametrize("row", ROWS)
def test_a_row_is_answered_as_promised(row: str) -> None:
    assert [answers.of(observed, NOW) for observed in ROWS[row]] == PROMISED[row]


def test_no_tier_ends_a_server() -> None:
    tiers = {row: promised for row, promised in PROMISED.items() if row.startswith("tier-")}
    assert len(tiers) > 6
    assert {(each.livez, each.readyz) for promised in tiers.values() for each in promised} == {(200, 200)}
