"""The settings and fixtures that the author of a tier gives to the kit, and the methods its tests share."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

import pytest

from kvf_dev.testing.faults import FaultProxy
from kvf_dev.testing.kit import must_be_equal
from kvf_dev.testing.making import NamedKit
from kvf_dev.testing.tier.watched import WatchedTier, due, said
from kvframework.api.keys import PACKED_KEY_BYTES
from kvframework.api.plugin import Buffer, Options
from kvframework.api.tier import Outcome, PackedKey, TableContext, Tier, TierProvider
from kvframework.errors import TierError

FOUND, MISSING, STORED = Outcome.FOUND, Outcome.MISSING, Outcome.STORED
DELETED, FAILED, DAMAGED = Outcome.DELETED, Outcome.FAILED, Outcome.DAMAGED


# The names of what `every_call` returns.
EVERY_CALL = (
    *("contains", "get_into", "put", "delete", "ping", "touch", "usage", "scan"),
    *("contains of no keys", "get_into of no keys", "put of no keys", "delete of no keys", "touch of no keys"),
)


class TierKit(NamedKit):
    """Settings and fixtures of the kit. An author must give either `use` or a `tier` fixture."""

    _descriptor = TierProvider
    _where = "[[l2]] #1"

    shared: ClassVar[bool] = False
    """Whether several nodes may use the store of a tier that comes from a fixture. With `use`, the provider says it."""

    persistent: ClassVar[bool] = True
    """Whether values outlive the tier object. With `use`, or with `reopen`, they should."""

    ttl_options: ClassVar[Mapping[str, object] | None] = None
    """With `use`, for a tier whose values expire: options (merged over `tier_options`) by which they do so after some
    seconds."""

    capacity_options: ClassVar[Mapping[str, object] | None] = None
    """With `use`, for a tier that has `usage`: options (merged over `tier_options`) by which the tier holds at most
    64 MiB."""

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

    @property
    def can_reopen(self) -> bool:
        return bool(self.use) or type(self).reopen is not TierKit.reopen

    def watch(self, tier: Tier) -> WatchedTier:
        return WatchedTier(tier, self.grace_s)

    def reopened(self, tier: Tier) -> WatchedTier:
        """Return the tier that `reopen` gives."""
        return self.watch(self.reopen(tier.inner if isinstance(tier, WatchedTier) else tier))

    def another(self, tier: Tier) -> WatchedTier:
        """Return the tier that `reopen` gives, closed when the test ends."""
        other = self.reopened(tier)
        self.closed_later(other)
        return other

    def fresh_keys(self, count: int) -> list[PackedKey]:
        """Return keys that the store does not hold; any byte may occur in them."""
        return [os.urandom(PACKED_KEY_BYTES) for _ in range(count)]

    def soon(self) -> float:
        return time.monotonic() + self.patience_s

    def store(self, tier: Tier, key: PackedKey, value: bytes) -> None:
        assert tier.put([key], [[memoryview(value)]], deadline=self.soon()) == [STORED]

    def load(self, tier: Tier, key: PackedKey, nbytes: int) -> tuple[int | Outcome, bytes]:
        """Return the number of bytes received, or the outcome, and the content of a buffer of `nbytes`."""
        buffer = bytearray(nbytes)
        (outcome,) = tier.get_into([key], [[memoryview(buffer)]], deadline=self.soon())
        return outcome, bytes(buffer)

    def must_answer(self, tier: Tier, key: PackedKey, nbytes: int, expected: int | Outcome) -> None:
        """Fail unless a get into `nbytes` ends so."""
        outcome, _ = self.load(tier, key, nbytes)
        assert outcome == expected, f"get_into of {nbytes} bytes answered {said(outcome)}; {due(expected)}"

    def must_load(self, tier: Tier, key: PackedKey, value: bytes, why: str = "") -> None:
        """Fail unless `value` is found."""
        outcome, found = self.load(tier, key, len(value))
        assert outcome == len(value), f"{f'{why}: ' if why else ''}get_into answered {said(outcome)}; {due(len(value))}"
        self.must_be([found], [value], why or "other bytes")

    def must_be(self, found: Sequence[Buffer], expected: Sequence[Buffer], why: str = "other bytes") -> None:
        """Fail unless these bytes are equal."""
        for one, other in zip(found, expected, strict=True):
            must_be_equal(one, other, why)

    def parts_of(self, buffers: Sequence[bytes | bytearray]) -> list[list[memoryview]]:
        return [[memoryview(buffer)] for buffer in buffers]

    def calls(self, tier: Tier, key: PackedKey, deadline: Callable[[], float]) -> dict[str, Callable[[], object]]:
        """Return every call that answers with outcomes, on one key, by its name."""
        return _batch_calls(tier, [key], deadline)

    def every_call(self, tier: Tier, key: PackedKey, deadline: Callable[[], float]) -> dict[str, Callable[[], object]]:
        """Return every call that has a deadline, by its name. An optional method that the tier lacks skips the test."""

        def optional(name: str, call: Callable[[], object]) -> Callable[[], object]:
            return call if name in tier.capabilities() else lambda: pytest.skip(f"the tier has no {name}")

        found: dict[str, Callable[[], object]] = {"ping": lambda: tier.ping(deadline=deadline())}
        for of, keys in (("", [key]), (" of no keys", [])):
            found |= {f"{name}{of}": call for name, call in _batch_calls(tier, keys, deadline).items()}
            found[f"touch{of}"] = optional("touch", lambda keys=keys: tier.touch(keys, deadline=deadline()))  # type: ignore[misc]
        found["usage"] = optional("usage", lambda: tier.usage(deadline=deadline()))
        found["scan"] = optional("scan", lambda: list(tier.scan(deadline=deadline())))
        return found

    def must_raise(self, name: str, call: Callable[[], object], why: str) -> None:
        """Fail unless `call` raises `TierError`."""
        try:
            answer = call()
        except TierError:
            return
        pytest.fail(f"{name} answered {answer!r} instead of raising TierError: {why}")

    def in_threads(self, *works: Callable[[], object], within_s: float | None = None) -> None:
        super().in_threads(*works, within_s=3 * self.patience_s if within_s is None else within_s)


def _batch_calls(tier: Tier, keys: list[PackedKey], deadline: Callable[[], float]) -> dict[str, Callable[[], object]]:
    rooms, values = ([[memoryview(each)] for _ in keys] for each in (bytearray(5), b"other"))
    return {
        "contains": lambda: tier.contains(keys, deadline=deadline()),
        "get_into": lambda: tier.get_into(keys, rooms, deadline=deadline()),
        "put": lambda: tier.put(keys, values, deadline=deadline()),
        "delete": lambda: tier.delete(keys, deadline=deadline()),
    }
