"""Owns the tier plugin under measurement: the real one, made as a server makes it, without anything of the core."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from kvframework.api import Outcome, PackedKey, TableContext, Tier, TierProvider
from kvframework.bench.errors import BenchFailed, BenchUnavailable
from kvframework.config import PluginTable
from kvframework.errors import PluginError
from kvframework.registry import PluginRegistry, resolve_table

WHERE = "bench l2"


@contextmanager
def open_tier(registry: PluginRegistry, name: str, options: Mapping[str, object]) -> Iterator[Tier]:
    """Closed on the way out. Raises `BenchUnavailable`."""
    check_plugin(registry, "tier", name)
    provider, made = resolve_table(registry, PluginTable(name, dict(options), WHERE), TierProvider)
    tier = provider.create(made, TableContext(WHERE))
    try:
        yield tier
    finally:
        tier.close()


def check_plugin(registry: PluginRegistry, kind: str, name: str) -> None:
    """Raises `BenchUnavailable` unless it can run here."""
    try:
        registry.resolve(kind, name, where=WHERE)
    except PluginError as error:
        raise BenchUnavailable(error.fact, hint=error.hint) from None


def keys_for(count: int, letter: bytes) -> list[PackedKey]:
    """As long as an object's. They differ in their last byte, as digests do."""
    return [letter * 71 + bytes([index]) for index in range(count)]


def expect(answers: Sequence[int | Outcome], wanted: Outcome) -> None:
    """Raises `BenchFailed` if one is another: what failed has no speed. Bytes that were received are FOUND."""
    outcomes = [answer if isinstance(answer, Outcome) else Outcome.FOUND for answer in answers]
    others = [outcome.value for outcome in outcomes if outcome is not wanted]
    if others:
        raise BenchFailed(
            f"{len(others)} of {len(outcomes)} values are not {wanted.value}", available=", ".join(sorted(set(others)))
        )
