"""Each row of the failure tables has its answers of /livez and /readyz. Rows whose fault is produced at a real server
are in `test_faults.py`, too."""

from __future__ import annotations

import re

import pytest

from tests.observe import answers
from tests.observe.documents import NOW
from tests.observe.failures import ROWS

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
