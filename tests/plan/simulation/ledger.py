"""What became of every object that one tier was to get, counted beside the writer."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from kvframework.api.keys import PackedKey
from kvframework.storage.l2.writer import TierWriter
from tests.plan.simulation.model import must
from tests.plan.simulation.tier import SimTier


class Ledger:
    """Listens to the writer's queue from outside."""

    def __init__(self, writer: TierWriter, tier: SimTier) -> None:
        self.taken = 0
        self.written = 0
        self.entered = 0
        self._writer = writer
        self._tier = tier
        self._counters = writer.store.counters
        self._queue = writer._queue
        self._policy = writer._policy
        tier.told.clear()
        self._listen()

    def check(self) -> None:
        counters, pending = self._counters, self._writer.pending
        ended = self.written + counters["write_lost"] + counters["write_given_up"]
        if self._policy.name == "write_back":
            unwritten = len(self._policy._open)
            must(self.entered == ended + unwritten, f"{self.entered} entered, {ended} ended, {unwritten} unwritten")
        else:
            must(self.taken == ended + pending, f"{self.taken} taken on, {ended} ended, {pending} pending")
        records = counters["stored"] - self.written
        must(0 <= records <= self._tier.told["records"], "the tier was given more than is counted, or less")
        for counter, told in (("misses", "missing"), ("read_failed", "failed")):
            must(counters[counter] <= self._tier.told[told], f"{counter} is more than the tier told")

    def check_at_rest(self) -> None:
        self.check()
        for counter, told in (("misses", "missing"), ("read_failed", "failed")):
            must(self._counters[counter] == self._tier.told[told], f"{counter} is not what the tier told")

    def _listen(self) -> None:
        queue, policy, counters = self._queue, self._policy, self._counters
        offer, answered = queue.offer, queue.answered
        committed = policy.committed

        def offered(keys: Iterable[PackedKey]) -> None:
            keys = list(keys)
            fresh = len({key for key in keys if not queue._holds(key)})
            pending, dropped = queue.pending, counters["write_dropped"]
            offer(keys)
            taken = queue.pending - pending
            must(
                fresh == taken + counters["write_dropped"] - dropped, "something offered was neither taken nor dropped"
            )
            self.taken += taken

        def told(keys: Sequence[PackedKey], stored: Sequence[bool], now: float) -> None:
            answered(keys, stored, now)
            self.written += sum(stored)

        def on_commit(keys: Sequence[PackedKey]) -> Sequence[PackedKey]:
            if policy.name == "write_back":  # whose promotions count as commits
                self.entered += len(set(keys) - policy._open)
            return committed(keys)

        queue.offer, queue.answered = offered, told  # type: ignore[method-assign]
        policy.committed = on_commit  # type: ignore[method-assign]
