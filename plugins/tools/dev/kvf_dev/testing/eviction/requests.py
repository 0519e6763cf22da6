"""Tests of the calls by which the core tells a policy of whole requests, with what is known of them."""

from __future__ import annotations

from itertools import count

import pytest

from kvf_dev.testing.eviction.cost import MemoryTests
from kvf_dev.testing.eviction.kit import MIB, MakePolicy, WatchedPolicy, fresh_keys, must_offer
from kvframework.api.eviction import EvictionPolicy, Hint, RequestFacts, Use, Why

_USES: tuple[Use, ...] = ("store", "lookup", "retrieve", "load", "recovered")
_REASONS: tuple[Why, ...] = ("evicted", "removed", "cleared")
_HINTS: tuple[Hint, ...] = ("", "done", "keep")
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

    @pytest.mark.parametrize("first", _HINTS)
    @pytest.mark.parametrize("then", _HINTS)
    def test_a_hint_hides_no_object(self, policy: EvictionPolicy, first: Hint, then: Hint) -> None:
        """One hint after another, for objects among others; their time passes; all of them leave, and come again."""
        keys = fresh_keys(40)
        hinted, sizes = keys[10:20], [MIB] * 10
        policy.on_inserts(keys[:10], sizes, list(range(10)), _said("", 1.0))
        for turn in range(2):
            at = 100.0 * turn
            policy.on_inserts(hinted, sizes, list(range(10)), _said(first, at, objects=10))
            must_offer(policy, keys[:20])
            policy.on_uses(hinted[:6], _said(then, at + 1.0, objects=6))
            policy.on_uses(hinted[3:8], _said("", at + 2.0))
            must_offer(policy, keys[:20])
            policy.on_removes(hinted[::2], "evicted")
            must_offer(policy, [*keys[:10], *hinted[1::2]])
            policy.on_inserts(hinted[::2], sizes[::2], list(range(5)), _said(then, at + 3.0, objects=5))
            policy.on_uses(keys[:10], _said("", at + 90.0))
            must_offer(policy, keys[:20])
            policy.on_removes(hinted, "cleared")
            must_offer(policy, keys[:10])
        policy.on_inserts(keys[20:], [MIB] * 20, list(range(20)), _said("", 300.0))
        must_offer(policy, [*keys[:10], *keys[20:]])

    def test_a_client_cannot_have_all_that_it_stores_kept(self, make_policy: MakePolicy) -> None:
        """Half of a full L1 should be kept, while others store twice as much as it holds."""
        left = []
        for hint in _HINTS[0], _HINTS[-1]:
            policy, mine, others = WatchedPolicy(make_policy()), fresh_keys(60), fresh_keys(300)
            inside = {*mine, *others[:60]}
            policy.on_inserts(others[:60], [MIB] * 60, list(range(60)), _said("", 0.0, 60))
            policy.on_inserts(mine, [MIB] * 60, list(range(60)), _said(hint, 0.0, 120, objects=60))
            for index, key in enumerate(others[60:]):
                victim = next(policy.victims())
                policy.on_removes([victim], "evicted")
                policy.on_inserts([key], [MIB], [0], _said("", index / 100, 120))
                inside = inside - {victim} | {key}
            left.append(sum(key in inside for key in mine))
        without, hinted = left
        assert hinted <= without + 40, f"{hinted} of 60 objects to be kept stay, of 120 that are in; else {without}"

    def test_requests_are_not_kept_one_by_one(self, policy: EvictionPolicy) -> None:
        keys, numbers = fresh_keys(100), count()
        policy.on_inserts(keys, [MIB] * 100, list(range(100)), RequestFacts(use="store", at=0.0, request_id="first"))

        def use(index: int) -> None:
            facts = RequestFacts(use="lookup", at=float(index), request_id=f"request {next(numbers)}")
            policy.on_uses(keys[index % 90 :][:3], facts)

        grown = self.grown(use, _REQUESTS)
        assert grown < 6000 * 16, f"{grown} bytes are kept of 6000 requests that used 100 objects"
        must_offer(policy, keys)


def _said(hint: Hint, at: float, held: int = 20, objects: int = 0) -> RequestFacts:
    """The facts of a request of its own for so many objects; what should be kept, for half a minute."""
    is_kept = hint == "keep"
    return RequestFacts(
        use="store",
        at=at,
        request_id=f"{hint} {at}",
        hint=hint,
        keep_s=30.0 * is_kept,
        priority=100 * is_kept,
        sizes=[MIB] * objects * is_kept,
        held=held * MIB,
    )
