"""The conformance kit for eviction policies: tests that every `EvictionPolicy` must pass. Runs under pytest.

Name the plugin; the kit finds, checks and creates it as a server does:

    from kvf_dev.testing import EvictionConformance

    class TestMyPolicy(EvictionConformance):
        use = "mypolicy"                # the entry point `eviction.mypolicy`
        options = {"share": 0.1}        # as in `[l1.eviction]`, if there are any

or give a fixture that returns a factory, which makes a new policy at each call:

    class TestMyPolicy(EvictionConformance):
        @pytest.fixture
        def make_policy(self):
            return lambda: MyPolicy(share=0.1)

The kit does not judge the choice of victims: test that beside the kit. Needs pytest and hypothesis.
"""

from __future__ import annotations

from kvf_dev.testing.eviction.cost import CostTests, MemoryTests
from kvf_dev.testing.eviction.kit import EvictionKit
from kvf_dev.testing.eviction.offers import OfferTests, ServingTests

__all__ = ["EvictionConformance", "EvictionKit"]


# pytest runs the tests of the last base first: what is offered before what it costs.
class EvictionConformance(MemoryTests, CostTests, ServingTests, OfferTests):
    """Base class of an author's test class; see the module. `EvictionKit` lists the settings and fixtures."""
