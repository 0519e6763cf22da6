"""Tiers and prices as they are given."""

from __future__ import annotations

import pytest

from kvf_plan.cli.speeds import parse_tier
from kvf_plan.errors import PlanError
from kvf_plan.planning.offers import GIB, TierOffer, parse_budget, parse_prices, tier_offers


def test_a_tier_is_named_by_a_word_or_its_plugin() -> None:
    assert tier_offers([parse_tier("disk=3GB/s,capacity=4TB,latency=1ms,write=1GB/s")]) == (
        TierOffer("disk", 3e9, 1e9, 1e-3, 4 * 10**12),
    )
    assert tier_offers([parse_tier("filesystem=3GB/s")]) == (TierOffer("disk", 3e9),)
    with pytest.raises(PlanError, match="no configuration is written for a tier 'tape'") as error:
        tier_offers([parse_tier("tape=1GB/s")])
    assert error.value.available == "disk, redis, s3"
    with pytest.raises(PlanError, match="slow="):
        tier_offers([parse_tier("disk=1GB/s,slow=0.5@1s-2s")])
    for still in ("disk=0B/s", "disk=1GB/s,write=0B/s"):
        with pytest.raises(PlanError, match="the rate is 0"):
            tier_offers([parse_tier(still)])


def test_a_tier_is_there_once() -> None:
    several = ["redis=1GB/s", "disk=3GB/s", "disk=10GB/s"]
    assert [each.name for each in tier_offers(map(parse_tier, several))] == ["redis", "disk", "disk"]
    with pytest.raises(PlanError, match="the same tier is given twice: disk"):
        tier_offers(map(parse_tier, [*several, "filesystem=3GB/s"]))


def test_prices_are_all_given_or_all_assumed() -> None:
    assumed = parse_prices([], ["disk"])
    assert assumed.assumed
    assert assumed.cost(2 * GIB, "disk", 20 * GIB) == pytest.approx(3.0)
    mine = parse_prices(["dram=4", "disk=0.1"], ["disk"])
    assert mine.cost(2 * GIB, "disk", 20 * GIB) == pytest.approx(10.0)
    assert mine.cost(2 * GIB, "", 0) == 8.0
    with pytest.raises(PlanError, match="missing: disk") as error:
        parse_prices(["dram=4"], ["disk"])
    assert error.value.hint == "--price disk=…"
    for wrong in ("tape=3", "dram", "dram=x", "dram=-1", "dram=nan"):
        with pytest.raises(PlanError):
            parse_prices([wrong], [])


def test_a_budget_is_a_cost_or_a_size_of_dram() -> None:
    assert parse_budget("512GiB") == 512.0
    assert parse_budget("5000") == 5000.0
    for wrong in ("0", "-3", "inf", "nan", "much"):
        with pytest.raises(PlanError):
            parse_budget(wrong)
