"""The conformance kit for L2 tiers: tests that every `Tier` must pass, see docs/plugins/tiers.md. Runs under pytest, in
the author's test process. Needs pytest and hypothesis.
"""

from __future__ import annotations

from kvf_dev.testing.tier.capacity import CapacityTests, ExpiryTests, ListingTests
from kvf_dev.testing.tier.concurrency import ConcurrencyTests, DeadlineTests, SharingTests
from kvf_dev.testing.tier.contract import BatchTests, ClaimTests, ContractTests, ModelTests
from kvf_dev.testing.tier.kit import TierKit
from kvf_dev.testing.tier.lifecycle import CrashTests, LeakTests, LifecycleTests, WireFaultTests

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
    """Base class of an author's test class, which gives `use`, or a fixture `tier`. `TierKit` has the settings.

    Keys are random, so the store may hold other values, but no other client may use it: used bytes, files and
    threads are counted."""
