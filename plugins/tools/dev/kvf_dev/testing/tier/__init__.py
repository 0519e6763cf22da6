"""The conformance kit for L2 tiers: tests that every `Tier` must pass. Runs under pytest, in the author's test process.

Name the plugin; the kit finds, checks and creates it as a server does:

    from kvf_dev.testing import TierConformance

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

`TierKit` lists the settings and fixtures. Needs pytest and hypothesis.
"""

from __future__ import annotations

from kvf_dev.testing.tier.capacity import CapacityTests, ExpiryTests, ListingTests
from kvf_dev.testing.tier.concurrency import ConcurrencyTests, DeadlineTests, SharingTests
from kvf_dev.testing.tier.contract import BatchTests, ClaimTests, ContractTests
from kvf_dev.testing.tier.faults import WireFaultTests
from kvf_dev.testing.tier.kit import TierKit
from kvf_dev.testing.tier.lifecycle import CrashTests, LeakTests, LifecycleTests
from kvf_dev.testing.tier.model import ModelTests

__all__ = ["TierConformance", "TierKit"]


# pytest runs the tests of the last base first: those that fill a store, and single values before all made of them.
class TierConformance(
    WireFaultTests,
    ListingTests,
    ExpiryTests,
    CrashTests,
    SharingTests,
    ModelTests,
    LeakTests,
    LifecycleTests,
    ConcurrencyTests,
    DeadlineTests,
    BatchTests,
    ContractTests,
    CapacityTests,
    ClaimTests,
):
    """Base class of an author's test class; see the module.

    Attributes: `use`, `options`, `ttl_options`, `capacity_options`, `shared`, `persistent`, `patience_s`, `grace_s`,
    `time_step_s`, `limit_s`, `examples`. Fixtures: `tier_options`, `tier`, `ttl_tier`, `small_tier`, `faulty_tier`, and
    the method `reopen`. `TierKit` describes each, with its default.

    Keys are random, so the store may hold other values, but no other client may use it: used bytes, files and
    threads are counted."""
