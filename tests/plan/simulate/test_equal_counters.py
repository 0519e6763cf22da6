"""The simulator against a real server: the same trace, by a real client over a real socket, ends in the same counters,
number by number. `test_equal_by_policy.py` has more policies, `real_server.py` what makes a number indeterminate."""

from __future__ import annotations

from pathlib import Path

from kvf_plan.simulation import TierSpeed
from kvf_plan.simulation.node import MODEL
from tests.plan.simulate.made import made_trace
from tests.plan.simulate.real_server import CHUNK, both


def test_l1_alone() -> None:
    real, simulated = both(made_trace(150, CHUNK), "l1.eviction.use=two_queues")
    assert real == simulated
    assert real["l1"]["evictions"] > 100
    assert real["lookups"]["by_model"][MODEL]["l1_tokens"] > 1000


def test_l1_and_a_tier(tmp_path: Path) -> None:
    tier = ("l1.eviction.use=lru", "l2.0.use=filesystem", f"l2.0.path={tmp_path / 'l2'}")
    real, simulated = both(made_trace(120, CHUNK), *tier, tiers=(TierSpeed("filesystem", 1e9),))
    assert real == simulated
    assert real["l2"][0]["hits"] > 20
    assert real["lookups"]["by_model"][MODEL]["l2_tokens"] > 300
