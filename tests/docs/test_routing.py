"""What the page on routers says to be proven has its tests, and each test of a router is on the page."""

from __future__ import annotations

import re
from pathlib import Path

from tests.support.doc_tables import rows

ROOT = Path(__file__).resolve().parents[2]


def named_in(*names: str) -> set[str]:
    texts = "".join((ROOT / "tests" / "route" / "routers" / name).read_text() for name in names)
    return set(re.findall(r"^def (test_\w+)", texts, re.MULTILINE))


def test_every_case_names_its_tests_and_every_test_is_a_case() -> None:
    proven = rows((ROOT / "docs" / "routing.md").read_text(), "Proven")
    dynamo = {each for _, cell, _ in proven for each in re.findall(r"`(test_\w+)`", cell)}
    llmd = {each for _, _, cell in proven for each in re.findall(r"`(test_\w+)`", cell)}
    assert all("`test_" in one + other for _, one, other in proven)
    assert dynamo == named_in("test_dynamo.py", "test_dynamo_churn.py")
    assert llmd == named_in("test_llmd.py", "test_decoders.py")
