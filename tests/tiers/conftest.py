"""What these tests share: the seed, and a Redis."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.redis_server import RedisServer

SEED = "KVFRAMEWORK_TEST_SEED"


@pytest.fixture
def seed() -> int:
    """Of all that is left to chance; a test that fails shows it. `KVFRAMEWORK_TEST_SEED` repeats a run."""
    chosen = int(os.environ.get(SEED) or random.SystemRandom().randrange(1 << 32))
    print(f"{SEED}={chosen}")
    return chosen


@pytest.fixture
def redis(tmp_path: Path) -> Iterator[RedisServer]:
    folder = tmp_path / "redis"
    folder.mkdir()
    with RedisServer(folder) as running:
        yield running
