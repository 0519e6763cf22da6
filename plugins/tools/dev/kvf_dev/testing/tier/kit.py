"""The settings and fixtures that the author of a tier gives to the kit, and the methods its tests share."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, ClassVar

import pytest

from kvf_dev.testing.faults import FaultProxy
from kvf_dev.testing.kit import NamedKit
from kvf_dev.testing.tier.watched import WatchedTier, parts_of
from kvframework.api.keys import PACKED_KEY_BYTES
from kvframework.api.plugin import Options
from kvframework.api.tier import OPTIONAL_METHODS, Outcome, PackedKey, TableContext, Tier, TierProvider
from kvframework.errors import TierError

FOUND, MISSING, STORED = Outcome.FOUND, Outcome.MISSING, Outcome.STORED
DELETED, FAILED, DAMAGED = Outcome.DELETED, Outcome.FAILED, Outcome.DAMAGED

# The calls that have a deadline. Those of keys are made with one key, and with none.
_OF_KEYS = ("contains", "get_into", "put", "delete", "touch")
EVERY_CALL = (*_OF_KEYS, *(f"{name} of no keys" for name in _OF_KEYS), "ping", "usage", "scan")


class TierKit(NamedKit):
    """Settings and fixtures of the kit. An author must give either `use` or a `tier` fixture."""

    _descriptor = TierProvider
    _where = "[[l2]] #1"

    shared: ClassVar[bool] = False
    """Whether several nodes may use the store of a tier that comes from a fixture. With `use`, the provider says it."""

    persistent: ClassVar[bool] = True
    """Whether values outlive the tier object. With `use`, or with `reopen`, they should."""

    ttl_options: ClassVar[Mapping[str, object] | None] = None
    """With `use`: options, merged over `tier_options`, by which values expire after some seconds."""

    capacity_options: ClassVar[Mapping[str, object] | None] = None
    """With `use`: options, merged over `tier_options`, by which a tier with `usage` holds at most 64 MiB."""

    patience_s: ClassVar[float] = 20.0
    """Seconds to the deadline of every call that should succeed."""

    grace_s: ClassVar[float] = 3.0
    """Seconds by which a call may exceed its deadline, or outlast `close`."""

    time_step_s: ClassVar[float] = 0.05
    """Resolution of the times of use that `scan` reports, in seconds."""

    limit_s: ClassVar[float] = 120.0

    examples: ClassVar[int] = 40
    """How many sequences of calls are compared with a model."""

    # Fixtures that an author may replace

    @pytest.fixture
    def tier_options(self) -> Mapping[str, object]:
        """`options`, as a fixture, for options that depend on other fixtures."""
        return self.options

    @pytest.fixture
    def tier(self) -> Iterator[Tier]:
        """A working tier; a fixture that replaces this one closes its tier."""
        tier = self.open_by_name()
        yield tier
        tier.close()

    @pytest.fixture
    def ttl_tier(self) -> Tier:
        """A tier whose values expire after some seconds."""
        if not self.use or self.ttl_options is None:
            pytest.skip("give `ttl_options`, by which values expire after some seconds, or a fixture `ttl_tier`")
        return self.closed_later(self.open_by_name(self.ttl_options))

    @pytest.fixture
    def small_tier(self) -> Tier:
        """A tier that a test can fill: it holds at most 64 MiB."""
        if not self.use or self.capacity_options is None:
            pytest.skip("give `capacity_options`, by which it holds at most 64 MiB, or a fixture `small_tier`")
        return self.closed_later(self.open_by_name(self.capacity_options))

    @pytest.fixture
    def faulty_tier(self) -> tuple[Tier, FaultProxy]:
        """A tier that reaches its store through a `FaultProxy`. A fixture that replaces this one closes both."""
        pytest.skip("give a fixture `faulty_tier` that returns (tier, proxy), if the tier talks over a socket")

    def reopen(self, tier: Tier) -> Tier:
        """Return another tier over the store of `tier`, which may be closed by now. The kit closes it."""
        if not self.use:
            pytest.skip("give `reopen(tier)`: another tier over the same store")
        return self.open_by_name()

    # What the kit provides to its tests

    _tier_options: Mapping[str, object]
    _opened: list[Tier]

    @pytest.fixture(autouse=True)
    def _kit(self, tier_options: Mapping[str, object]) -> Iterator[None]:
        self._tier_options, self._opened = tier_options, []
        yield
        for tier in self._opened:
            tier.close()

    @property
    def is_shared(self) -> bool:
        """Whether the tier promises that several nodes may use one store."""
        return self.resolve()[0].shared if self.use else self.shared

    @property
    def can_reopen(self) -> bool:
        return bool(self.use) or type(self).reopen is not TierKit.reopen

    def resolve(self, options: Mapping[str, object] | None = None) -> tuple[TierProvider[Any], Options]:
        """Return the provider that `use` names, and its options, with `options` merged over `tier_options`."""
        return super().resolve({**self._tier_options, **(options or {})})

    def open_by_name(self, more: Mapping[str, object] | None = None) -> Tier:
        """Create a tier as a server does, with `more` options."""
        provider, options = self.resolve(more)
        tier: Tier = provider.create(options, TableContext(self._where))
        return tier

    def closed_later(self, tier: Tier) -> Tier:
        """Return `tier`, which is closed when the test ends."""
        self._opened.append(tier)
        return tier

    @pytest.fixture
    def watched(self, tier: Tier) -> WatchedTier:
        """`tier`, with what every call promises checked at every call."""
        return self.watch(tier)

    def watch(self, tier: Tier) -> WatchedTier:
        return WatchedTier(tier, self.patience_s, self.grace_s)

    def another(self, tier: WatchedTier) -> WatchedTier:
        """Return the tier that `reopen` gives, closed when the test ends."""
        other = self.watch(self.reopen(tier.inner))
        self.closed_later(other)
        return other

    def fresh_keys(self, count: int) -> list[PackedKey]:
        """Return keys that the store does not hold; any byte may occur in them."""
        return [os.urandom(PACKED_KEY_BYTES) for _ in range(count)]

    def soon(self) -> float:
        return time.monotonic() + self.patience_s

    def needs(self, tier: Tier, method: str) -> None:
        """Skip the test if the tier lacks an optional method."""
        if method in OPTIONAL_METHODS and method not in tier.capabilities():
            pytest.skip(f"the tier has no {method}")

    def call(self, tier: WatchedTier, name: str, key: PackedKey, deadline: float | None = None) -> object:
        """Make a call of `EVERY_CALL`, if it has a key this one, and return its answer."""
        method, of_none, _ = name.partition(" of no keys")
        self.needs(tier, method)
        keys = [] if of_none else [key]
        arguments: list[object] = [keys] if method in _OF_KEYS else []
        if method in ("get_into", "put"):
            arguments.append(parts_of((bytearray(5) if method == "get_into" else b"other") for _ in keys))
        answer = getattr(tier, method)(*arguments, deadline=deadline)
        return list(answer) if method == "scan" else answer

    def must_raise(self, name: str, call: Callable[[], object], why: str) -> None:
        """Fail unless `call` raises `TierError`."""
        try:
            answer = call()
        except TierError:
            return
        pytest.fail(f"{name} returned {answer!r} instead of raising TierError: {why}")

    def in_threads(self, *works: Callable[[], object], within_s: float | None = None) -> None:
        super().in_threads(*works, within_s=3 * self.patience_s if within_s is None else within_s)
