"""Tests of a policy's cost: the steps of a call, counted rather than timed, and its memory."""

from __future__ import annotations

import sys
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from statistics import median
from types import FrameType

import pytest

from kvframework.api.eviction import EvictionPolicy
from kvframework.api.keys import PACKED_KEY_BYTES
from kvframework.testing.eviction.kit import MIB, EvictionKit, MakePolicy, fresh_keys, insert

# Calls of each kind whose steps are counted, while the policy holds few objects and while it holds many.
_ROUNDS, _FEW, _MANY = 40, 100, 2000


class CostTests(EvictionKit):
    """Every call runs under the storage lock, which every request of the server needs."""

    @pytest.mark.parametrize("call", ["on_access", "victims", "on_remove", "on_insert"])
    def test_a_call_takes_no_longer_where_more_is_in(self, make_policy: MakePolicy, call: str) -> None:
        """Counts lines of Python, and how often keys are hashed or compared; the median allows occasional clean-up."""
        few, many = (_steps(make_policy(), size)[call] for size in (_FEW, _MANY))
        assert many <= 4 * few + 40, f"{call}: {few:.0f} steps with {_FEW} objects, {many:.0f} with {_MANY}"

    def test_what_has_left_is_forgotten(self, policy: EvictionPolicy) -> None:
        """A policy may remember at most `remembered_keys` keys of removed objects."""

        def churn(times: int) -> None:
            for index in range(times):
                (key,) = fresh_keys(1)
                policy.on_insert(key, MIB)
                policy.on_access(key)
                policy.on_remove(next(policy.victims()) if index % 2 else key)

        insert(policy, fresh_keys(100))
        tracemalloc.start()
        try:
            churn(self.remembered_keys + 1000)
            before = tracemalloc.get_traced_memory()[0]
            churn(6000)
            grown = tracemalloc.get_traced_memory()[0] - before
        finally:
            tracemalloc.stop()
        assert grown < 6000 * 16, f"{grown} bytes are kept of 6000 objects that came and went"


class _CountedKey(bytes):
    """A key whose hashing and comparison are lines of Python, which can be counted."""

    __slots__ = ()

    def __hash__(self) -> int:
        return bytes.__hash__(self)

    def __eq__(self, other: object) -> bool:
        return bytes.__eq__(self, other)


def _steps(policy: EvictionPolicy, size: int) -> dict[str, float]:
    """Return the median steps of a call of each kind while the policy holds `size` objects."""
    keys = [_CountedKey(number.to_bytes(PACKED_KEY_BYTES, "big")) for number in range(size + _ROUNDS)]
    insert(policy, keys[:size])
    counts: dict[str, list[int]] = {call: [] for call in ("on_access", "victims", "on_remove", "on_insert")}
    for turn in range(_ROUNDS):
        with _counted(counts["on_access"]):
            policy.on_access(keys[size - 1 - turn])
        with _counted(counts["victims"]):
            victim = next(policy.victims())
        with _counted(counts["on_remove"]):
            policy.on_remove(victim)
        with _counted(counts["on_insert"]):
            policy.on_insert(keys[size + turn], MIB)
    return {call: median(steps) for call, steps in counts.items()}


@contextmanager
def _counted(into: list[int]) -> Iterator[None]:
    """Append the number of Python lines that the block runs in this thread."""
    steps = 0

    def trace(_frame: FrameType, event: str, _arg: object) -> object:
        nonlocal steps
        steps += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)  # type: ignore[arg-type]
    try:
        yield
    finally:
        sys.settrace(before)
        into.append(steps)
