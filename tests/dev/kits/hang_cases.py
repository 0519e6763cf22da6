"""A kit over plugins that hang. Run by pytest outside of the repository."""

from __future__ import annotations

import itertools
import threading
from collections import deque
from collections.abc import Iterator

import pytest

from kvf_dev.testing import EvictionConformance
from kvf_dev.testing.eviction import MakePolicy
from kvframework.api.eviction import EvictionPolicy, PackedKey


class Waiting(EvictionPolicy):
    """Waits for ever in one of its calls."""

    name = "waiting"

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.keys: dict[PackedKey, None] = {}

    def on_insert(self, key: PackedKey, nbytes: int) -> None:
        with self.lock:
            self.keys[key] = None

    def on_access(self, key: PackedKey) -> None:
        pass

    def on_remove(self, key: PackedKey) -> None:
        with self.lock:
            del self.keys[key]

    def victims(self) -> Iterator[PackedKey]:
        with self.lock:
            yield from self.keys


class TestHoldsItsLockOverYield(EvictionConformance):
    limit_s = 1.0

    @pytest.fixture
    def make_policy(self) -> MakePolicy:
        return Waiting


class TestCannotBeMade(EvictionConformance):
    limit_s = 1.0

    @pytest.fixture
    def make_policy(self) -> MakePolicy:
        threading.Event().wait()
        return Waiting


class TestNativeLoop(EvictionConformance):
    """Nothing in Python runs while it does."""

    limit_s = 1.0

    @pytest.fixture
    def make_policy(self) -> MakePolicy:
        return lambda: deque(itertools.repeat(None), maxlen=0)  # type: ignore[return-value]


class TestLeavesAThread(EvictionConformance):
    limit_s = 1.0

    @pytest.fixture
    def make_policy(self) -> MakePolicy:
        threading.Thread(target=threading.Event().wait, name="forgotten").start()
        return Waiting
