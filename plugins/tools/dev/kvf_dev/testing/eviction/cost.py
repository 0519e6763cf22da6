"""Tests of a policy's cost: the time of a call, and the memory that it keeps."""

from __future__ import annotations

import time
import tracemalloc
from collections.abc import Callable
from itertools import count, islice

import pytest

from kvf_dev.testing.eviction.kit import MIB, EvictionKit, MakePolicy, fresh_keys, insert, must_offer
from kvframework.api.eviction import EvictionPolicy, RequestFacts
from kvframework.api.keys import PACKED_KEY_BYTES

# Calls of each kind that are timed, and the objects in the policy. Where the time of an insert follows their number, so
# many inserts take minutes; the smaller number shows it in seconds.
_TIMED_ROUNDS, _TIMED_FEW, _TIMED_MANY = 25, 300, (8_000, 30_000)
_SLACK_S, _LONG_S = 60e-6, 1e-3
_CALLS = ["on_access", "on_access_many", "victims", "ten_victims", "on_remove", "on_insert"]


class CostTests(EvictionKit):
    """Every call runs under the storage lock, which every request of the server needs."""

    def test_a_call_of_a_large_policy_is_as_quick(self, make_policy: MakePolicy) -> None:
        """As a list of all objects, a sum or a search makes it slow. The shortest of several calls counts, and a
        difference of some ten microseconds does not."""
        few = _seconds(make_policy(), _TIMED_FEW)
        waits = [f"{call}: {1e3 * taken:.1f} ms" for call, taken in few.items() if taken > _LONG_S]
        assert not waits, f"a call must not block: {'; '.join(waits)}"
        for size in _TIMED_MANY:
            many = _seconds(make_policy(), size)
            slow = [
                f"{call}: {1e6 * few[call]:.0f} us with {_TIMED_FEW} objects, {1e6 * many[call]:.0f} us with {size}"
                for call in _CALLS
                if many[call] > 8 * few[call] + _SLACK_S
            ]
            assert not slow, "; ".join(slow)


def _seconds(policy: EvictionPolicy, size: int) -> dict[str, float]:
    """Return the seconds of the quickest call of each kind while the policy holds `size` objects."""
    taken: dict[str, float] = dict.fromkeys(_CALLS, 1e9)

    def measure(call: str, work: Callable[[], object]) -> object:
        began = time.perf_counter()
        answer = work()
        taken[call] = min(taken[call], time.perf_counter() - began)
        return answer

    # Only keys that are in are used, as the core does.
    keys = [number.to_bytes(PACKED_KEY_BYTES, "big") for number in range(size + _TIMED_ROUNDS)]
    insert(policy, keys[:size])
    inside = dict.fromkeys(keys[:size])
    for new in keys[size:]:
        used, *batch = islice(reversed(inside), 3)
        measure("on_access", lambda used=used: policy.on_access(used))  # type: ignore[misc]
        measure("on_access_many", lambda batch=batch: policy.on_access_many(batch))  # type: ignore[misc]
        victim = measure("victims", lambda: next(policy.victims()))
        measure("ten_victims", lambda: list(islice(policy.victims(), 10)))
        assert isinstance(victim, bytes), f"victims() yields a {type(victim).__name__}, no key of bytes"
        measure("on_remove", lambda victim=victim: policy.on_remove(victim))  # type: ignore[misc]
        del inside[victim]
        measure("on_insert", lambda new=new: policy.on_insert(new, MIB))  # type: ignore[misc]
        inside[new] = None
    return taken


_TIMES = 6000
# More than a counter of 16 bits holds.
_USES = 70_000
_LARGE = 20_000


class MemoryTests(EvictionKit):
    """A policy lives as long as the server."""

    def grown(self, work: Callable[[int], object], before: int) -> int:
        """Return by how many bytes the memory grows while `work` is repeated `_TIMES` times, after `before` times."""
        tracemalloc.start()
        try:
            for index in range(before):
                work(index)
            held = tracemalloc.get_traced_memory()[0]
            for index in range(_TIMES):
                work(index)
            return tracemalloc.get_traced_memory()[0] - held
        finally:
            tracemalloc.stop()

    @pytest.mark.parametrize("leaves", ["evicted", "dropped"])
    @pytest.mark.parametrize("uses", [0, 1, 2, 5])
    def test_what_has_left_is_forgotten(self, policy: EvictionPolicy, uses: int, leaves: str) -> None:
        """A policy may remember at most `remembered_keys` keys of removed objects, however often they were used and
        however they left."""

        def come_and_go(_index: int) -> None:
            (key,) = fresh_keys(1)
            policy.on_insert(key, MIB)
            for use in range(uses):
                if use % 2:
                    policy.on_access_many([key])
                else:
                    policy.on_access(key)
            policy.on_remove(next(policy.victims()) if leaves == "evicted" else key)

        insert(policy, fresh_keys(100))
        grown = self.grown(come_and_go, self.remembered_keys + 1000)
        assert grown < _TIMES * 16, (
            f"{grown} bytes are kept of {_TIMES} objects that came, were used {uses} times and went"
        )

    def test_requests_and_walks_are_not_kept_one_by_one(self, policy: EvictionPolicy) -> None:
        keys, numbers = fresh_keys(100), count()
        insert(policy, keys)

        def use(index: int) -> None:
            policy.on_access(keys[index % 100])
            facts = RequestFacts(use="lookup", at=float(index), request_id=f"request {next(numbers)}")
            policy.on_uses(keys[index % 90 :][:3], facts)
            list(islice(policy.victims(), 2))

        grown = self.grown(use, 4000)
        assert grown < _TIMES * 16, f"{grown} bytes are kept of {_TIMES} requests that used 100 objects, and of walks"
        must_offer(policy, keys)

    def test_an_object_may_be_used_very_often(self, policy: EvictionPolicy) -> None:
        keys = fresh_keys(3)
        insert(policy, keys)
        for _ in range(_USES // 1000):
            policy.on_access_many(keys[:1] * 1000)
        must_offer(policy, keys)

    def test_as_many_objects_as_a_large_l1_holds_are_offered(self, policy: EvictionPolicy) -> None:
        keys = fresh_keys(_LARGE)
        insert(policy, keys)
        for first in range(0, _LARGE, 8192):
            policy.on_access_many(tuple(keys[first : first + 8192]))
        must_offer(policy, keys)
        for key in keys[::2]:
            policy.on_remove(key)
        must_offer(policy, keys[1::2])
