"""A tier whose client library runs in a helper process: one that freezes, or keeps the interpreter, is killed.

The public name of `HelperTier`, which lives in the package `kvf_helper_tier` of the core's wheel.
"""

from __future__ import annotations

from kvf_helper_tier import FROZEN_S, START_S, HelperTier
from kvframework.api.tier import RegistersMemory

__all__ = ["FROZEN_S", "START_S", "HelperTier", "RegistersMemory"]
