"""Owns the conformance kit for eviction policies: what every `EvictionPolicy` must do. Runs under pytest.

Either name the plugin, which is found, checked and created as a server does it:

    from kvframework.testing import EvictionConformance

    class TestMyPolicy(EvictionConformance):
        use = "mypolicy"                # the entry point `eviction.mypolicy`
        options = {"share": 0.1}        # as in `[l1.eviction]`, if there are any

or give a fixture that returns what makes one, each time anew:

    class TestMyPolicy(EvictionConformance):
        @pytest.fixture
        def make_policy(self):
            return lambda: MyPolicy(share=0.1)

Which victim is the best is the policy's own affair: test that beside the kit. Needs pytest and hypothesis.
"""

from __future__ import annotations

from kvframework.testing.eviction.cost import CostTests
from kvframework.testing.eviction.kit import EvictionKit
from kvframework.testing.eviction.offers import OfferTests
from kvframework.testing.eviction.serving import ServingTests

__all__ = ["EvictionConformance", "EvictionKit"]


class EvictionConformance(OfferTests, ServingTests, CostTests):
    """Subclass it; see the module. `EvictionKit` lists all that can be given."""
