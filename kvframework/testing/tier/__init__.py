"""Owns the conformance kit for L2 tiers: what every `Tier` must do. Runs under pytest, in the author's test process.

Either name the plugin, which is found, checked and created as a server does it:

    from kvframework.testing import TierConformance

    class TestMyStore(TierConformance):
        use = "mystore"                             # the entry point `tier.mystore`
        options = {"url": "mystore://127.0.0.1"}    # or a fixture `tier_options`

or give a fixture:

    class TestMyStore(TierConformance):
        shared = True                               # several nodes may use one store

        @pytest.fixture
        def tier(self):
            tier = MyStore(...)
            yield tier
            tier.close()

        def reopen(self, tier):
            return MyStore(...)

`TierKit` lists all that can be given. Needs pytest and hypothesis.
"""

from __future__ import annotations

from kvframework.testing.tier.batches import BatchTests
from kvframework.testing.tier.capacity import CapacityTests
from kvframework.testing.tier.claims import ClaimTests
from kvframework.testing.tier.concurrency import ConcurrencyTests
from kvframework.testing.tier.contract import ContractTests
from kvframework.testing.tier.deadlines import DeadlineTests
from kvframework.testing.tier.expiry import ExpiryTests
from kvframework.testing.tier.faults import FaultTests
from kvframework.testing.tier.kit import TierKit
from kvframework.testing.tier.leaks import LeakTests
from kvframework.testing.tier.lifecycle import LifecycleTests
from kvframework.testing.tier.listing import ListingTests
from kvframework.testing.tier.model import ModelTests
from kvframework.testing.tier.sharing import SharingTests
from kvframework.testing.tier.wire import WireFaultTests

__all__ = ["TierConformance", "TierKit"]


class TierConformance(
    ClaimTests,
    ContractTests,
    BatchTests,
    DeadlineTests,
    ConcurrencyTests,
    LifecycleTests,
    LeakTests,
    ModelTests,
    SharingTests,
    ExpiryTests,
    CapacityTests,
    ListingTests,
    FaultTests,
    WireFaultTests,
):
    """Subclass it; see the module.

    Attributes: `use`, `options`, `ttl_options`, `capacity_options`, `shared`, `persistent`, `patience_s`,
    `grace_s`, `time_step_s`, `examples`. Fixtures: `tier_options`, `tier`, `ttl_tier`, `small_tier`, `faulty_tier`, and
    the method `reopen`. docs/plugins/tiers.md has a table of them, `TierKit` their texts.

    Keys are random, so the store may hold other things, but nobody else may be at work on it: used bytes, files and
    threads are counted."""
