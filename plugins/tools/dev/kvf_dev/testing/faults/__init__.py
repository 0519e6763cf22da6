"""Faults for tests: inside any tier (`FaultyTier`), or on the real wire of a network tier (`FaultProxy`).

Neither imports pytest: both are also used outside of the kits.
"""

from kvf_dev.testing.faults.proxy import WIRE_FAULTS, FaultProxy
from kvf_dev.testing.faults.tier import TIER_FAULTS, FaultyTier

__all__ = ["TIER_FAULTS", "WIRE_FAULTS", "FaultProxy", "FaultyTier"]
