"""Tests of the calls by which the core tells a policy of whole requests, with what is known of them."""

from __future__ import annotations

from itertools import count

import pytest

from kvframework.api.eviction import EvictionPolicy, RequestFacts, Use, Why
from kvframework.testing.eviction.kit import MIB, fresh_keys, must_offer
from kvframework.testing.eviction.memory import MemoryTests

_USES: tuple[Use, ...] = ("store", "lookup", "retrieve", "load", "recovered")
_REASONS: tuple[Why, ...] = ("evicted", "removed", "cleared")
# More than a policy may remember of requests, one each.
_REQUESTS = 4000


class RequestTests(MemoryTests):
    """A policy may use what the core knows of a request, and must do without."""

    @pytest.mark.parametrize("use", _USES)
    def test_objects_of_a_request_are_in_from_their_insert_on(self, policy: EvictionPolicy, use: Use) -> None:
        """With all facts and with none; two requests at the same instant; a later one uses what is in."""
        keys = fresh_keys(24)
        known = RequestFacts(
            use=use, at=5.0, request_id="r1", tenant="t", chunk_tokens=256, compute_s=1e-4, load_s=1e-9, hint="done"
        )
        policy.on_inserts(keys[:8], [MIB] * 8, list(range(7, -1, -1)), known)
        policy.on_inserts(keys[8:16], [MIB] * 8, [-1] * 8, RequestFacts(use=use, at=5.0))
        must_offer(policy, keys[:16])
        for later in (known, RequestFacts(use="lookup", at=7.5, request_id="r2"), RequestFacts(use=use, at=7.5)):
            policy.on_uses(keys[3:12], later)
            must_offer(policy, keys[:16])
        policy.on_inserts(keys[16:], [1] * 8, [0, 0, 0, 0, 1, 1, 1, 1], RequestFacts(use=use, at=9.0, request_id="r3"))
        must_offer(policy, keys)

    @pytest.mark.parametrize("why", _REASONS)
    def test_objects_leave_for_any_reason(self, policy: EvictionPolicy, why: Why) -> None:
        keys = fresh_keys(12)
        facts = RequestFacts(use="store", at=0.0, request_id="r")
        for turn in range(3):  # what left may come again
            policy.on_inserts(keys, [MIB] * 12, list(range(12)), facts)
            policy.on_uses(keys[:turn], facts)
            policy.on_removes(keys[2:9], why)
            must_offer(policy, [*keys[:2], *keys[9:]])
            policy.on_removes([*keys[:2], *keys[9:]], why)
            must_offer(policy, [])

    def test_asking_what_it_admits_changes_nothing(self, policy: EvictionPolicy) -> None:
        """What is admitted may still not come, and what is refused may come by another request."""
        keys = fresh_keys(30)
        facts = RequestFacts(use="store", at=0.0, request_id="r", chunk_tokens=16)
        policy.on_inserts(keys[:10], [MIB] * 10, list(range(10)), facts)
        for _ in range(3):
            policy.admits(keys[10:20], [MIB] * 10, list(range(10)), facts)
            policy.admits(keys[20:21], [MIB], [-1], RequestFacts(use="load", at=0.0))
            must_offer(policy, keys[:10])
        policy.on_inserts(keys[10:], [MIB] * 20, list(range(20)), facts)
        must_offer(policy, keys)

    def test_requests_are_not_kept_one_by_one(self, policy: EvictionPolicy) -> None:
        keys, numbers = fresh_keys(100), count()
        policy.on_inserts(keys, [MIB] * 100, list(range(100)), RequestFacts(use="store", at=0.0, request_id="first"))

        def use(index: int) -> None:
            facts = RequestFacts(use="lookup", at=float(index), request_id=f"request {next(numbers)}")
            policy.on_uses(keys[index % 90 :][:3], facts)

        grown = self.grown(use, _REQUESTS)
        assert grown < 6000 * 16, f"{grown} bytes are kept of 6000 requests that used 100 objects"
        must_offer(policy, keys)
