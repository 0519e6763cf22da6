"""Faults for tests: of a tier from the inside (`FaultyTier`), of a network tier on its real wire (`FaultProxy`).

Neither imports pytest: both serve outside of the kits too.
"""

from kvframework.testing.faults.proxy import WIRE_FAULTS, FaultProxy
from kvframework.testing.faults.tier import TIER_FAULTS, FaultyTier

__all__ = ["TIER_FAULTS", "WIRE_FAULTS", "FaultProxy", "FaultyTier"]
