"""What these tests share with those of the tiers: the seed of all that is left to chance, and a Redis."""

from __future__ import annotations

from tests.tiers.conftest import redis, seed

__all__ = ["redis", "seed"]
