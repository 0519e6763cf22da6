"""The simulator against a real server, by eviction and write policy: the same counters, number by number."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvf_plan.simulation import TierSpeed
from kvf_plan.simulation.node import MODEL
from tests.core.registry.fake_distributions import install
from tests.plan.simulate.made import made_trace
from tests.plan.simulate.real_server import CHUNK, both
from tests.support.redis_server import RedisServer

EXAMPLE = Path(__file__).resolve().parents[3] / "examples" / "kvf-s3fifo"
EVICTIONS = ("lru", "two_queues", "s3fifo")


@pytest.fixture
def s3fifo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The example's distribution, as pip would install it."""
    entry_points = dict(re.findall(r'^"([\w.]+)" = "(\w+)"$', (EXAMPLE / "pyproject.toml").read_text(), re.MULTILINE))
    site = tmp_path / "site"
    site.mkdir()
    install(site, "kvf-s3fifo", entry_points, {"kvf_s3fifo": (EXAMPLE / "kvf_s3fifo.py").read_text()})
    monkeypatch.syspath_prepend(str(site))
    monkeypatch.setenv("PYTHONPATH", str(site))
    yield
    sys.modules.pop("kvf_s3fifo", None)


@pytest.mark.usefixtures("s3fifo")
@pytest.mark.parametrize("eviction", EVICTIONS)
def test_l1_alone(eviction: str) -> None:
    real, simulated = both(made_trace(200, CHUNK), f"l1.eviction.use={eviction}")
    assert real == simulated
    assert real["l1"]["evictions"] > 200
    assert real["lookups"]["by_model"][MODEL]["l1_tokens"] > 1000


# Settings with which the numbers are those of any run: what leaves at a watermark depends on when the server ticks
# unless it leaves in the order of its last use and of its writes, and no more than has to.
POLICIES = {
    "write_through": (),
    "write_through_selective": (),
    "write_back": ("l1.high_watermark=0.8", "l1.low_watermark=0.8", "l2.0.writes=1"),
}
BOTH = [
    (eviction, policy)
    for eviction in EVICTIONS
    for policy in POLICIES
    if policy == "write_through" or eviction == "lru"
]


@pytest.mark.usefixtures("s3fifo")
@pytest.mark.parametrize(("eviction", "policy"), BOTH)
def test_l1_and_a_tier(eviction: str, policy: str, tmp_path: Path) -> None:
    tier = ("l2.0.use=filesystem", f"l2.0.path={tmp_path / 'l2'}", f"l2.0.write_policy={policy}")
    settings = (f"l1.eviction.use={eviction}", *tier, *POLICIES[policy])
    real, simulated = both(made_trace(150, CHUNK), *settings, tiers=(TierSpeed("filesystem", 1e9),))
    assert real == simulated
    assert real["l2"][0]["hits"] >= 50
    assert real["lookups"]["by_model"][MODEL]["l2_tokens"] > 500


def test_l1_and_redis(tmp_path: Path) -> None:
    with RedisServer(tmp_path, unix=True) as redis:
        tier = ("l1.eviction.use=lru", "l2.0.use=redis", f"l2.0.url={redis.url}")
        real, simulated = both(made_trace(150, CHUNK), *tier, tiers=(TierSpeed("redis", 1e9),))
    assert real == simulated
    assert real["l2"][0]["hits"] >= 50
