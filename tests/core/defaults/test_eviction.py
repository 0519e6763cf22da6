"""The eviction policy `lru`: what every policy must do, and that what was longest not used leaves first."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvf_dev.testing import EvictionConformance
from kvf_eviction import Lru


class TestLru(EvictionConformance):
    use = "lru"


@given(uses=st.lists(st.integers(0, 5), max_size=40))
def test_what_was_longest_not_used_leaves_first(uses: list[int]) -> None:
    policy, last_use = Lru(), dict[bytes, int]()
    for now, number in enumerate(uses):
        key = bytes([number]) * 72
        if key in last_use:
            policy.on_access(key)
        else:
            policy.on_insert(key, 100)
        last_use[key] = now
    assert list(policy.victims()) == sorted(last_use, key=lambda key: last_use[key])
