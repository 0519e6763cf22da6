"""examples/routing in a real run: two nodes, four engines, a router, and both policies of the proxy."""

from __future__ import annotations

import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parents[2] / "examples" / "routing"

pytestmark = pytest.mark.torch


def test_the_proxy_is_short() -> None:
    assert len((FOLDER / "proxy.py").read_text().splitlines()) < 140


@pytest.mark.skipif(find_spec("kvf_events") is None, reason="this server tells routers nothing")
def test_requests_sent_by_score_hit_more_than_in_turn() -> None:
    done = subprocess.run(
        [sys.executable, "compare.py"], cwd=FOLDER, capture_output=True, text=True, timeout=280, check=False
    )
    rates = {policy: int(rate) for policy, rate in re.findall(r"hit rate by (\S+): (\d+)%", done.stdout)}
    assert set(rates) == {"round-robin", "score"}, done.stdout + done.stderr
    assert rates["score"] > rates["round-robin"]
    assert rates["score"] >= 60
